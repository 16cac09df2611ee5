"""Growing pauses between tries."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """The pause after each failure in a row. It begins with `first_s`, and doubles up to `longest_s`.

    No pause follows the first `free` failures, and the first `steady` pauses have the same length. `jitter` is a
    function such as `random.random`; with it, a pause is shortened by up to half, so that clients do not retry at once.

    Use one object for one series of tries, and call `failed` and `reset`. To count elsewhere, share an object and call
    `pause_s`, which changes nothing.
    """

    __slots__ = ("_first_s", "_free", "_jitter", "_longest_s", "_reset_after_s", "_steady", "failures", "until")

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        *,
        free: int = 0,
        steady: int = 1,
        jitter: Callable[[], float] | None = None,
        reset_after_s: float = float("inf"),
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._free = free
        self._steady = steady
        self._jitter = jitter
        self._reset_after_s = reset_after_s
        self.failures = 0
        """The failures in a row."""
        self.until = float("-inf")
        """The end of the last pause, by the clock that the caller of `failed` uses."""

    def pause_s(self, failures: int) -> float:
        """Return the pause in seconds after that many failures in a row."""
        if failures <= self._free:
            return 0.0
        doublings = min(max(failures - self._free - self._steady, 0), 60)
        pause_s: float = min(self._first_s * 2.0**doublings, self._longest_s)
        return pause_s if self._jitter is None else pause_s * (0.5 + self._jitter() / 2)

    def failed(self, now: float = 0.0) -> float:
        """Count a failure, and return the pause in seconds before the next try.

        If `reset_after_s` has passed between the end of the last pause and `now`, the series begins again.
        """
        if now - self.until >= self._reset_after_s:
            self.failures = 0
        self.failures += 1
        pause_s = self.pause_s(self.failures)
        self.until = now + pause_s
        return pause_s

    def reset(self) -> None:
        """Begin again with no failure, and end the pause."""
        self.failures, self.until = 0, float("-inf")
