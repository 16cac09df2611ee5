from tests.consumer.pulling.conftest import orders, pytest_pyfunc_call

__all__ = ["orders", "pytest_pyfunc_call"]
