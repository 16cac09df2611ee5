"""Sockets: the I/O thread, connections, and matching of responses to calls."""
