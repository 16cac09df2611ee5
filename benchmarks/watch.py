"""Samples of the process of a side: messages, time, CPU time, memory."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_EVERY_S = 0.02

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one moment: messages, time, CPU time and context switches of the whole process."""

    count: int
    at_s: float
    cpu_s: float
    switches: int

    @classmethod
    def now(cls, count: int) -> Sample:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(count, time.perf_counter(), usage.ru_utime + usage.ru_stime, usage.ru_nvcsw)


class Watch:
    """Takes samples from time to time. It reads the memory rarely, because that costs more than the rest."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.samples: list[Sample] = []
        self.rss_mb: list[float] = []

    def take_sample(self, count: int) -> Sample:
        sample = Sample.now(count)
        self.samples.append(sample)
        while len(self.rss_mb) < 10 and count >= self.total * (len(self.rss_mb) + 1) // 10:
            self.rss_mb.append(round(memory_mb("VmRSS"), 1))
        return sample

    def warm_part(self, from_share: float, to_share: float) -> Figures:
        """Return messages, seconds, CPU time and switches between two shares of the backlog."""
        first = next(sample for sample in self.samples if sample.count >= from_share * self.total)
        last = [sample for sample in self.samples if sample.count <= to_share * self.total][-1]
        if last.count <= first.count:
            raise RuntimeError(f"{self.total} messages ended before a sample was taken; use more")
        return {
            "messages": last.count - first.count,
            "seconds": last.at_s - first.at_s,
            "cpu_s": last.cpu_s - first.cpu_s,
            "switches": last.switches - first.switches,
            "rss_mb_at_tenths": self.rss_mb,
        }


def memory_mb(what: str) -> float:
    """Return VmRSS or VmHWM (the highest so far) in MiB. ru_maxrss would include the memory of the parent."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return int(status.partition(f"{what}:")[2].split(maxsplit=1)[0]) / 1024
