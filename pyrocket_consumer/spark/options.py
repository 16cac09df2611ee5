"""The options of the data source, checked when `load()` or `save()` is called.

Each value travels to the executors inside pickled settings. Secrets show in no repr.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.model import Subscription

DEFAULT_GROUP = "pyrocket-spark"
"""The group in whose name queues are read when the user names none; it has no progress."""


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Where the cluster is, and how to prove who we are."""

    name_server: str
    namespace: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    security_token: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_ca_file: str | None = None
    request_timeout_s: float = 10.0
    retries: int = 5

    def config(self) -> ClientConfig:
        """Return the settings of a client; made where it is used, because a TLS context cannot travel."""
        context = ssl.create_default_context(cafile=self.tls_ca_file) if self.tls and self.tls_ca_file else self.tls
        return ClientConfig(
            name_server=self.name_server,
            namespace=self.namespace,
            access_key=self.access_key,
            secret_key=self.secret_key,
            security_token=self.security_token,
            tls=context,
            call_timeout_s=self.request_timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What a task must know to read its ranges."""

    client: ClientOptions
    group: str = DEFAULT_GROUP
    selector: Subscription = field(default_factory=lambda: Subscription(""))
    """Which messages of a topic, of any topic: its own topic is empty."""
    pull_batch_size: int = 32
    pulls_in_flight: int = 4
    fail_on_data_loss: bool = True


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    """What a task must know to send its rows."""

    client: ClientOptions
    topic: str | None = None
    send_timeout_s: float = 3.0
    send_retries: int = 2
    max_in_flight: int = 256
    accept_degraded: bool = False
    dedup_properties: bool = True
