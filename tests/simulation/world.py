"""A deterministic world: one event loop with virtual time, an in-memory network, and processes that can die.

All random choices come from one seeded source, and time advances only when no callback is ready. So a seed repeats a
run exactly. FoundationDB and TigerBeetle are tested in the same way.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import warnings
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from pyrocket_consumer.testing import EmbeddedCluster
from tests.virtual import transport

CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)

START_S = 1_000_000.0


class Process:
    """A group of tasks that die together. Once dead, it runs no callback. Each callback counts as one step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.frozen_until = 0.0
        self.steps = 0
        self._due: dict[int, list[Callable[[], object]]] = {}

    def __repr__(self) -> str:
        return f"<{self.name}{' dead' if self.dead else ''}>"

    def before(self, step: int, action: Callable[[], object]) -> None:
        """Call `action` from outside just before this step of the process, so between any two of its callbacks."""
        self._due.setdefault(step, []).append(action)

    def step(self) -> None:
        """Note that a callback is about to run."""
        for action in self._due.pop(self.steps, ()):
            contextvars.Context().run(action)
        self.steps += 1


class _NoSelector:
    """A selector that never waits in real time. To wait, it advances the clock."""

    def __init__(self, loop: World) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the simulated world has no callback and no timer left, so some task waits forever")
        if timeout > 0:
            self._loop.now += timeout
        return []

    def get_map(self) -> dict[Any, Any]:
        return {}

    def close(self) -> None: ...


class World(asyncio.BaseEventLoop):
    """The event loop of a simulation."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.now = START_S
        self.random = random.Random(seed)
        self.network = Network(self)
        self.processes: list[Process] = []
        self.loop_errors: list[dict[str, Any]] = []
        self._deferred = 0
        self._dead_tasks: set[asyncio.Task[Any]] = set()
        self._owners: weakref.WeakKeyDictionary[asyncio.Task[Any], Process] = weakref.WeakKeyDictionary()
        self._selector = _NoSelector(self)
        self.set_exception_handler(self._on_loop_error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.loop_errors.append(context)

    # --- hooks of BaseEventLoop

    def time(self) -> float:
        return self.now

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    # --- processes

    def process(self, name: str) -> Process:
        """Create a process."""
        self.processes.append(Process(name))
        return self.processes[-1]

    def create_task(self, work: Any, *, context: contextvars.Context | None = None, **options: Any) -> Any:
        task = super().create_task(work, context=context, **options)
        process = (context or contextvars.copy_context()).get(CURRENT)
        if process is not None:
            self._owners[task] = process
        return task

    def leftovers_of(self, process: Process) -> list[str]:
        """Return the names of the tasks and connections that a process still has."""
        mine = (task for task, owner in self._owners.items() if owner is process and not task.done())
        tasks = sorted(task.get_coro().__qualname__ for task in mine)
        ends = (end for pair in self.network.pairs for end in pair if end.process is process and not end.gone)
        return tasks + [f"connection to {end.get_extra_info('peername')}" for end in ends]

    def end(self, process: Process) -> None:
        """Stop all callbacks of `process`.

        Keep its tasks until the world ends. The garbage collector would otherwise close their coroutines, and run the
        `except` and `finally` blocks of a dead process in the middle of the simulation.
        """
        process.dead = True
        self._dead_tasks |= asyncio.all_tasks(self)

    def _wrap_callback(self, callback: Callable[..., Any], context: contextvars.Context | None) -> Callable[..., Any]:
        process = (context or contextvars.copy_context()).get(CURRENT)
        if process is None:
            return lambda *arguments: callback(*arguments)

        def run(*arguments: Any) -> None:
            if self._defer_if_frozen(process, run, arguments, context) or run.handle.cancelled():
                return
            if not process.dead:
                process.step()
            if not process.dead:
                callback(*arguments)

        return run

    def _attach_handle(self, handle: Any, run: Callable[..., Any]) -> Any:
        """Keep the handle of a callback that may be deferred, because it may be cancelled meanwhile."""
        run.handle = handle  # type: ignore[attr-defined]
        return handle

    def _defer_if_frozen(
        self, process: Process | None, run: Callable[..., Any], arguments: Any, context: contextvars.Context | None
    ) -> bool:
        """Defer a callback of a frozen process until the process continues. Deferred callbacks keep their order."""
        if process is None or process.dead or self.now >= process.frozen_until:
            return False
        self._deferred += 1
        super().call_at(process.frozen_until + 1e-7 * self._deferred, run, *arguments, context=context)
        return True

    def call_soon(self, callback: Any, *arguments: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        run = self._wrap_callback(callback, context)
        return self._attach_handle(super().call_soon(run, *arguments, context=context), run)

    def call_soon_threadsafe(
        self, callback: Any, *arguments: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *arguments, context=context)

    def call_at(
        self, when: float, callback: Any, *arguments: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        run = self._wrap_callback(callback, context)
        return self._attach_handle(super().call_at(when, run, *arguments, context=context), run)

    def call_outside(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call `action` later, outside of all processes, even if the current process dies before."""
        contextvars.Context().run(self.call_later, delay_s, action)

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Run blocking work on the loop after a short delay, in place of a thread."""
        future = self.create_future()
        self.call_later(self.random.uniform(0.0001, 0.005), self._do, future, function, arguments)
        return future

    @staticmethod
    def _do(future: asyncio.Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if future.cancelled():
            return
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)

    def run_as(self, process: Process | None, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` as part of `process`."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, process)
        return self.create_task(work, context=context)

    def destroy_tasks(self) -> None:
        """End the tasks of dead processes, which take no more steps. Tasks that they start meanwhile are dead, too."""
        destroyed = {asyncio.current_task(self)}
        left = Process("what was left")
        left.dead = True
        before = CURRENT.set(left)
        while tasks := asyncio.all_tasks(self) - destroyed:
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with suppress(RuntimeError, asyncio.CancelledError), warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)  # some tasks died before their first step
                    task.get_coro().close()
            destroyed |= tasks
        CURRENT.reset(before)

    def end_all(self, cluster: EmbeddedCluster) -> None:
        """End all tasks. A task of a dead process cannot end, so it is destroyed."""
        self.run_until_complete(self._end_all(cluster))
        self.close()

    async def _end_all(self, cluster: EmbeddedCluster) -> None:
        cluster.shut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)
        self.destroy_tasks()
        if self.loop_errors:
            raise AssertionError(str(self.loop_errors[0]))

    # --- sockets

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return await self.network.connect(protocol_factory, (host, port))

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return self.network.listen(protocol_factory, (host, port))


class _Listener:
    def __init__(self, network: Network, address: tuple[str, int], factory: Any) -> None:
        self._network, self._address = network, address
        self.factory = factory
        self.process = CURRENT.get()
        self.sockets: tuple[Any, ...] = ()

    def close(self) -> None:
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]

    async def wait_closed(self) -> None: ...


class Network:
    """Connections between processes. Each direction keeps its order, has delays, and arrives in odd pieces."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.listeners: dict[tuple[str, int], _Listener] = {}
        self.pairs: list[tuple[Transport, Transport]] = []
        self.slowest_s = 0.002
        self._partitions: list[tuple[Callable[[Transport], bool], float]] = []
        self._ports = iter(range(40_000, 10_000_000))

    def listen(self, factory: Any, address: tuple[str, int]) -> _Listener:
        if address in self.listeners:
            raise OSError(98, f"{address} is in use")
        listener = self.listeners[address] = _Listener(self, address, factory)
        return listener

    async def connect(self, factory: Any, address: tuple[str, int]) -> tuple[Transport, Any]:
        await asyncio.sleep(self.delay())
        listener = self.listeners.get(address)
        if listener is None or (listener.process is not None and listener.process.dead):
            raise ConnectionRefusedError(111, "Connection refused")
        ours = ("127.0.0.1", next(self._ports))
        near = Transport(self, factory(), CURRENT.get(), ours, address)
        context = contextvars.copy_context()
        context.run(CURRENT.set, listener.process)
        far = Transport(self, context.run(listener.factory), listener.process, address, ours)
        near.peer, far.peer = far, near
        self.pairs.append((near, far))
        near.context.run(near.protocol.connection_made, near)
        far.context.run(far.protocol.connection_made, far)
        return near, near.protocol

    def time(self) -> float:
        return self.world.now

    def delay(self) -> float:
        return self.random.uniform(0.0001, self.slowest_s)

    def held_until(self, transport: Transport) -> float:
        """Return the time at which a partition lets bytes of `transport` pass again."""
        now = self.world.now
        self._partitions = [partition for partition in self._partitions if partition[1] > now]
        return max((until for applies, until in self._partitions if applies(transport)), default=now)

    @property
    def is_partitioned(self) -> bool:
        """Whether a partition holds back some connections now."""
        return any(until > self.world.now for _, until in self._partitions)

    def partition(self, applies: Callable[[Transport], bool], seconds: float) -> None:
        """Hold back the bytes of some connections for a while. They arrive afterwards."""
        self._partitions.append((applies, self.world.now + seconds))

    def cut(self, applies: Callable[[Transport], bool]) -> int:
        """Reset some connections. Bytes in flight are lost."""
        self.pairs = [pair for pair in self.pairs if not pair[0].gone]
        chosen = [near for near, _ in self.pairs if applies(near)]
        for each in chosen:
            each.reset()
        return len(chosen)


class Transport(transport.Transport):
    """One end of a connection."""

    def __init__(
        self, network: Network, protocol: Any, process: Process | None, ours: tuple[str, int], theirs: tuple[str, int]
    ) -> None:
        context = contextvars.copy_context()
        context.run(CURRENT.set, process)
        super().__init__(network, protocol, ours, theirs, context)
        self.process = process

    def at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        world = self.network.world
        asyncio.BaseEventLoop.call_at(world, when, _unless_dead(self, what), *arguments, context=self.context)

    def soon(self, what: Callable[..., None], *arguments: Any) -> None:
        self.network.world.call_soon(what, *arguments, context=self.context)

    def abort(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset both ends at once."""
        for end in (self, self.peer):
            if not end.gone:
                end.soon(end.lose, ConnectionResetError(104, "reset"))

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def _unless_dead(end: Transport, what: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        if end.network.world._defer_if_frozen(end.process, run, arguments, end.context):
            return
        if end.process is None or not end.process.dead:
            what(*arguments)

    return run


def kill(world: World, process: Process) -> None:
    """End a process as kill -9 does: stop its callbacks and reset its sockets."""
    world.end(process)
    for near, far in world.network.pairs:
        for end in (near, far):
            if end.process is process and not end.gone:
                end.gone = True
                reset = ConnectionResetError(104, "reset")
                end.peer.at(world.now + world.network.delay(), end.peer.lose, reset)
