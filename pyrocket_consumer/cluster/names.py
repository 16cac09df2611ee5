"""Names that brokers see: the client id, which identifies a member of its group, and names in a namespace.

Sources: ClientConfig.buildMQClientId, NamespaceUtil (version 1: requests contain `namespace%name`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time

from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.model import DLQ_PREFIX, RETRY_PREFIX

_DEFAULT_INSTANCE = "DEFAULT"
_LOOPBACK = "127.0.0.1"

# Any address outside the local networks will do. Nothing is sent; the kernel only chooses the source address.
_SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}

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


def make_client_id(config: ClientConfig, broadcasting: bool = False) -> str:
    """Return `<ip>@<instance>[@<unit>]` for a new client.

    The instance name `DEFAULT` becomes `<pid>#<nano time>`, so that every client has its own id. A broadcasting
    consumer keeps `DEFAULT`: its offsets are stored under the id, and must be found again after a restart.
    """
    instance = config.instance_name
    if instance == _DEFAULT_INSTANCE and not broadcasting:
        instance = f"{os.getpid()}#{time.time_ns()}"
    client_id = f"{config.client_ip or local_ip()}@{instance}"
    return f"{client_id}@{config.unit_name}" if config.unit_name else client_id


def local_ip() -> str:
    """Return the address under which other machines reach this one; 127.0.0.1 on a machine without a network.

    It chooses as Java does: first an IPv4 address that is neither 127.* nor 192.168.*, then any IPv4 address, then an
    IPv6 address in brackets.
    """
    return choose_ip(_own_addresses())


def choose_ip(addresses: list[str]) -> str:
    """Return the address that goes into the client id. Source: RemotingUtil.getLocalAddress, NetworkUtil (5.x)."""
    parsed = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
    usable = [each for each in parsed if not (each.is_loopback or each.is_link_local or each.is_unspecified)]
    v4 = [str(each) for each in usable if each.version == 4]
    v6 = [str(each) for each in usable if each.version == 6]
    for address in v4:
        if not address.startswith("192.168."):
            return address
    if v4:
        return v4[-1]
    return f"[{v6[0]}]" if v6 else _LOOPBACK


def _own_addresses() -> list[str]:
    """Return this machine's addresses. Those of the default route are first."""
    found = [address for family in _SOMEWHERE if (address := _address_towards(family)) is not None]
    # `choose_ip` prefers addresses outside 192.168.*. With one of those, resolving the host name adds nothing.
    if choose_ip(found) not in found or choose_ip(found).startswith("192.168."):
        try:
            by_name = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            found += [str(info[4][0]) for info in by_name]
        except OSError:
            pass  # start even if the host name does not resolve
    return found


def _address_towards(family: socket.AddressFamily) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_SOMEWHERE[family], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


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
