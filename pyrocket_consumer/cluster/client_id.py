"""The client id, which identifies a member within its group. Source: ClientConfig.buildMQClientId."""

from __future__ import annotations

import ipaddress
import os
import socket
import time

from pyrocket_consumer.config import ClientConfig

_DEFAULT_INSTANCE = "DEFAULT"
_LOOPBACK = "127.0.0.1"

# Any address outside the local networks will do. Nothing is sent; the kernel only chooses the source address.
_SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


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
