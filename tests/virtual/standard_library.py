"""The standard library's ways to wait, virtual for the threads of a world and unchanged for all others."""

from __future__ import annotations

import _queue
import _thread
import asyncio
import concurrent.futures.thread
import logging
import multiprocessing.util
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from tests.virtual import sockets
from tests.virtual.loop import VirtualLoop
from tests.virtual.primitives import Lock
from tests.virtual.scheduler import ACTIVE, NotVirtual, Scheduler, current

FORBIDDEN = (
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
)
"""Calls that leave the world, because they would wait for something that does not run on its clock."""


@contextmanager
def virtual_time(seed: int = 0) -> Iterator[Scheduler]:
    """Run the block, and every thread that it starts, on a clock that moves only when all of them wait."""
    install()
    world = Scheduler(seed)
    world.enter()
    try:
        yield world
    finally:
        world.leave()


def install() -> None:
    """Replace the standard library's ways to wait. Call this once, before modules that use them are imported."""
    if hasattr(time, "_is_virtual"):
        return
    time._is_virtual = True  # type: ignore[attr-defined]
    _install_clocks()
    _install_threads()
    real_loop = asyncio.new_event_loop

    def new_event_loop() -> asyncio.AbstractEventLoop:
        world = current()
        return real_loop() if world is None else VirtualLoop(world)

    asyncio.new_event_loop = asyncio.events.new_event_loop = new_event_loop
    real_connect = socket.create_connection

    def create_connection(address: Any, timeout: Any = None, *arguments: Any, **options: Any) -> Any:
        if (world := current()) is not None:
            return sockets.connect(world, address, timeout)
        return real_connect(address, *([] if timeout is None else [timeout]), *arguments, **options)

    socket.create_connection = create_connection  # type: ignore[assignment]
    sys.addaudithook(_stay_inside)
    real_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]

    def spawn(*arguments: Any) -> Any:
        _refuse("multiprocessing")
        return real_spawn(*arguments)

    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[attr-defined]


def _stay_inside(event: str, arguments: Any) -> None:
    if event in FORBIDDEN and not _is_local(event, arguments):
        _refuse(event)


def _refuse(what: str) -> None:
    if (world := current()) is not None:
        world.violations.append(what)
        raise NotVirtual(f"{what} in virtual time; mark this test live")


def _is_local(event: str, arguments: Any) -> bool:
    """Return whether an audited call only finds an address of this machine, so that no response follows."""
    if event == "socket.connect":
        return bool(arguments[0].type == socket.SOCK_DGRAM)
    return event == "socket.getaddrinfo" and arguments[0] == socket.gethostname()


def _install_clocks() -> None:
    def clock(real: Callable[..., Any], virtual: Callable[[Scheduler], Any]) -> Callable[..., Any]:
        @wraps(real)
        def read(*arguments: Any) -> Any:
            found = ACTIVE.get(_thread.get_ident())
            return real(*arguments) if found is None else virtual(found[0])

        return read

    for name in ("monotonic", "perf_counter", "clock_gettime"):
        setattr(time, name, clock(getattr(time, name), Scheduler.monotonic))
    for name in ("monotonic_ns", "perf_counter_ns"):
        setattr(time, name, clock(getattr(time, name), lambda world: int(world.monotonic() * 1e9)))
    time.time = clock(time.time, Scheduler.wall)
    time.time_ns = clock(time.time_ns, lambda world: int(world.wall() * 1e9))
    threading._time = queue.time = time.monotonic  # type: ignore[attr-defined]
    real_sleep = time.sleep

    @wraps(real_sleep)
    def sleep(seconds: float) -> None:
        world = current()
        real_sleep(seconds) if world is None else world.sleep(seconds)

    time.sleep = sleep


def _install_threads() -> None:
    real_lock, real_rlock = _thread.allocate_lock, threading.RLock

    def lock() -> Any:
        world = current()
        return real_lock() if world is None else Lock(world)

    def rlock() -> Any:
        return real_rlock() if current() is None else threading._PyRLock()  # type: ignore[attr-defined]

    threading.Lock = threading._allocate_lock = lock  # type: ignore[attr-defined, assignment]
    threading.RLock = rlock  # type: ignore[assignment]

    class SimpleQueue:
        def __new__(cls) -> Any:
            return _queue.SimpleQueue() if current() is None else queue._PySimpleQueue()  # type: ignore[attr-defined]

        def __class_getitem__(cls, item: Any) -> Any:
            return cls

    queue.SimpleQueue = SimpleQueue  # type: ignore[assignment, misc]
    concurrent.futures.thread._global_shutdown_lock = _OutsideLock(real_lock())  # type: ignore[attr-defined]
    logging._lock = _OutsideLock(real_rlock())  # type: ignore[attr-defined]
    logging.Handler.createLock = lambda self: setattr(self, "lock", _OutsideLock(real_rlock()))  # type: ignore[assignment, method-assign]
    logging.lastResort.createLock()  # type: ignore[union-attr]
    for name in ("_start_new_thread", "_start_joinable_thread"):
        if hasattr(threading, name):
            setattr(threading, name, _starting(getattr(threading, name)))
    _install_joins()


class _OutsideLock:
    """A lock for steps that two threads of a world never execute at once. It locks only outside of worlds.

    A thread that held a real one while others of its world run would stop them all.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self) -> None:
        if current() is None:
            self._lock.acquire()

    def release(self) -> None:
        if current() is None:
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: Any) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()


def _starting(begin: Callable[..., Any]) -> Callable[..., Any]:
    def start(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        world = current()
        if world is None:
            return begin(function, *arguments, **options)
        passed = arguments[0] if arguments else ()
        rest = ((),) if arguments else ()
        return world.start(function, passed, lambda run: begin(run, *rest, **options))

    return start


def _install_joins() -> None:
    real_join, real_is_alive = threading.Thread.join, threading.Thread.is_alive

    @wraps(real_join)
    def join(self: threading.Thread, timeout: float | None = None) -> None:
        world, simulated = current(), getattr(self, "_simulated", None)
        if world is not None and simulated is not None and self is not threading.current_thread():
            if not world.join(simulated, timeout):
                return
            timeout = None  # the last steps of a thread take real time
        real_join(self, timeout)

    @wraps(real_is_alive)
    def is_alive(self: threading.Thread) -> bool:
        simulated = getattr(self, "_simulated", None)
        if simulated is not None and simulated.is_done:
            real_join(self)
        elif simulated is not None and (world := current()) is not None:
            world.check_clock()
        return real_is_alive(self)

    threading.Thread.join, threading.Thread.is_alive = join, is_alive  # type: ignore[method-assign]
