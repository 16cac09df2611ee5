"""How many messages per second does a PushConsumer take from a real broker, and what does one cost?

The other sides, in shuffled rounds of one run:

* `pure`: the same consumer without the C extension
* `java`: DefaultMQPushConsumer with the same settings
* `raw`: a loop that only pulls and counts
* `threads`: for a listener that sleeps, the same number of threads without a client
* with `--before`, the consumer of another checkout

Every side is a process of its own. Its fresh group reads the same backlog from the first offset on, and only its warm
part counts. Ratios are computed inside a round. Run: python -m benchmarks.consume --help
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import java_program
from benchmarks.arguments import checkout, new_file, one_or_more
from benchmarks.broker_load import fill
from benchmarks.consume_report import (
    Results,
    cpu_us,
    legend,
    peak_mb,
    percent_of_a_core,
    plot,
    rate,
    short,
    table,
    value_of,
)
from benchmarks.consume_side import Task
from benchmarks.environment import environment, header
from benchmarks.plots import pyplot
from benchmarks.raw_pull import raw_pull
from benchmarks.watch import Figures
from pyrocket_consumer.model import MASTER_ID, PERM_READ, PERM_WRITE
from pyrocket_consumer.protocol.bodies import decode_route
from pyrocket_consumer.protocol.codes import RequestCode
from tests.real_brokers.cluster import RealCluster, wait_until
from tests.real_brokers.jars import NEWEST, java_tool
from tests.real_brokers.remoting import Peer, Refused

ROOT = Path(__file__).parent.parent
LIFTED_LIMITS = {
    "maxTransferCountOnMessageInMemory": 4096,
    "maxTransferBytesOnMessageInMemory": 8 << 20,
    "maxTransferCountOnMessageInDisk": 4096,
    "maxTransferBytesOnMessageInDisk": 8 << 20,
}
BROKER_SETTINGS = {
    "mappedFileSizeCommitLog": 1 << 30,  # sparse
    "mappedFileSizeConsumeQueue": 6_000_000,
    "messageIndexEnable": False,
}
BROKER_JVM = ("-Xms768m", "-Xmx768m", "-XX:MaxDirectMemorySize=512m", "-XX:TieredStopAtLevel=4")
TUNED = {"pull_batch": 1024, "listener_batch": 32, "max_cached": 10_000, "max_span": 20_000}
FLOW_RATE = 500
MANY_QUEUES = 64
MAX_IN_MANY_QUEUES = 400_000  # with more, a broker that gets pulls for all queues at once starts to refuse
AIMED_AT = (4, 16)  # queues
CASES = ("one", "touched", "lists", "lists-touched", "sleep", "latency", "idle", "memory", "start")
SIDES = ("pyrocket", "pure", "java", "raw", "threads", "before")


@dataclass(slots=True)
class Settings:
    """The size of the measurement."""

    rounds: int = 3
    queues: tuple[int, ...] = (4, 16, 1000)
    messages: int = 1_000_000  # fewer end before Java is warm
    sleep_messages: int = 60_000
    memory_messages: int = 1_000_000
    latency_s: float = 12.0
    idle_s: float = 20.0
    idle_queues: tuple[int, ...] = (16, 256)
    cases: tuple[str, ...] = CASES
    sides: tuple[str, ...] = SIDES
    before: str | None = None


QUICK = Settings(1, (4, 16), 150_000, 25_000, 300_000, 6.0, 8.0)
WARM = 600_000  # messages; with fewer, ratios to Java are not meaningful


class Cluster:
    """The broker of all sides. Topics with backlogs are created on first use."""

    def __init__(self, name_server: str) -> None:
        self.name_server = name_server
        self._names = Peer(name_server)
        found = json.loads(self._names.call(RequestCode.GET_BROKER_CLUSTER_INFO).body.replace(b"{0:", b'{"0":'))
        self.broker_name, table = min(found["brokerAddrTable"].items())
        self.broker_address: str = table["brokerAddrs"][str(MASTER_ID)]
        self._broker = Peer(self.broker_address)
        self._run = secrets.token_hex(3)
        self._topics: dict[tuple[int, int, int], str] = {}

    def topic(self, queues: int, messages: int, purpose: str = "backlog", keys: int = 0) -> str:
        """Return a topic with these numbers of queues, messages and sharding keys."""
        name = self._topics.get((queues, messages, keys))
        if name is None:
            name = f"bench-{self._run}-{purpose}-{queues}"
            self._create(name, queues)
            if messages:
                log_progress(f"storing {messages:,} messages in {queues} queues")
                fill(self.broker_address, name, queues, messages, keys)
                wait_until(lambda: self._readable(name, queues, messages), f"{messages} messages in {name}", 120)
            self._topics[queues, messages, keys] = name
        return name

    def _create(self, name: str, queues: int) -> None:
        fields = {
            "topic": name,
            "defaultTopic": "TBW102",
            "readQueueNums": queues,
            "writeQueueNums": queues,
            "perm": PERM_READ | PERM_WRITE,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": False,
        }
        self._broker.call(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
        wait_until(lambda: self._routed(name), f"route of {name}")

    def _routed(self, name: str) -> bool:
        try:
            answer = self._names.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": name})
        except Refused:
            return False
        return bool(decode_route(name, answer.body).queues)

    def _readable(self, topic: str, queues: int, messages: int) -> bool:
        """Return whether the queues have caught up with the commit log. Reading all once also warms the broker."""
        try:
            raw_pull(
                self.broker_address,
                self.broker_name,
                f"{topic}-{secrets.token_hex(3)}",
                topic,
                queues,
                1024,
                messages,
                lambda count: None,
                timeout_s=5,
            )
        except TimeoutError:
            return False
        return True

    def task(self, side: str, measure: str, topic: str, queues: int, **options: Any) -> Task:
        """Return a task with a fresh group."""
        return Task(
            side,
            measure,
            self.name_server,
            f"bench-{secrets.token_hex(6)}",
            topic,
            queues=queues,
            broker_address=self.broker_address,
            broker_name=self.broker_name,
            **options,
        )

    def delete_topics(self) -> None:
        """Remove the topics and groups created here."""
        for name in self._topics.values():
            self._broker.call(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name})
            self._names.call(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": name})


def log_progress(text: str) -> None:
    """Print progress to standard error."""
    print(f"  {time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def perform(task: Task, java_version: str = NEWEST, package: Path | None = None) -> Figures:
    """Run one task in a new process. `package` is a directory with another version of pyrocket_consumer.

    Raises:
        RuntimeError: the process failed; the text has its output.
    """
    limit_s = task.timeout_s + task.seconds + task.settle_s + 60
    if task.side == "java":
        return java_program.run("ConsumeBench", java_version, asdict(task), timeout_s=limit_s)
    command = [sys.executable, "-P", "-m", "benchmarks.consume_side", json.dumps(asdict(task))]
    where = os.pathsep.join(str(each) for each in (package, ROOT) if each is not None)
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": where, **({"PYROCKET_PURE": "1"} if task.side == "pure" else {})},
    )
    if answer.returncode:
        output = f"{answer.stdout[-1500:]}{answer.stderr[-3000:]}"
        raise RuntimeError(f"{task.side} ended with {answer.returncode}:\n{output}")
    result: Figures = json.loads(answer.stdout.splitlines()[-1])
    return result


@contextmanager
def package_of(checkout: Path | None) -> Iterator[Path | None]:
    """Yield a directory with only the package of a checkout."""
    if checkout is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="pyrocket-before-") as directory:
        (Path(directory) / "pyrocket_consumer").symlink_to(checkout.resolve() / "pyrocket_consumer")
        yield Path(directory)


def compete(
    results: Results,
    case: str,
    tasks: Mapping[str, Callable[[], Task]],
    rounds: int,
    packages: Mapping[str, Path] | None = None,
) -> None:
    """Run the task of each side once per round, in a new order each time. Only whole rounds count."""
    rows = results.rounds.setdefault(case, {label: [] for label in tasks})
    for turn in range(rounds):
        answers = {}
        for label in random.sample(list(tasks), len(tasks)):
            answers[label] = perform(tasks[label](), package=(packages or {}).get(label))
            log_progress(f"{case}, round {turn + 1} of {rounds}, {label}: {short(answers[label])}")
        for label, answer in answers.items():
            rows[label].append(answer)


# --- the cases


def race(
    cluster: Cluster,
    settings: Settings,
    results: Results,
    case: str,
    sides: Mapping[str, Callable[[], Task]],
    rounds: int | None = None,
) -> bool:
    """Compare the selected sides. Return False if none is selected."""
    chosen = {side: task for side, task in sides.items() if side in settings.sides}
    packages = {"before": Path(settings.before)} if settings.before else {}
    if settings.before is None:
        chosen.pop("before", None)
    if chosen:
        compete(results, case, chosen, rounds or settings.rounds, packages)
    return bool(chosen)


def work_off(
    cluster: Cluster,
    settings: Settings,
    results: Results,
    case: str,
    sides: tuple[str, ...],
    queues: int,
    total: int | None = None,
    **options: Any,
) -> str:
    """Let the sides consume the first `total` messages of a backlog. Return the name of the case."""
    stored = min(settings.messages, MAX_IN_MANY_QUEUES) if queues > MANY_QUEUES else settings.messages
    topic, case = cluster.topic(queues, stored), f"{case}, {queues} queues"

    def task(side: str) -> Callable[[], Task]:
        return lambda: cluster.task(side, "backlog", topic, queues, total=min(total or stored, stored), **options)

    race(cluster, settings, results, case, {side: task(side) for side in sides})
    return case


def one_by_one(cluster: Cluster, settings: Settings, results: Results) -> None:
    """A listener that gets one message, with the default settings of both clients."""
    sides = ("pyrocket", "pure", "java", "raw", "before")
    for queues in settings.queues:
        case = work_off(cluster, settings, results, "one by one", sides, queues)
        if queues in AIMED_AT:
            results.aim(case, "rate", rate, "pyrocket", "java", at_least=3)
            results.aim(case, "CPU per message", cpu_us, "pyrocket", "java", at_most=1 / 6)
            results.aim(case, "rate", rate, "pyrocket", "raw", at_least=0.5)
            no_slower(results, case)
        if queues == 16:
            results.aim(case, "peak memory, MB", peak_mb, "pyrocket", at_most=100)


def touched(cluster: Cluster, settings: Settings, results: Results) -> None:
    """The same with a listener that reads body and properties."""
    sides = ("pyrocket", "pure", "java", "before")
    for queues in settings.queues:
        case = work_off(cluster, settings, results, "body and properties read", sides, queues, listener="touch")
        if queues in AIMED_AT:
            results.aim(case, "rate", rate, "pyrocket", "java", at_least=2.5)
            results.aim(case, "CPU per message", cpu_us, "pyrocket", "java", at_most=1 / 4)
            no_slower(results, case)


def lists(cluster: Cluster, settings: Settings, results: Results) -> None:
    """A listener that gets lists of 32, with pulls of 1 024 and 10 000 cached messages per queue; not with many."""
    sides = ("pyrocket", "pure", "java", "raw", "before")
    for queues in (each for each in settings.queues if each <= MANY_QUEUES):
        case = work_off(cluster, settings, results, "lists of 32, pulls of 1024", sides, queues, **TUNED)
        if queues in AIMED_AT:
            results.aim(case, "rate", rate, "pyrocket", "java", at_least=3)
            no_slower(results, case)


def lists_touched(cluster: Cluster, settings: Settings, results: Results) -> None:
    """The same with a listener that reads body and properties of every message of its lists."""
    sides = ("pyrocket", "pure", "java", "before")
    for queues in (each for each in settings.queues if each <= MANY_QUEUES):
        name, options = "lists read, pulls of 1024", {"listener": "touch", **TUNED}
        case = work_off(cluster, settings, results, name, sides, queues, **options)
        if queues in AIMED_AT:
            no_slower(results, case)


def sleeping(cluster: Cluster, settings: Settings, results: Results) -> None:
    """A listener that sleeps 1 ms, on 20 threads, compared with the same number of threads without a client."""
    sides = ("pyrocket", "pure", "java", "threads", "before")
    total = settings.sleep_messages
    case = work_off(cluster, settings, results, "listener sleeps 1 ms", sides, 16, total, listener="sleep")
    results.aim(case, "rate", rate, "pyrocket", "threads", at_least=0.9)
    no_slower(results, case)


def no_slower(results: Results, case: str) -> None:
    """Without the extension, no case may cost more than in the earlier checkout, except for noise."""
    results.aim(case, "rate of pure", rate, "pure", "before", at_least=0.97)
    results.aim(case, "CPU of pure", cpu_us, "pure", "before", at_most=1.03)


def latency(cluster: Cluster, settings: Settings, results: Results) -> None:
    """The time from send to listener, with 500 messages per second, one by one, in 4 queues."""
    topic, case = cluster.topic(4, 0, "flow"), f"latency at {FLOW_RATE} messages/s, 4 queues"
    flow = ["-m", "benchmarks.broker_load", cluster.broker_address, topic, "4", str(FLOW_RATE), "36000"]

    def task(side: str) -> Callable[[], Task]:
        return lambda: cluster.task(side, "latency", topic, 4, seconds=settings.latency_s, consume_from="last")

    sending = subprocess.Popen([sys.executable, *flow], cwd=ROOT)
    try:
        race(cluster, settings, results, case, {"pyrocket": task("pyrocket"), "java": task("java")})
    finally:
        sending.kill()
        sending.wait()
    for name, wanted in (("p50_ms", 1.3), ("p99_ms", 5.0)):
        results.aim(case, name.replace("_", ", "), value_of(name), "pyrocket", at_most=wanted)


def idle(cluster: Cluster, settings: Settings, results: Results) -> None:
    """The cost of a consumer without messages."""
    for queues, wanted in zip(settings.idle_queues, (0.2, 0.5), strict=True):
        topic, case = cluster.topic(queues, 0, "idle"), f"idle, {queues} queues"

        def task(side: str, queues: int = queues, topic: str = topic) -> Callable[[], Task]:
            return lambda: cluster.task(side, "idle", topic, queues, seconds=settings.idle_s)

        race(cluster, settings, results, case, {"pyrocket": task("pyrocket"), "java": task("java")}, 1)
        results.aim(case, "% of a core", percent_of_a_core, "pyrocket", at_most=wanted)


def memory(cluster: Cluster, settings: Settings, results: Results) -> None:
    """Whether memory stays constant during a large backlog."""
    total, case = settings.memory_messages, f"memory over {settings.memory_messages:,} messages, 16 queues"
    topic = cluster.topic(16, total, "memory")

    def growth(answer: Figures) -> float:
        tenths = answer["rss_mb_at_tenths"]
        return float(tenths[-1] / tenths[1])

    sides = {"pyrocket": lambda: cluster.task("pyrocket", "backlog", topic, 16, total=total)}
    race(cluster, settings, results, case, sides, 1)
    results.aim(case, "peak, MB", peak_mb, "pyrocket", at_most=100)
    results.aim(case, "last tenth ÷ second", growth, "pyrocket", at_most=1.05)


def start(cluster: Cluster, settings: Settings, results: Results) -> None:
    """The time until the first message, on the embedded cluster and on the real broker."""
    from pyrocket_consumer.testing import EmbeddedCluster

    topic = cluster.topic(4, settings.messages)
    case = "start to first message, 4 queues"
    with EmbeddedCluster() as embedded:
        embedded.create_topic("first", queues=4)
        embedded.send("first", b"-", count=4)

        def on_embedded() -> Task:
            group = f"bench-{secrets.token_hex(6)}"
            return Task("pyrocket", "start", embedded.name_server, group, "first")

        compete(
            results,
            case,
            {"embedded cluster": on_embedded, "real broker": lambda: cluster.task("pyrocket", "start", topic, 4)},
            settings.rounds,
        )
    results.aim(case, "s on the embedded cluster", value_of("first_message_s"), "embedded cluster", at_most=1)


_MEASURES = (one_by_one, touched, lists, lists_touched, sleeping, latency, idle, memory, start)
MEASURES = dict(zip(CASES, _MEASURES, strict=True))


@contextmanager
def broker(name_server: str | None, *, lifted: bool) -> Iterator[Cluster]:
    """Yield the broker: a running one, or a real one started for this run."""
    if name_server is not None:
        cluster = Cluster(name_server)
        try:
            yield cluster
        finally:
            cluster.delete_topics()
        return
    log_progress(f"starting a name server and a broker, RocketMQ {NEWEST}")
    settings = {**BROKER_SETTINGS, **(LIFTED_LIMITS if lifted else {})}
    with RealCluster(settings=settings, jvm_options=BROKER_JVM) as real:
        yield Cluster(real.name_server)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.consume", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of small backlogs, 4 and 16 queues")
    parser.add_argument("--cases", help=f"comma-separated, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--sides", help=f"comma-separated, of {', '.join(SIDES)} (default: all)")
    parser.add_argument(
        "--before", type=checkout, metavar="CHECKOUT", help="its consumer is measured as the side `before`"
    )
    parser.add_argument("--queues", type=numbers, help="numbers of queues, comma-separated (default: 4,16,1000)")
    parser.add_argument("--rounds", type=one_or_more, help="rounds of each comparison (default: 3)")
    parser.add_argument("--messages", type=int, help="size of the backlog (default: 1000000)")
    parser.add_argument("--sleep-messages", type=int, help="for the listener that sleeps (default: 60000)")
    parser.add_argument("--name-server", help="use this running cluster instead of starting a broker")
    parser.add_argument("--broker-defaults", action="store_true", help="keep the limits per pull of the broker")
    parser.add_argument("--json", type=new_file, help="write the figures of every round to this file")
    parser.add_argument("--plot", type=new_file, help="draw the rates into this PNG file; needs matplotlib")
    options = parser.parse_args()
    if options.plot:
        pyplot()  # fail now if it is missing

    settings = replace(QUICK) if options.quick else Settings()
    settings.queues = options.queues or settings.queues
    settings.rounds = options.rounds or settings.rounds
    settings.messages = options.messages or settings.messages
    settings.sleep_messages = options.sleep_messages or settings.sleep_messages
    settings.cases = tuple(options.cases.split(",")) if options.cases else settings.cases
    settings.sides = tuple(options.sides.split(",")) if options.sides else settings.sides
    for what, given, known in (("case", settings.cases, CASES), ("side", settings.sides, SIDES)):
        if unknown := set(given) - set(known):
            parser.error(f"no {what} is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.before is None and options.sides and "before" in settings.sides:
        parser.error("the side before needs --before with the checkout it is to come from")

    facts = environment(java=java_tool("java") if "java" in settings.sides else None)
    results, failed = Results(), list[str]()
    with (
        broker(options.name_server, lifted=not options.broker_defaults) as cluster,
        package_of(options.before) as before,
    ):
        settings.before = str(before) if before else None
        for case in settings.cases:
            try:
                MEASURES[case](cluster, settings, results)
            except (RuntimeError, subprocess.SubprocessError) as error:
                failed.append(f"case {case} failed: {error}")
                log_progress(failed[-1])
    limits = "its limits per pull lifted" if not options.broker_defaults else "its default limits per pull"
    server = f"the cluster at {options.name_server}" if options.name_server else f"RocketMQ {NEWEST}, {limits}"
    print(header(facts))
    print(f"{server}; 1 KB bodies with five properties; rounds: {settings.rounds}, medians of them")
    if not facts["accelerated"]:
        print("The C extension is not built, or switched off: pyrocket is the same as pure.")
    if settings.messages < WARM and "java" in settings.sides:
        print("A backlog this small is over before Java has compiled itself: ratios to it flatter us.")
    results.rounds = {case: sides for case, sides in results.rounds.items() if all(sides.values())}
    print(*table(results), sep="\n")
    print(f"\n{'target':<62} {'wanted':<9} {'measured':>9}")
    print(*results.targets, sep="\n")
    print("\nwhat a ratio means", *legend(results), sep="\n")
    if options.json:
        found = {
            "environment": facts,
            "settings": {**asdict(settings), "before": str(options.before) if options.before else None},
            "rounds": results.rounds,
            "targets": [{**asdict(target), "met": target.met} for target in results.targets],
        }
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        plot(results, options.plot)
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
