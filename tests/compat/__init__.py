"""Tests of what lets code run here that was written for other clients."""
