"""Find name servers by the settings of the old package."""

from __future__ import annotations

import http
import http.client
import re
import socket
import threading
import urllib.parse
from contextlib import suppress

from pyrocket_consumer.config import parse_name_servers
from pyrocket_consumer.errors import ConfigError, ConnectError
from pyrocket_consumer.text import escape_controls, safe_repr, truncate

_PREFIX = "http://"
_INSTANCE = re.compile(r"MQ_INST_[^.%]+")

_DOMAIN_TIMEOUT_S = 3.0
_MAX_BYTES = 64 * 1024


def parse_address(address: str) -> tuple[str, str | None]:
    """Return the name servers in `address`, and the namespace if it is an endpoint of an instance.

    Endpoints begin with `http://` and speak the same protocol as any name server. The first part of the host's name,
    `MQ_INST_…`, is the namespace. Source: NameSpaceUtil.
    """
    servers, namespace = [], None
    for part in address.replace(",", ";").split(";"):
        part = part.strip()
        if part.startswith(_PREFIX):
            part = part.removeprefix(_PREFIX).rstrip("/")
            if found := _INSTANCE.search(part.partition(".")[0]):
                namespace = found[0]
        if part:
            servers.append(part)
    return ";".join(servers), namespace


def fetch_name_servers(domain: str) -> str:
    """Return the name servers that a web server names as `host:port;host:port` in the first line of its response.

    Raises:
        ConfigError: `domain` is not an http or https address, or the response names no server.
        ConnectError: the web server does not respond within 3 s, or responds with an error.
    """
    url = domain if "://" in domain else _PREFIX + domain
    request = _DomainRequest(url)
    request.start()
    response = request.wait(_DOMAIN_TIMEOUT_S)
    if not isinstance(response, str):
        why = truncate(escape_controls(str(response)), 200)
        raise ConnectError(url, f"it did not return the name servers: {why}") from response
    servers = response.split()[0] if response.split() else ""
    try:
        parse_name_servers(servers)
    except ConfigError as error:
        raise ConfigError(
            f"{url} names no name servers; it must return host:port, several joined by ;, not {safe_repr(servers)}"
        ) from error
    return servers


class _DomainRequest(threading.Thread):
    """Sends a request to a web server in a thread, because a DNS query and a slow response have no deadline.

    Raises:
        ConfigError: `url` is not an http or https address.
    """

    def __init__(self, url: str) -> None:
        super().__init__(name="rocketmq-domain", daemon=True)
        try:
            parts = urllib.parse.urlsplit(url)
            has_account, host, port = parts.username is not None, parts.hostname, parts.port
        except ValueError:
            has_account, host, port = False, None, None
        if has_account:
            raise ConfigError("a name server domain with an account in it is not allowed; use http://host:8080/nsaddr")
        if not host or parts.scheme not in ("http", "https"):
            raise ConfigError(
                f"name server domain {safe_repr(url)} is not allowed; use for example http://host:8080/nsaddr"
            )
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(host, port, timeout=_DOMAIN_TIMEOUT_S)
        self._path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._socket: socket.socket | None = None
        self._result: str | Exception = TimeoutError("timed out")

    def run(self) -> None:
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            self._connection.request("GET", self._path)
            with self._connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise ConnectionError(f"it answers {response.status}")
                self._result = response.read(_MAX_BYTES).decode()
        except Exception as error:  # any error; wait() returns it
            self._result = error
        finally:
            self._connection.close()

    def wait(self, timeout_s: float) -> str | Exception:
        """Return the response, or the error; cancel the request after `timeout_s`."""
        self.join(timeout_s)
        if not self.is_alive():
            return self._result
        if self._socket is not None:
            with suppress(OSError):  # it was closed meanwhile
                self._socket.shutdown(socket.SHUT_RDWR)
        return TimeoutError("timed out")
