"""The options, marks and fixtures of the whole suite."""
