"""A server that means harm, beside one that does not: what a consumer of both must bear. `python -m tests.hostile`."""
