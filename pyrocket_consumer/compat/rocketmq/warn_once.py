"""Warnings that are logged once per process."""

from __future__ import annotations

from pyrocket_consumer.text import logger

log = logger("compat")

_warned: set[str] = set()


def warn_once(what: str, text: str) -> None:
    """Log `text`, unless this process has logged a warning about `what`."""
    if what not in _warned:
        _warned.add(what)
        log.warning("%s: %s", what, text)
