"""Offsets in a database, stored in the same transactions as the effects of listeners."""
