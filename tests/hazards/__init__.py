"""The hazards of consumer offsets. For each one a check passes with our consumer and fails with a faulty client."""
