"""The report of benchmarks/consume.py: medians, ratios inside a round, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.plots import draw_rates
from benchmarks.watch import Figures


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a figure, and the measured value."""

    text: str
    wanted: float
    measured: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{self.text:<62} {sign} {self.wanted:<7.3g} {self.measured:9.3g}   {'met' if self.met else 'MISSED'}"


@dataclass(slots=True)
class Results:
    """All figures: case -> side -> one entry per round."""

    rounds: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def median(self, case: str, side: str, value: Callable[[Figures], float]) -> float:
        return statistics.median(value(answer) for answer in self.rounds[case][side])

    def ratio(self, case: str, side: str, other: str, value: Callable[[Figures], float]) -> float:
        """Return the median of the ratios of the rounds."""
        pairs = zip(self.rounds[case][side], self.rounds[case][other], strict=True)
        return statistics.median(value(ours) / value(theirs) for ours, theirs in pairs)

    def aim(
        self,
        case: str,
        what: str,
        value: Callable[[Figures], float],
        side: str,
        other: str | None = None,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Add a target for a value of a side, or for its ratio to that of another. Skip it if one was not measured."""
        sides = self.rounds.get(case, {})
        if not sides.get(side) or not (other is None or sides.get(other)):
            return
        measured = self.median(case, side, value) if other is None else self.ratio(case, side, other, value)
        text = f"{case}: {what}" if other is None else f"{case}: {what} ÷ {other}"
        wanted = at_least if at_least is not None else at_most
        assert wanted is not None
        self.targets.append(Target(text, wanted, measured, at_least is not None))


def rate(answer: Figures) -> float:
    """Messages per second."""
    return float(answer["messages"] / answer["seconds"])


def cpu_us(answer: Figures) -> float:
    """Microseconds of CPU time per message."""
    return float(answer["cpu_s"] / answer["messages"] * 1e6)


def value_of(name: str) -> Callable[[Figures], float]:
    """Return a function that reads one value of the figures."""
    return lambda answer: float(answer[name])


def percent_of_a_core(answer: Figures) -> float:
    """CPU time divided by wall time."""
    return float(100 * answer["cpu_s"] / answer["seconds"])


peak_mb = value_of("rss_peak_mb")

COMPARED_WITH = {
    "java": "Java's DefaultMQPushConsumer with the same settings: 3 is three times its rate, .25 a quarter of its CPU",
    "raw": "a loop on one socket that pulls and counts: 1 would be a consumer that costs nothing",
    "threads": "as many threads that sleep and have no client: 1 would be a consumer that is not in their way",
    "pure": "the same consumer without its C extension: what the extension gives",
    "before": "the consumer of the other checkout: 1 is no change",
}
"""The descriptions of the sides that others are divided by."""


def legend(results: Results) -> Iterator[str]:
    """Yield the meaning of each ratio in the tables."""
    yield "  each is taken inside a round, and is the median of the rounds; of rates, or of CPU times for each message"
    met = {side for sides in results.rounds.values() for side in sides}
    for side, meaning in COMPARED_WITH.items():
        if side in met:
            yield f"  {'÷ ' + side:<11} beside {meaning}"


def short(answer: Figures) -> str:
    """Return a short text with the figures."""
    if "p50_ms" in answer:
        return f"p50 {answer['p50_ms']:.2f} ms, p99 {answer['p99_ms']:.2f} ms"
    if "messages" in answer:
        return f"{rate(answer) / 1000:.0f} k/s, {cpu_us(answer):.2f} us"
    if "cpu_s" in answer:
        return f"{percent_of_a_core(answer):.2f} % of a core"
    return f"{answer['first_message_s']:.2f} s"


def table(results: Results) -> Iterator[str]:
    """Return the figures as lines."""
    for case, sides in results.rounds.items():
        answer = next(iter(sides.values()))[0]
        yield ""
        yield case
        if "p50_ms" in answer:
            for side in sides:
                low, high = (results.median(case, side, value_of(name)) for name in ("p50_ms", "p99_ms"))
                yield f"  {side:<36} p50 {low:6.2f} ms   p99 {high:6.2f} ms"
        elif "messages" in answer:
            others = [side for side in COMPARED_WITH if side in sides]
            ratio_heads = "".join(f" {'÷ ' + other:>9}" for other in others)
            yield f"  {'':<30}  k msg/s  CPU us{ratio_heads}  MB peak  switches/1000"
            for side in sides:
                yield _throughput_line(results, case, side, others)
            if "memory" in case:
                yield f"  RSS in MB after each tenth: {answer['rss_mb_at_tenths']}"
        elif "cpu_s" in answer:
            for side in sides:
                percent = results.median(case, side, percent_of_a_core)
                yield f"  {side:<36} {percent:6.2f} % of a core"
        else:
            for side in sides:
                first = results.median(case, side, value_of("first_message_s"))
                imported = results.median(case, side, value_of("import_s"))
                yield f"  {side:<36} {first:6.3f} s   (and {imported:.3f} s for the import)"


def _throughput_line(results: Results, case: str, side: str, others: list[str]) -> str:
    sides = results.rounds[case]
    ratios = [results.ratio(case, side, other, rate) if other != side else None for other in others]
    ratio_cells = "".join(f" {'' if ratio is None else f'{ratio:.2f}':>9}" for ratio in ratios)
    switches = ""
    if "switches" in sides[side][0]:
        switches = f"{results.median(case, side, lambda each: 1000 * each['switches'] / each['messages']):.1f}"
    return (
        f"  {side:<30} {results.median(case, side, rate) / 1000:8.1f} {results.median(case, side, cpu_us):7.2f}"
        f"{ratio_cells} {results.median(case, side, peak_mb):8.0f} {switches:>14}"
    )


def plot(results: Results, path: Path) -> None:
    """Draw messages per second of every side."""
    bars = [
        (case, side, results.median(case, side, rate) / 1000)
        for case, sides in results.rounds.items()
        for side, answers in sides.items()
        if len(sides) > 1 and "cpu_s" in answers[0] and "messages" in answers[0]
    ]
    colours = {"pyrocket": "tab:blue", "pure": "tab:cyan", "before": "tab:green", "java": "tab:orange"}
    draw_rates(bars, {**colours, "raw": "tab:gray", "threads": "tab:gray"}, path)
