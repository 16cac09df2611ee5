"""The fixtures of the system tests, and short times for every cluster here."""

from tests.system.conftest import broker, embedded, group, module_cluster, no_thread_is_left, topic

__all__ = ["broker", "embedded", "group", "module_cluster", "no_thread_is_left", "topic"]
