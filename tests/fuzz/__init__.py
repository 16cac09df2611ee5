"""Bytes made to hurt, for everything that reads bytes: `python -m tests.fuzz`, see `--help`."""
