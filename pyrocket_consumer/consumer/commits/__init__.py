"""Commits: how offsets reach brokers, files and databases."""
