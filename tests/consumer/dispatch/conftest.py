"""The topic `orders`."""

from tests.consumer.pulling.conftest import orders

__all__ = ["orders"]
