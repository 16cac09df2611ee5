"""The package twice in one process: with its compiled part and without, to compare what the two read."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter, methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = "pyrocket_consumer"
_COMPILED = f"{PACKAGE}.protocol._accelerator"

library: Path | None = None
"""A build of the compiled part that the first copy uses in place of the installed one."""


class Copy:
    """The modules of one copy, by their names within the package."""

    def __init__(self, pure: bool, library: Path | None = None) -> None:
        """Load the compiled part from `library`, if it is not None."""
        self.pure = pure
        self.library = library
        self._modules: dict[str, ModuleType] = {}
        self._asked: dict[str, ModuleType] = {}

    def __repr__(self) -> str:
        return "in-python" if self.pure else "compiled"

    def module(self, name: str) -> ModuleType:
        """Return a module of this copy, imported when it is first asked for."""
        if name not in self._asked:
            with self._in_place():
                if self.library is not None and _COMPILED not in sys.modules:
                    spec = importlib.util.spec_from_file_location(_COMPILED, self.library)
                    assert spec is not None and spec.loader is not None
                    sys.modules[_COMPILED] = importlib.util.module_from_spec(spec)
                    spec.loader.exec_module(sys.modules[_COMPILED])
                self._asked[name] = importlib.import_module(f"{PACKAGE}.{name}")
        return self._asked[name]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Make imports of the package return this copy."""
        others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == PACKAGE}
        setting = os.environ.pop("PYROCKET_PURE", None)
        os.environ["PYROCKET_PURE"] = "1" if self.pure else "0"
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            self._modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == PACKAGE}
            sys.modules.update(others)
            del os.environ["PYROCKET_PURE"]
            if setting is not None:
                os.environ["PYROCKET_PURE"] = setting


@cache
def copy(*, pure: bool) -> Copy:
    """Return the pure Python copy, or the one with the compiled part.

    Skip the test if the compiled part was not built; in CI it must have been.
    """
    made = Copy(pure, None if pure else library)
    accelerator = made.module("protocol.accelerator")
    if accelerator.ACCELERATED is pure:
        assert os.environ.get("CI") != "true", accelerator.REASON
        pytest.skip(f"there is no compiled part: {accelerator.REASON}")
    return made


ATTRIBUTES = (
    "body",
    "properties",
    "queue",
    "queue_offset",
    "sys_flag",
    "topic",
    "tags",
    "keys",
    "message_id",
    "producer_id",
    "offset_message_id",
    "born_at",
    "stored_at",
    "born_at_ms",
    "stored_at_ms",
    "born_host",
    "store_host",
    "flag",
    "reconsume_times",
    "store_size",
    "body_crc",
    "commit_log_offset",
    "prepared_transaction_offset",
    "is_too_large",
)

NAMES = ("TAGS", "UNIQ_KEY", "RETRY_TOPIC", "nothing", "", "\ufffd", "a\x01", "\x02", "\ud800", "é")


def outcome(call: Callable[[], object]) -> object:
    """Return the result of `call`, or the name and text of its error."""
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def all_of(message: Any, names: Iterable[str] = ()) -> list[object]:
    """Return all attributes of a message, with the errors of those that cannot be read."""
    every = (*NAMES, *names)
    outcomes = [
        outcome(partial(message.property, name)) for name in every
    ]  # before all properties were read, and after
    outcomes += [_plain(outcome(partial(getattr, message, name))) for name in ATTRIBUTES]
    outcomes += [outcome(partial(message.property, name)) for name in every]
    outcomes += [outcome(partial(message.property_bytes, name)) for name in every]
    make, arguments = message.__reduce__()
    return [*outcomes, repr(message), arguments[0], repr(make(*arguments))]


def _plain(value: object) -> object:
    """Return a value without the classes of its copy."""
    return repr(value) if type(value).__module__.startswith(PACKAGE) else value


def grown_kib(work: Callable[[], object], before: int, times: int) -> int:
    """Return how much memory grows when `work` is repeated, after the first calls."""
    resource = pytest.importorskip("resource")

    def peak_after(times: int) -> int:
        for _ in range(times):
            work()
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    return -peak_after(before) + peak_after(times)


def messages_of(which: Copy, data: bytes, most: int | None = None) -> object:
    """Return the messages that `which` copy reads in the body of a pull response, or its error."""
    message, model = which.module("protocol.message"), which.module("model")
    queue = model.MessageQueue("orders", "broker-a", 3)
    read = outcome(lambda: message.decode_messages(data, queue, max_records=most))
    if not isinstance(read, list):
        return read
    names = {name for each in read[:3] for name in _names_in(each)}
    return [all_of(each, sorted(names)) for each in read[:200]], len(read)


def _names_in(message: Any) -> list[str]:
    make, arguments = message.__reduce__()
    properties = outcome(lambda: make(*arguments).properties)
    return list(properties)[:8] if isinstance(properties, dict) else []


def _each_property_of(message: Any) -> object:
    make, arguments = message.__reduce__()
    return [message.property(name) for name in list(make(*arguments).properties)[:3]]


_CORE = (methodcaller("property", "TAGS"), _each_property_of, attrgetter("body"), attrgetter("properties"))


def core_of(which: Copy, data: bytes, most: int) -> object:
    """Return the parts of messages that the compiled part itself reads. This is ten times as fast as `messages_of`."""
    message = which.module("protocol.message")
    try:
        messages = message.decode_messages(data, None, max_records=most)
    except Exception as error:
        return type(error).__name__, str(error)
    read: list[object] = [len(messages)]
    for each in messages[:50]:
        read += each.queue_offset, each.sys_flag, each.store_size
        for part in _CORE:
            try:
                read.append(part(each))
            except Exception as error:
                read.append((type(error).__name__, str(error)))
    return read
