"""The page for those who come from other clients: made, and held against both sides' names."""
