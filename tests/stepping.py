"""Interrupt a call of the main thread at each moment at which Python runs signal handlers, one after the other."""

from __future__ import annotations

import dis
import functools
import itertools
import logging
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_CHECKS = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}
"""Python looks for signals at the end of these instructions."""


@functools.cache
def _moments(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions before which a handler may run.

    It skips `logging`, whose lock Ctrl-C can leave taken, and finalizers, which ignore Ctrl-C.
    """
    if code.co_filename == logging.__file__ or code.co_name == "__del__":
        return frozenset()
    instructions = list(dis.get_instructions(code))
    return frozenset(after.offset for before, after in itertools.pairwise(instructions) if before.opname in _CHECKS)


def interrupted_at(moment: int, act: Callable[[], object], handle: Callable[[], object]) -> None:
    """Call `act`, and `handle` in a signal handler at the given moment of it, if it has that many moments."""
    left = moment

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _moments(frame.f_code):
            left -= 1
            if left == 0:
                sys.settrace(None)
                frame.f_trace = None
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before, tracing = signal.signal(signal.SIGUSR1, lambda number, frame: handle()), sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGUSR1, before)


def forget_unstarted_threads() -> None:
    """Remove threads that Ctrl-C has kept from starting. Python lists them although they never run."""
    threading._limbo.clear()  # type: ignore[attr-defined]


def at_each_moment(check: Callable[[int], bool], stride: int = 1) -> int:
    """Call `check(1)`, `check(1 + stride)`, … until it returns False. Return the number of moments."""
    moment = 1
    while check(moment):
        moment += stride
    return moment
