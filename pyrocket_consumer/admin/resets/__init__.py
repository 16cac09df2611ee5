"""Reset the offsets of a group: plan, execution and result."""
