"""All exceptions that the package raises. A text names the object, the cause and a remedy. All can be pickled."""

from __future__ import annotations

from pyrocket_consumer.text import escape_controls, truncate

MOST_OF_A_REMARK = 500
"""The number of characters that an error keeps of a server's remark. The longest real remarks have half of that."""

MOST_OF_A_CONFIG_ERROR = 4000
"""The largest number of characters in the text of a `ConfigError`, because it quotes values of any length."""


class RocketError(Exception):
    """Base of all errors raised by this package. Its text is one printable line, even if a server wrote parts of it."""

    def __str__(self) -> str:
        return escape_controls(super().__str__())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class ConfigError(RocketError, ValueError):
    """A setting or argument is wrong: the text names the value, what is allowed and the remedy."""

    def __init__(self, text: str = "") -> None:
        super().__init__(truncate(text, MOST_OF_A_CONFIG_ERROR))


class ConnectError(RocketError):
    """No connection to an address could be made."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address, self.reason = address, reason

    def __str__(self) -> str:
        return escape_controls(
            f"cannot connect to {self.address}: {self.reason}; check the address and that a server listens there"
        )


class AddressRefused(ConnectError):
    """The client does not connect to an address from a route: it is malformed, or not in `allowed_addresses`."""

    def __str__(self) -> str:
        return escape_controls(f"broker address {self.address!r} is not connected to: {self.reason}")


class ConnectionLost(RocketError):
    """A connection ended while a call waited for its response. The server may or may not have executed the call."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address, self.reason = address, reason

    def __str__(self) -> str:
        return escape_controls(f"connection to {self.address} was lost: {self.reason}")


class RequestTimeout(RocketError):
    """No response arrived before the deadline. The server may or may not have executed the call."""

    def __init__(self, what: str, address: str, timeout_s: float) -> None:
        super().__init__(what, address, timeout_s)
        self.what, self.address, self.timeout_s = what, address, timeout_s

    def __str__(self) -> str:
        return escape_controls(f"{self.what} got no response from {self.address} within {self.timeout_s:.3g} s")


class ProtocolError(RocketError):
    """Bytes do not follow the protocol."""


# Source: protocol, response codes. The same call to the same broker, later, may work.
RETRYABLE_CODES = frozenset({1, 2, 14, 17, 24, 25, 26, 27, 28, 215, 1500})


class BrokerError(RocketError):
    """A broker or name server refused a call. `retryable` is true if the same call may succeed later.

    `remark` contains the first 500 characters of the server's text.
    """

    def __init__(self, code: int, remark: str, address: str, name: str = "") -> None:
        super().__init__(code, remark, address, name)
        self.code, self.remark, self.address, self.name = code, remark, address, name
        self.retryable = code in RETRYABLE_CODES

    def __str__(self) -> str:
        remark = " ".join(self.remark.split()) or "no remark"  # remarks of servers have several lines
        return escape_controls(f"{self.address} answered {self.name or 'code'} ({self.code}): {remark}")


class PermissionDenied(BrokerError):
    """The account or the queue's permission does not allow the call. Check access key and rules."""

    def __init__(self, code: int, remark: str, address: str, name: str = "") -> None:
        super().__init__(code, remark, address, name)
        self.retryable = False  # ACL 1.0 refuses with code 1, which is retryable in all other cases


class FlowControl(BrokerError):
    """The broker is busy and asks the client to slow down. Try again after a moment."""


class RouteNotFound(RocketError):
    """No name server knows a route for the topic."""

    def __init__(self, topic: str, name_servers: str) -> None:
        super().__init__(topic, name_servers)
        self.topic, self.name_servers = topic, name_servers

    def __str__(self) -> str:
        return escape_controls(
            f"no route for topic {self.topic!r} at name server {self.name_servers}; "
            "create the topic, or check its name and that a broker that has it is running"
        )


class OffsetStoreError(RocketError):
    """The offset store could not perform an operation."""


class OffsetStoreLocked(OffsetStoreError):
    """Another process owns the store."""


class OffsetStoreCorrupt(OffsetStoreError):
    """A file of the store is unreadable, and `on_unreadable_store` allows no other copy; the text names the remedy."""


class OffsetStoreUnwritable(OffsetStoreError):
    """The store cannot write to its directory, because it is full, read-only, or belongs to another user.

    If a start raises this, the consumer has not started. Later on, the consumer keeps offsets in memory meanwhile.
    """


class DatabaseError(RocketError):
    """A database that keeps offsets failed or did not respond. The consumer tries again."""

    def __init__(self, database: str, what: str, reason: str) -> None:
        super().__init__(database, what, reason)
        self.database, self.what, self.reason = database, what, reason

    def __str__(self) -> str:
        return escape_controls(f"{self.what}: {self.database} failed: {self.reason}")


class Fenced(RocketError):
    """A transaction is too late: another member has claimed the queue, or its messages were consumed before.

    Let the error propagate, so that the transaction rolls back. The consumer redelivers the messages if necessary.
    """

    def __init__(self, queue: str) -> None:
        super().__init__(queue)
        self.queue = queue

    def __str__(self) -> str:
        return escape_controls(
            f"{self.queue} was claimed by another member, or these messages were consumed before; roll back"
        )


class ClientClosed(RocketError):
    """The client is closed, not started, or was started before a fork. Call `start()`, or create a new one."""


ConsumerClosed = ClientClosed
"""The old name of `ClientClosed`, an alias."""


class SendError(RocketError):
    """A message was not stored. `attempts` has one text for each attempt: the broker and its response.

    `stored` is the number of messages that were stored when several were sent together: the first ones.
    """

    def __init__(self, topic: str, attempts: tuple[str, ...], stored: int = 0) -> None:
        super().__init__(topic, attempts, stored)
        self.topic, self.attempts, self.stored = topic, attempts, stored

    def __str__(self) -> str:
        kept = f" after the first {self.stored}, which are stored" if self.stored else ""
        return escape_controls(f"message to topic {self.topic!r} was not sent{kept}: " + "; ".join(self.attempts))
