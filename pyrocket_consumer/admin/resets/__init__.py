"""Resetting a group: plan, execute, result."""
