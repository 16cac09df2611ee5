"""The group: which queues belong to this member, and what brokers ask it."""
