"""What is said once, however often it is the case."""

from __future__ import annotations

from pyrocket_consumer.text import logger

log = logger("compat")

_said: set[str] = set()


def say_once(what: str, text: str) -> None:
    """Log `text`, unless something was said about `what` in this process already."""
    if what not in _said:
        _said.add(what)
        log.warning("%s: %s", what, text)
