"""The pull loop of each queue."""
