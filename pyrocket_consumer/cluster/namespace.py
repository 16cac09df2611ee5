"""Namespaces, version 1: the client renames resources to `namespace%name` in all requests.

Source: NamespaceUtil.
"""

from __future__ import annotations

from pyrocket_consumer.model import DLQ_PREFIX, RETRY_PREFIX

_SEPARATOR = "%"
_SYSTEM_TOPICS = frozenset(
    {
        "TBW102",
        "SCHEDULE_TOPIC_XXXX",
        "BenchmarkTest",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRACE_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC",
    }
)
_SYSTEM_PREFIXES = ("rmq_sys_", "CID_RMQ_SYS_")


def wrap(namespace: str | None, resource: str) -> str:
    """Return the name of a topic or group at the brokers; without a namespace that is the same name.

    A retry or dead-letter prefix stays in front. Names that have the namespace already, and system names, stay
    unchanged.
    """
    if not namespace or not resource or is_system(resource):
        return resource
    prefix, name = _split(resource)
    if name.startswith(namespace + _SEPARATOR):
        return resource
    return f"{prefix}{namespace}{_SEPARATOR}{name}"


def unwrap(namespace: str | None, resource: str) -> str:
    """Return the name without `namespace`; a name of another namespace is unchanged."""
    if not namespace:
        return resource
    prefix, name = _split(resource)
    return prefix + name.removeprefix(namespace + _SEPARATOR)


def is_system(resource: str) -> bool:
    """Return whether a topic or group belongs to the system, which all namespaces share."""
    return resource in _SYSTEM_TOPICS or resource.startswith(_SYSTEM_PREFIXES)


def _split(resource: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if resource.startswith(prefix):
            return prefix, resource.removeprefix(prefix)
    return "", resource
