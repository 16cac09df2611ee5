"""Where the old package's settings say that name servers are."""

from __future__ import annotations

import re
import urllib.error
import urllib.parse
import urllib.request

from pyrocket_consumer.errors import ConfigError, ConnectError
from pyrocket_consumer.text import shown

_PREFIX = "http://"
_INSTANCE = re.compile(r"MQ_INST_[^.%]+")
_NAMESPACE = re.compile(r"^MQ_INST_[^%]+%")

_DOMAIN_TIMEOUT_S = 3.0
_MOST_BYTES = 64 * 1024


def of_address(address: str) -> tuple[str, str | None]:
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


def without_namespace(topic: str) -> str:
    """Return a topic as its users know it."""
    return _NAMESPACE.sub("", topic)


def of_domain(domain: str) -> str:
    """Ask a web server where the name servers are: it answers `host:port;host:port` in its first line.

    Raises:
        ConfigError: it is no http or https address, or its answer names no server.
        ConnectError: it does not answer within 3 s, or refuses.
    """
    url = domain if "://" in domain else _PREFIX + domain
    try:
        parts = urllib.parse.urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_web = False
    if not is_web:
        raise ConfigError(f"name server domain {shown(domain)} is not allowed; use for example http://host:8080/nsaddr")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_DOMAIN_TIMEOUT_S) as answer:
            lines: list[str] = answer.read(_MOST_BYTES).decode().split()
    except (OSError, ValueError) as error:  # URLError is an OSError; what is no UTF-8, a ValueError
        raise ConnectError(url, f"it does not tell where the name servers are: {error}") from error
    if not lines:
        raise ConfigError(f"{url} names no name servers; it must answer host:port, several joined by ;")
    return lines[0]
