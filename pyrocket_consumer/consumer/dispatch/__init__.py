"""Workers and listeners: where pulled messages are handed over."""
