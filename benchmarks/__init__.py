"""Benchmarks: one module per question. The results are ratios inside one run."""
