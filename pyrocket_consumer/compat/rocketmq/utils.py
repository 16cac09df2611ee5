"""Convert texts and numbers as the old package did, with its errors."""

from __future__ import annotations

from ctypes import ArgumentError

from pyrocket_consumer.compat.rocketmq.exceptions import NullPointerException, RocketMQException
from pyrocket_consumer.text import safe_repr

__all__ = ["maybe_decode", "to_bytes", "to_number", "to_text"]


def maybe_decode(val: str | bytes) -> str:
    """Return `val` as text; bytes are UTF-8.

    Raises:
        TypeError: it is neither text nor bytes.
    """
    if isinstance(val, bytes):
        return val.decode()
    if isinstance(val, str):
        return val
    raise TypeError(f"a text or bytes is needed, not {type(val).__name__}")


def to_bytes(what: str, value: object) -> bytes:
    """Return a text, as UTF-8, or bytes; `what` names it in errors.

    Raises:
        NullPointerException: it is None.
        ctypes.ArgumentError: it is neither text nor bytes.
        RocketMQException: it is text that UTF-8 cannot carry.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise RocketMQException(f"{what} is not text that UTF-8 can carry: {safe_repr(value)}") from error
    if value is None:
        raise NullPointerException(f"{what} is None; pass a text, or bytes")
    raise ArgumentError(f"{what} must be a text or bytes, not {type(value).__name__} ({safe_repr(value)})")


def to_text(what: str, value: object) -> str:
    """Return a text, or bytes that are UTF-8, as text; `what` names it in errors.

    Raises:
        NullPointerException: it is None.
        ctypes.ArgumentError: it is neither text nor bytes.
        RocketMQException: it is text or bytes that are not UTF-8.
    """
    encoded = to_bytes(what, value)
    if isinstance(value, str):
        return value
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise RocketMQException(f"{what} is not UTF-8: {safe_repr(value)}; encode it as UTF-8") from error


def to_number(what: str, value: object) -> int:
    """Return a whole number; `what` names it in errors.

    Raises:
        ctypes.ArgumentError: it is not a whole number, or is True or False.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    raise ArgumentError(f"{what} must be a whole number, not {type(value).__name__} ({safe_repr(value)})")
