"""Bytes to values and back, as pure functions. No I/O, no clock, no state but what an argument holds."""
