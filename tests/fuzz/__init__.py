"""A fuzzer of every decoder: `python -m tests.fuzz`, see `--help`."""
