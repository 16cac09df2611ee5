"""Run code that was written for other clients; see docs/from-rocketmq-client-python.md.

import pyrocket_consumer.compat
pyrocket_consumer.compat.install()
"""

from __future__ import annotations

import sys
from importlib import import_module, util

from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.text import logger

__all__ = ["install"]

log = logger("compat")

_FACADE = "pyrocket_consumer.compat.rocketmq"
_MODULES = ("client", "consts", "exceptions", "ffi", "utils")


def install() -> None:
    """Make `import rocketmq` import `pyrocket_consumer.compat.rocketmq` from now on, in this process.

    Call it once, before any code imports `rocketmq`; a second call does nothing. Child processes that are spawned,
    not forked, must call it as well. If you may change the import lines, change them instead:
    `from pyrocket_consumer.compat.rocketmq.client import …` needs no `install()`, and type checkers follow it.

    Raises:
        ConfigError: another `rocketmq` is imported already. Call `install()` before that.
    """
    facade = import_module(_FACADE)
    imported = sys.modules.get("rocketmq")
    if imported is facade:
        return
    if imported is not None or any(name.startswith("rocketmq.") for name in sys.modules):
        where = getattr(imported, "__file__", None) or "another package"
        raise ConfigError(f"rocketmq is imported already, from {where}; call compat.install() before that")
    if (other := util.find_spec("rocketmq")) is not None and other.origin is not None:  # not just a folder of that name
        log.warning("import rocketmq now imports %s, and not the package in %s", _FACADE, other.origin)
    for name in _MODULES:
        sys.modules[f"rocketmq.{name}"] = import_module(f"{_FACADE}.{name}")
    sys.modules["rocketmq"] = facade
