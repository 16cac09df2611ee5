"""Benchmarks: one module per question, ratios inside one run as answers."""
