"""Tests of the compatibility with code that was written for other clients."""
