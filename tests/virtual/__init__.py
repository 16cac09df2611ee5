"""Virtual time for whole programs: threads, locks, sleeps, event loops and sockets on one clock.

Inside `virtual_time()` one thread runs at a time. A thread that waits lets another one run; when all wait, the clock
jumps to the earliest deadline. So nothing sleeps, nothing depends on the speed of the machine, and a seed repeats the
order of threads. Connections are in memory: each direction in order, delayed by up to 2 ms, cut into odd pieces.

The product is not changed for it. `install()` replaces what the standard library offers for waiting (`time`,
`threading`, `queue`, `asyncio.new_event_loop`) by versions that are virtual for threads of such a world and the usual
ones for all others. What it cannot simulate (processes, real sockets, signals, TLS) raises `NotVirtual`.
"""

from tests.virtual.scheduler import NotVirtual, Stuck
from tests.virtual.standard_library import install, virtual_time

__all__ = ["NotVirtual", "Stuck", "install", "virtual_time"]
