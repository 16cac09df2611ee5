"""The hazards of consumer offsets: for each one a check that our consumer passes and a faulty client fails."""
