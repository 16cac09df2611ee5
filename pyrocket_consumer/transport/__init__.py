"""Sockets: the I/O thread, connections, and which call an answer belongs to."""
