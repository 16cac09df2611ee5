"""Virtual time for whole programs: threads, locks, sleeps, event loops and sockets on one clock.

Inside `virtual_time()` one thread runs at a time. A thread that waits lets another one run; when all wait, the clock
jumps to the earliest deadline. So nothing sleeps, nothing depends on the speed of the machine, and a seed repeats the
order of threads. Connections are in memory. Each direction is ordered, delayed by up to 2 ms, and split into random
pieces.

The product needs no changes. `install()` replaces the waiting functions of the standard library: `time`, `threading`,
`queue` and `asyncio.new_event_loop`. The replacements are virtual for threads of such a world, and the original ones
for all others. Processes, real sockets, signals and TLS cannot be simulated; they raise `NotVirtual`.
"""

from tests.virtual.scheduler import NotVirtual, Stuck
from tests.virtual.standard_library import install, virtual_time

__all__ = ["NotVirtual", "Stuck", "install", "virtual_time"]
