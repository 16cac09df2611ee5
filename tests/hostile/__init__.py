"""Attacks that a consumer between a malicious and an honest server must withstand: `python -m tests.hostile`."""
