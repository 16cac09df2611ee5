"""The queues that this member holds: begin, move, end."""
