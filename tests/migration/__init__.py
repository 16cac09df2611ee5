"""Tests and tables of the page for users of other clients."""
