"""The ids of messages in the tables of a `DatabaseOffsets`, in a form that all databases can store."""

from __future__ import annotations

from hashlib import blake2b, sha256

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.message import Message

MAX_KEY_CHARACTERS = 255


def id_of(message: Message) -> str:
    """Return the id of a message for the table of offsets. Long, odd and damaged ids fit, too."""
    try:
        return _shorten_id(message.message_id)
    except ProtocolError:
        return _shorten_id(f"damaged:{message.queue}:{message.queue_offset}")


def inbox_id_of(message: Message) -> str | None:
    """Return an id that only copies of this message share, or None if there is no such id.

    The message id alone is not enough. A message forwarded to another topic may keep its id, and any producer can
    reuse a known id. Some clients give all messages of a batch the same id.
    """
    try:
        name, body = message.producer_id, message.body
    except ProtocolError:
        return None
    if name is None:
        return None
    proof = blake2b(f"{message.topic}\0{name}\0".encode(errors="surrogatepass") + body, digest_size=12).hexdigest()
    return _shorten_id(f"{name}/{proof}")


def _shorten_id(name: str) -> str:
    """Return a unique form of an id that every database can store and compare."""
    if len(name) <= MAX_KEY_CHARACTERS and name.isascii() and name.isprintable() and name == name.strip():
        return name
    return "sha256:" + sha256(name.encode(errors="surrogatepass")).hexdigest()
