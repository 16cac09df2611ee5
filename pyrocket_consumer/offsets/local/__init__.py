"""Offsets in a durable local file."""
