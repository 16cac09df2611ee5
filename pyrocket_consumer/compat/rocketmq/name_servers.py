"""Find name servers by the settings of the old package."""

from __future__ import annotations

import http
import re
import socket
import threading
import urllib.parse
from concurrent.futures import Future
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPSConnection

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
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(host, port, timeout=_DOMAIN_TIMEOUT_S)
    try:
        text = _get(connection, urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, "")))
    except Exception as error:
        why = truncate(escape_controls(str(error) or "timed out"), 200)
        raise ConnectError(url, f"it did not return the name servers: {why}") from error
    servers = text.split()[0] if text.split() else ""
    try:
        parse_name_servers(servers)
    except ConfigError as error:
        raise ConfigError(
            f"{url} names no name servers; it must return host:port, several joined by ;, not {safe_repr(servers)}"
        ) from error
    return servers


def _get(connection: HTTPConnection, path: str) -> str:
    """Return the response of a web server.

    A thread sends the request, because a DNS query and a slow response have no deadline.
    """
    responded: Future[str] = Future()
    sockets: list[socket.socket] = []

    def request() -> None:
        try:
            with closing(connection):
                connection.connect()
                sockets.append(connection.sock)
                connection.request("GET", path)
                with connection.getresponse() as response:
                    if response.status != http.HTTPStatus.OK:
                        raise ConnectionError(f"it answers {response.status}")
                    text = response.read(_MAX_BYTES).decode()
            responded.set_result(text)
        except Exception as error:
            responded.set_exception(error)

    threading.Thread(target=request, name="rocketmq-domain", daemon=True).start()
    try:
        return responded.result(_DOMAIN_TIMEOUT_S)
    finally:
        for each in sockets:
            with suppress(OSError):  # it is closed already, unless the time is over
                each.shutdown(socket.SHUT_RDWR)
