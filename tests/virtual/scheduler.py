"""Threads that run one at a time, and a clock that moves when all of them wait."""

from __future__ import annotations

import _thread
import gc
import heapq
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

START_S = 1_000_000.0
LONGEST_S = 6 * 3600.0
"""The longest test. Timers of a client never end, even while the test waits for an event that does not occur."""
STEP_S = 1e-6
"""The virtual time to read the clock or take a lock, so that a loop that only does this ends."""
PAUSES = 0.02
"""How often another thread runs at such a step."""
TURN_S = 0.005
"""A thread that polls the clock, a lock or a thread for this long lets another one run, as the interpreter does."""

LEAVING_S = 5.0
"""How long a remaining thread may take to end, in real time."""

_real_time = time.time
_real_lock = _thread.allocate_lock
_get_ident = _thread.get_ident


class NotVirtual(Exception):
    """The test does something that virtual time cannot simulate. It needs the mark `live`."""


class Stuck(AssertionError):
    """Every thread waits without a deadline, or the test waits for an event that does not occur."""


class Ended(BaseException):
    """Raised in the remaining threads when a world ends."""


class SimulatedThread:
    """A real thread that runs only while it holds the turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident = 0
        self.gate = _real_lock()
        self.gate.acquire()
        self.waits = 0
        self.is_waiting = False
        self.was_woken = False
        self.is_done = False
        self.error: BaseException | None = None
        self.joined: list[SimulatedThread] = []


ACTIVE: dict[int, tuple[Scheduler, SimulatedThread]] = {}
"""The world and the thread of each simulated thread that runs, by identity."""


_collecting: list[None] = []
"""Not empty while the garbage collector runs, because no other thread may run in the middle of an interrupted step."""


def _note_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "start":
        _collecting.append(None)
    else:
        _collecting.clear()


gc.callbacks.append(_note_collection)


def current() -> Scheduler | None:
    """Return the world of the calling thread, None outside of worlds."""
    found = ACTIVE.get(_get_ident())
    return None if found is None else found[0]


class Scheduler:
    """One world: its threads, its clock, and the thread that runs. Only that thread accesses it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = START_S
        self._wall_offset = _real_time() - START_S
        self._main = SimulatedThread("MainThread")
        self._turn = self._main
        self._turn_began = START_S
        self._threads = [self._main]
        self._ready: list[SimulatedThread] = []
        self._timers: list[tuple[float, int, SimulatedThread, int]] = []
        self._numbers = count()
        self._limit = START_S + LONGEST_S
        self.is_ending = False
        self._is_interrupted = False
        self.is_broken = False
        self.is_over = False
        self._outer: tuple[Scheduler, SimulatedThread] | None = None
        self.violations: list[str] = []

    # --- the clock

    def monotonic(self) -> float:
        self.check_clock()
        return self.now

    def wall(self) -> float:
        return self.monotonic() + self._wall_offset

    def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        if seconds > LONGEST_S and self.me() is self._main:
            self._limit += seconds
        if seconds < STEP_S:  # a loop of short sleeps must end, too
            self.now += STEP_S
        self.wait(self.now + seconds)

    # --- threads

    def wait(self, deadline: float | None = None) -> bool:
        """Let others run until a thread wakes the calling one (True) or the deadline passes (False)."""
        me = self.me()
        me.waits += 1
        me.is_waiting, me.was_woken = True, False
        if deadline is not None:
            heapq.heappush(self._timers, (deadline, next(self._numbers), me, me.waits))
        self._switch(me)
        return me.was_woken

    def pause(self) -> None:
        """Let another runnable thread run; the caller continues later, at the same virtual time."""
        me = self.me()
        self._ready.append(me)
        self._switch(me)

    def step(self) -> None:
        """Advance the clock a little, and perhaps run another thread, because a thread may never wait."""
        self.now += STEP_S
        if self.random.random() < PAUSES and not _collecting and self._others_can_run():
            self.pause()

    def check_clock(self) -> None:
        """Advance the clock a little; a thread that polls repeatedly lets others run."""
        self.now += STEP_S
        if self.now - self._turn_began > TURN_S and not _collecting and self._others_can_run():
            self.pause()

    def _others_can_run(self) -> bool:
        return bool(self._ready) or (bool(self._timers) and self._timers[0][0] <= self.now)

    def wake(self, thread: SimulatedThread) -> None:
        """Wake `thread` if it waits."""
        if thread.is_waiting:
            thread.is_waiting, thread.was_woken = False, True
            self._ready.append(thread)

    def me(self) -> SimulatedThread:
        """Return the calling thread, for others to wake."""
        found = ACTIVE.get(_get_ident())
        if found is None or found[0] is not self:
            raise NotVirtual("a thread outside of virtual time waits for something inside")
        me = found[1]
        if self.is_ending and me is not self._main:
            raise Ended
        return me

    def start(self, function: Callable[..., Any], arguments: tuple[Any, ...], begin: Callable[..., Any]) -> Any:
        """Run `function` on a simulated thread; `begin` starts the real one."""
        thread = SimulatedThread(f"thread-{len(self._threads)}")
        owner = getattr(function, "__self__", None)
        if is_usual := isinstance(owner, threading.Thread):
            thread.name = owner.name
            owner._simulated = thread  # type: ignore[attr-defined]

        def run() -> None:
            thread.gate.acquire()
            thread.ident = _get_ident()
            ACTIVE[thread.ident] = (self, thread)
            try:
                if not self.is_ending:
                    function(*arguments)
            except BaseException:
                if not self.is_ending:  # else the world ended before the thread started
                    raise
            finally:
                if is_usual and self.is_ending:
                    threading._limbo.pop(owner, None)  # type: ignore[attr-defined]
                self._finish(thread)

        result = begin(run)
        self._threads.append(thread)
        self._ready.append(thread)
        return result

    def _finish(self, thread: SimulatedThread) -> None:
        thread.is_done = True
        del ACTIVE[thread.ident]
        for each in thread.joined:
            self.wake(each)
        self._threads.remove(thread)
        self._run_next(self._main if self.is_ending else self._next())

    def join(self, thread: SimulatedThread, timeout_s: float | None) -> bool:
        """Wait for the end of `thread`. Return whether it has ended."""
        self.check_clock()
        deadline = None if timeout_s is None else self.now + timeout_s
        while not thread.is_done and (deadline is None or self.now < deadline):
            me = self.me()
            thread.joined.append(me)
            try:
                self.wait(deadline)
            finally:
                thread.joined.remove(me)  # its end must not wake another wait
        return thread.is_done

    def _next(self) -> SimulatedThread:
        if self._is_interrupted:
            return self._main
        while self._timers and (self._timers[0][0] <= self.now or not self._ready):
            deadline, _, thread, waits = heapq.heappop(self._timers)
            if thread.is_waiting and thread.waits == waits:
                self.now = max(self.now, deadline)
                thread.is_waiting = False
                self._ready.append(thread)
        if self._ready and self.now < self._limit:
            return self._ready.pop(self.random.randrange(len(self._ready)))
        self._limit = self.now + LONGEST_S  # for fixtures that end now
        self._stop_waiting(self._main)
        self._main.error = Stuck(f"{self.now - START_S:.0f} s have passed and nothing can end this:\n{self.stacks()}")
        return self._main

    def _stop_waiting(self, thread: SimulatedThread) -> None:
        thread.is_waiting = False
        if thread in self._ready:
            self._ready.remove(thread)

    def _switch(self, me: SimulatedThread) -> None:
        chosen = self._next()
        if chosen is not me:
            self._run_next(chosen)
            try:
                me.gate.acquire()
            except BaseException:  # a signal arrived while another thread runs
                self._wait_for_turn(me)
                raise
        self._turn_began = self.now
        if me.error is not None:
            error, me.error = me.error, None
            raise error

    def _wait_for_turn(self, me: SimulatedThread) -> None:
        """Run as soon as the running thread waits. If it does not wait, the world is broken."""
        self.is_broken = self._is_interrupted = True
        self.is_broken = not me.gate.acquire(timeout=0.1 if self._turn is me else LEAVING_S) and self._turn is not me
        self._is_interrupted = False
        self._stop_waiting(me)

    def _run_next(self, thread: SimulatedThread) -> None:
        self._turn = thread
        thread.gate.release()

    def stacks(self) -> str:
        """Return the stack of each thread, without the frames of virtual time."""
        frames, here = sys._current_frames(), os.path.dirname(__file__)
        dumps = []
        for thread in self._threads:
            if (frame := frames.get(thread.ident)) is not None:
                lines = [each for each in traceback.extract_stack(frame) if os.path.dirname(each.filename) != here]
                dumps.append(f"--- {thread.name}\n{''.join(traceback.format_list(lines[-6:]))}")
        return "\n".join(dumps)

    # --- start and end

    def enter(self) -> None:
        """Make the calling thread the first of this world."""
        self._main.ident = _get_ident()
        self._outer = ACTIVE.get(self._main.ident)
        ACTIVE[self._main.ident] = (self, self._main)

    def leave(self) -> None:
        """End every remaining thread: its wait raises."""
        self.is_ending = True
        hook = threading.excepthook
        threading.excepthook = lambda args: None if args.exc_type is Ended else hook(args)
        try:
            runs_on = self._turn if self.is_broken else self._main
            for thread in list(self._threads):
                for _ in range(100):
                    if thread in (self._main, runs_on) or thread.is_done:
                        break
                    thread.error = Ended()
                    thread.is_waiting = False
                    self._run_next(thread)
                    if not self._main.gate.acquire(timeout=LEAVING_S):
                        return  # it waits in real time
        finally:
            threading.excepthook = hook
            self.is_over = True
            ACTIVE.pop(self._main.ident, None)
            if self._outer is not None:
                ACTIVE[self._main.ident] = self._outer
