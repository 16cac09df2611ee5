"""The group: the allocation of queues to this member, and the requests of brokers to it."""
