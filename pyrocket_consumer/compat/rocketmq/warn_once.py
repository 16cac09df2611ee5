"""What is said once, however often it is the case."""

from __future__ import annotations

from pyrocket_consumer.text import logger

log = logger("compat")

_warned: set[str] = set()


def warn_once(what: str, text: str) -> None:
    """Log `text`, unless something was said about `what` in this process already."""
    if what not in _warned:
        _warned.add(what)
        log.warning("%s: %s", what, text)
