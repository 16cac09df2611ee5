"""Resets and corrections: how a held queue moves to another offset."""
