"""The facade has every public name of the package that it replaces, as that package's sources define it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from tests.compat.names import differences
from tests.compat.old_package import old_package
from tests.for_each import for_each

MODULES = ("client", "consts", "exceptions", "ffi")
FACADE = "pyrocket_consumer.compat.rocketmq"

LEFT_OUT = {
    "exceptions.dll",  # the handle of a native library; ours is in `ffi` and `client`
    "ffi.MSG_CALLBACK_FUNC",  # types of C functions
    "ffi.SEND_SUCCESS_CALLBACK",
    "ffi.SEND_EXCEPTION_CALLBACK",
    "ffi.QUEUE_SELECTOR_CALLBACK",
    "ffi.TRANSACTION_CHECK_CALLBACK",
    "ffi.LOCAL_TRANSACTION_EXECUTE_CALLBACK",
    "client.MSG_CALLBACK_FUNC",
    "client.TRANSACTION_CHECK_CALLBACK",
    "client.LOCAL_TRANSACTION_EXECUTE_CALLBACK",
}
ADDED = {
    "client.Producer.renew_locks",  # called in forked children
    "client.TransactionMQProducer.renew_locks",
    "client.PushConsumer.renew_locks",
    "client.Producer.set_instance_name",  # of the release after 2.0.0, as are the following
    "client.TransactionMQProducer.set_instance_name",
    "client.Producer.set_message_trace",
    "client.TransactionMQProducer.set_message_trace",
    "client.PushConsumer.set_message_trace",
    "ffi.TraceModel",
}


@pytest.fixture(scope="module")
def old() -> dict[str, str]:
    return {name: (old_package() / "rocketmq" / f"{name}.py").read_text() for name in MODULES}


@pytest.fixture(scope="module")
def ours() -> dict[str, ModuleType]:
    return {name: importlib.import_module(f"{FACADE}.{name}") for name in MODULES}


def test_the_facade_has_every_name_of_the_old_package(old, ours):
    assert differences(old, ours, omitted=LEFT_OUT, added=ADDED) == []


@for_each("name", sorted(LEFT_OUT | ADDED))
def test_listed_names_do_differ(old, ours, name):
    (difference,) = differences(old, ours, omitted=LEFT_OUT - {name}, added=ADDED - {name})
    assert difference.startswith(f"{name}: ")


# --- the comparison can fail

OLD = {
    "ffi": """
from enum import IntEnum
class _CStatus(IntEnum):
    OK = 0
    START_FAILED = 10
class Model(IntEnum):
    ONE = 0
    MANY = 1
""",
    "exceptions": """
from .ffi import _CStatus
def _register(code):
    return lambda cls: cls
class RocketMQException(Exception):
    pass
@_register(_CStatus.START_FAILED)
class StartFailed(RocketMQException):
    def __init__(self, text, line):
        self.line = line
def ffi_check(status_code):
    pass
""",
    "client": """
import sys
from collections import namedtuple
from .ffi import Model
__all__ = ['Base', 'Sender']
PY2 = sys.version_info[0] == 2
Result = namedtuple('Result', ['status', 'offset'])
class Base(object):
    def start(self):
        pass
class Sender(Base):
    def __init__(self, group, timeout=None, expression='*', model=Model.MANY):
        pass
    def __enter__(self):
        pass
    @property
    def name(self):
        pass
    def _private(self):
        pass
""",
}
OURS = {
    "ffi": """
import enum
class Model(enum.IntEnum):
    ONE = 0
    MANY = 1
""",
    "exceptions": """
class RocketMQException(Exception): pass
class StartFailed(RocketMQException):
    line: int
    def __init__(self, text: str, line: int) -> None:
        self.line = line
def ffi_check(status_code: int) -> None:
    if status_code:
        raise {10: StartFailed}.get(status_code, RocketMQException)(*['', 1][: 1 + (status_code == 10)])
""",
    "client": """
from typing import Any, NamedTuple
from old_facade.ffi import Model
__all__ = ("Sender", "Base")
PY2 = False
class Result(NamedTuple):
    status: int
    offset: int
class Base:
    def start(self) -> None: pass
    def __enter__(self) -> Any: pass
class Sender(Base):
    def __init__(self, group: str, timeout: int | None = None, expression="*", model=Model.MANY) -> None: pass
    @property
    def name(self) -> str: pass
""",
}


def facade_of(sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Make modules from sources; they import each other as parts of `old_facade`."""
    modules = {}
    for name, source in sources.items():
        module = modules[name] = ModuleType(f"old_facade.{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(source, module.__dict__)
    return modules


def test_the_facade_may_be_written_differently(monkeypatch):
    assert differences(OLD, facade_of(OURS, monkeypatch)) == []


@for_each(
    "module, text, instead, difference",
    [
        ("client", "class Sender(Base)", "class Sneder(Base)", "client.Sender: is missing"),
        ("client", "class Sender(Base)", "class Sender", "client.Sender: is no Base"),
        ("client", "class Result(NamedTuple)", "class Result", "client.Result: has the fields None"),
        ("client", "    offset: int", "    offest: int", "client.Result: has the fields ('status', 'offest')"),
        ("client", '("Sender", "Base")', '("Sender",)', "client.__all__: is ('Sender',); was ['Base', 'Sender']"),
        ("client", "PY2 = False", "", "client.PY2: is missing"),
        ("client", "group: str, ", "", "client.Sender.__init__: is (self, timeout=None"),
        ("client", "group: str, ", "name: str, ", "client.Sender.__init__: is (self, name, "),
        ("client", "timeout: int | None = None", "timeout=3", "client.Sender.__init__: is (self, group, timeout=3, "),
        ("client", "timeout: int", "*, timeout: int", "client.Sender.__init__: is (self, group, keyword only timeout"),
        ("client", "Model.MANY)", "Model.ONE)", "client.Sender.__init__: is (self, group, timeout=None"),
        ("client", "Model.MANY)", "Model.MANY, **more)", "client.Sender.__init__: is (self, group, "),
        ("client", "def start(self)", "def start(self, wait=False)", "client.Base.start: is (self, wait=False)"),
        ("client", "def __enter__", "def enter", "client.Sender.__enter__: is missing"),
        ("client", "    @property\n", "", "client.Sender.name: is no property"),
        ("client", "    def start", "    @property\n    def start", "client.Base.start: is a property"),
        ("client", "    def start", "    def stop(self): pass\n    def start", "client.Base.stop: was not there"),
        ("client", "class Base", "class More: pass\nclass Base", "client.More: was not there"),
        ("client", "PY2 = False", "def more(): pass\nPY2 = False", "client.more: was not there"),
        (
            "client",
            "from old_facade.ffi import Model",
            "from enum import Enum as Model; Model.MANY = 1",
            "client.Model: is not the one of ffi",
        ),
        ("ffi", "MANY = 1", "MANY = 2", "ffi.Model.MANY: is 2; was 1"),
        ("ffi", "MANY = 1", "MANY = 1; SOME = 3", "ffi.Model.SOME: was not there"),
        ("ffi", "    ONE = 0\n", "", "ffi.Model.ONE: is missing"),
        ("ffi", "IntEnum", "Enum", "ffi.Model: is no IntEnum"),
        ("exceptions", "10: StartFailed", "", "exceptions.ffi_check(10): raises RocketMQException; raised StartFailed"),
        ("exceptions", "{10:", "{11: RuntimeError, 10:", "exceptions.ffi_check(11): raises RuntimeError; "),
        ("exceptions", "    if status_code:", "    if status_code > 10:", "exceptions.ffi_check(1): raises nothing"),
        ("exceptions", "line: int)", "line: int = 0)", "exceptions.StartFailed.__init__: is (self, text, line=0)"),
    ],
)
def test_a_difference_is_reported(monkeypatch, module, text, instead, difference):
    assert text in OURS[module]
    tampered = OURS | {module: OURS[module].replace(text, instead, 1)}
    found = differences(OLD, facade_of(tampered, monkeypatch))
    assert any(line.startswith(difference) for line in found), found


def test_a_missing_module_is_reported(monkeypatch):
    ours = facade_of(OURS, monkeypatch)
    del ours["ffi"]
    assert "ffi: there is no such module" in differences(OLD, ours)


def test_listed_names_may_differ(monkeypatch):
    more = OURS["client"].replace("PY2 = False", "")
    more = more.replace("def start(self)", "def stop(self): pass\n    def start(self, wait=False)")
    ours = facade_of(OURS | {"client": more}, monkeypatch)
    omitted, added = {"client.PY2"}, {"client.Base.stop", "client.Sender.stop", "client.Base.start.wait"}
    assert differences(OLD, ours, omitted=omitted, added=added) == []
    assert len(differences(OLD, ours, omitted=omitted)) == 3


def test_added_parameters_must_be_optional(monkeypatch):
    more = OURS["client"].replace("def start(self)", "def start(self, wait)")
    ours = facade_of(OURS | {"client": more}, monkeypatch)
    (difference,) = differences(OLD, ours, added={"client.Base.start.wait"})
    assert difference == "client.Base.start: what was added must be given"
