"""Where a client connects to: name servers are its user's own word, and what routes name is somebody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from pyrocket_consumer.config import parse_address
from pyrocket_consumer.errors import AddressRefused, ConfigError
from pyrocket_consumer.text import truncate

OnAddressRefused = Callable[[str, str], None]
"""Told of an address that is not connected to, once for each of the first hundred: the address, and why."""

_MAX_NOTIFIED = 100
_MAX_ADDRESS_CHARS = 280  # is told; a host name has 253 characters at most, and a port five


class Addresses:
    """Decides for one client about each address before it is connected to."""

    def __init__(
        self, name_servers: Iterable[str], allowed: Sequence[str] | None, on_refused: OnAddressRefused
    ) -> None:
        self._name_servers = frozenset(name_servers)
        self._allowed = allowed
        self._on_refused = on_refused
        self._notified: set[str] = set()
        self._networks: list[IPv4Network | IPv6Network] = []
        self._hosts: set[tuple[str, int | None]] = set()
        for each in allowed or ():
            try:
                self._networks.append(ip_network(each))
            except ValueError:
                host, port = parse_address(each) if ":" in each else (each, None)
                self._hosts.add((_normalize_host(host), port))

    def resolve(self, address: str) -> tuple[str, int]:
        """Return host and port of `address`.

        Raises:
            AddressRefused: it is no address, or not one of `allowed_addresses`.
        """
        try:
            host, port = parse_address(address)
        except ConfigError:
            raise self._refusal(
                address, "it is not host:port with a port from 1 to 65535; find out who has put it into the route"
            ) from None
        if self._allowed is None or address in self._name_servers or self._is_allowed(host, port):
            return host, port
        raise self._refusal(
            address,
            f"allowed_addresses={list(self._allowed)!r:.300} has no such address; "
            "add it if a broker is there, else find out who has put it into the route",
        )

    def _is_allowed(self, host: str, port: int) -> bool:
        known = _normalize_host(host)
        if (known, None) in self._hosts or (known, port) in self._hosts:
            return True
        try:
            ip = ip_address(host)
        except ValueError:  # a name: what it stands for is not asked, for the next answer may be another one
            return False
        return any(ip in network for network in self._networks)

    def _refusal(self, address: str, why: str) -> AddressRefused:
        error = AddressRefused(truncate(address, _MAX_ADDRESS_CHARS), why)
        if error.address not in self._notified and len(self._notified) < _MAX_NOTIFIED:
            self._notified.add(error.address)
            self._on_refused(error.address, str(error))
        return error


def _normalize_host(host: str) -> str:
    """Return a host as it is compared: an IP address has several spellings, a name two cases."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host.lower()
