"""What messages are called in the tables of a `DatabaseOffsets`: one name each, in a form that all databases have."""

from __future__ import annotations

from hashlib import blake2b, sha256

from pyrocket_consumer.errors import ProtocolError
from pyrocket_consumer.protocol.message import Message

MAX_KEY_CHARACTERS = 255


def id_of(message: Message) -> str:
    """Return the id of a message as the tables have it: what any producer or damage has made of it fits in there."""
    try:
        return _shorten_id(message.message_id)
    except ProtocolError:
        return _shorten_id(f"damaged:{message.queue}:{message.queue_offset}")


def inbox_id_of(message: Message) -> str | None:
    """Return what two copies of one message have in common, and no other message: None if nothing can be.

    Ids alone would not do: one that is forwarded to another topic may keep its id, whoever knows an id can send with
    it, and some clients give those of a batch the same one.
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
    """Return an id in a form that every database has a place for, and tells from all others."""
    if len(name) <= MAX_KEY_CHARACTERS and name.isascii() and name.isprintable() and name == name.strip():
        return name
    return "sha256:" + sha256(name.encode(errors="surrogatepass")).hexdigest()
