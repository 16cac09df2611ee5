"""The addresses that a client may connect to. The user gives name servers, but routes contain addresses of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from pyrocket_consumer.config import parse_address
from pyrocket_consumer.errors import AddressRefused, ConfigError
from pyrocket_consumer.text import truncate

OnAddressRefused = Callable[[str, str], None]
"""Called with a refused address and the reason, once for each of the first hundred addresses."""

_MAX_NOTIFIED = 100
_MAX_ADDRESS_CHARS = 280  # in texts; a host name has at most 253 characters, and a port five


class Addresses:
    """Checks each address before a client connects to it."""

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
            AddressRefused: it is not a valid address, or not one of `allowed_addresses`.
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
        except ValueError:  # a host name: do not resolve it, because the next lookup may return another address
            return False
        return any(ip in network for network in self._networks)

    def _refusal(self, address: str, why: str) -> AddressRefused:
        error = AddressRefused(truncate(address, _MAX_ADDRESS_CHARS), why)
        if error.address not in self._notified and len(self._notified) < _MAX_NOTIFIED:
            self._notified.add(error.address)
            self._on_refused(error.address, str(error))
        return error


def _normalize_host(host: str) -> str:
    """Return a host in one spelling for comparisons: the canonical IP address, or the name in lower case."""
    try:
        return str(ip_address(host))
    except ValueError:
        return host.lower()
