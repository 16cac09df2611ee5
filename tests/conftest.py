"""Options and fixtures of the whole suite: which clusters the conformance tests run on, and names nobody else uses."""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from sqlalchemy import make_url

from tests.databases import KINDS, Database, Server, running, why_missing
from tests.real_brokers import NEWEST, VERSIONS, CannotRun, JavaMachine, RealCluster, check_machine
from tests.real_brokers.cluster import PortTaken
from tests.real_brokers.jars import classes
from tests.trials import trials

EMBEDDED = "embedded"
NO_VERSION = "none"

TELLING = ("conformance", "hazards", "system", "simulation")
"""The folders whose tests begin: what users would see, and what waits the longest."""
WORKER_BYTES = 2 << 30
"""The memory of a worker with the brokers it runs."""

_ON_A_RELEASE = re.compile(rf"[\[-]real-({'|'.join(map(re.escape, VERSIONS))})[-\]]")
_versions = pytest.StashKey[tuple[str, ...]]()
_required = pytest.StashKey[bool]()
_not_run = pytest.StashKey[str]()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what is in the background; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real",
        metavar="VERSIONS",
        help=f"RocketMQ releases to run against: none, all, or some of {','.join(VERSIONS)}. "
        f"Default: {NEWEST} where Java and Maven are present; with CI=true all, which then must run.",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out what needs Java, make a twentieth of the random trials, begin with what failed the last time",
    )


@pytest.hookimpl(tryfirst=True)  # before the cache plugin looks at its option
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.option.quick:
        config.option.real = config.option.real or NO_VERSION
        config.option.failedfirst = True
        os.environ.setdefault("PYROCKET_TRIALS", "0.05")
    hypothesis.settings.register_profile("trials", max_examples=trials(hypothesis.settings.default.max_examples))
    hypothesis.settings.load_profile("trials")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster(**options): how the test's cluster is made, for example brokers=2")
    config.addinivalue_line("markers", "databases(*kinds): the databases a test is about: sqlite, postgresql, mariadb")
    config.addinivalue_line("markers", "versions(*names): the RocketMQ releases a test is about; others are left out")
    config.addinivalue_line("markers", "differs(*which): shows what embedded or real brokers do unlike the others")
    required = os.environ.get("CI") == "true"
    asked = config.getoption("--real") or ("all" if required else None)
    versions = VERSIONS if asked == "all" else () if asked == NO_VERSION else tuple((asked or NEWEST).split(","))
    unknown = set(versions) - set(VERSIONS)
    if unknown:
        raise pytest.UsageError(f"--real={asked}: choose none, all, or some of {','.join(VERSIONS)}")
    config.stash[_versions], config.stash[_not_run] = versions, "" if versions else "--real=none was given"
    config.stash[_required] = asked is not None


def _prepare(config: pytest.Config, versions: Iterable[str]) -> None:
    """Get jars and programs ready; no test's time limit has room for a download.

    Where real brokers cannot run, go on without them, unless they were asked for.
    """
    try:
        check_machine()
        for version in versions:
            classes(version)
    except CannotRun as error:
        if config.stash[_required]:
            raise pytest.UsageError(f"tests against real brokers cannot run: {error}") from error
        config.stash[_versions] = ()
        config.stash[_not_run] = str(error)


def pytest_report_header(config: pytest.Config) -> str:
    missing = ""
    if config.stash[_versions]:
        try:
            check_machine()
        except CannotRun as error:
            missing = f" (CANNOT RUN: {error})"
    lacking = "".join(f" (CANNOT RUN: {why})" for kind in KINDS if (why := why_missing(kind)))
    return (
        f"RocketMQ releases: {', '.join((EMBEDDED, *config.stash[_versions]))}{missing}; databases: "
        f"{', '.join(kind for kind in KINDS if not why_missing(kind))}{lacking}"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `cluster` on each kind of cluster, one that takes `real_cluster` on each release."""
    versions = metafunc.config.stash[_versions]
    only = metafunc.definition.get_closest_marker("versions")
    chosen = [version for version in versions if only is None or version in only.args]
    if "database_kind" in metafunc.fixturenames:
        only_kinds = metafunc.definition.get_closest_marker("databases")
        kinds = [kind for kind in KINDS if only_kinds is None or kind in only_kinds.args]
        chosen_kinds = [kind for kind in kinds if os.environ.get("CI") == "true" or not why_missing(kind)]
        metafunc.parametrize("database_kind", chosen_kinds)  # with none it is skipped, and says so
    if "cluster_kind" in metafunc.fixturenames:
        metafunc.parametrize("cluster_kind", [EMBEDDED, *chosen], ids=_test_id)
    if "real_version" in metafunc.fixturenames:
        metafunc.parametrize("real_version", chosen or [NO_VERSION], ids=_test_id)


def _test_id(kind: str) -> str:
    """Return how a test's name says what it runs on: `embedded`, `real-5.5.0`; other tests have versions, too."""
    return f"real-{kind}" if kind in VERSIONS else kind


@pytest.hookimpl(trylast=True)  # what -k leaves out needs no broker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run, and put the rest in an order in which each release is started once."""
    wanted = {_version(item) for item in items}
    if not config.getoption("collectonly") and wanted & set(VERSIONS):
        _prepare(config, filter(wanted.__contains__, VERSIONS))
    possible = {None, *config.stash[_versions]}
    config.hook.pytest_deselected(items=[item for item in items if _version(item) not in possible])
    items[:] = [item for item in items if _version(item) in possible]
    items.sort(key=partial(_place, released_first=hasattr(config, "workerinput")))
    if hasattr(config, "workeroutput"):
        config.workeroutput["not_run"] = config.stash[_not_run]


def _place(item: pytest.Item, released_first: bool) -> tuple[int, int | str]:
    """Return what items are ordered by: the most telling first, then release by release, like clusters together.

    Workers begin with the releases, because these are the longest.
    """
    version = _version(item)
    if version is not None:
        return (VERSIONS.index(version) - released_first * len(VERSIONS), _options_key(item))
    folder = item.path.parent.name
    return (-1 + released_first, TELLING.index(folder) if folder in TELLING else len(TELLING))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """With `-n auto`: some for each core, because tests mostly wait; as many as there is memory for."""
    cores, memory = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.option.quick:
        return 6 * cores
    return max(2, min(3 * cores, memory // WORKER_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: each release is one worker's work, Spark another's, and every other test goes to whoever is free."""
    from xdist.scheduler import LoadScopeScheduling, WorkStealingScheduling

    if config.option.quick:  # neither is there; this one asks workers less often
        return WorkStealingScheduling(config, log)

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/spark/"):
                return "spark"
            release = _ON_A_RELEASE.search(nodeid)
            return release[1] if release else nodeid

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    node.config.stash[_not_run] = getattr(node, "workeroutput", {}).get("not_run", "")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if reason := config.stash[_not_run]:
        terminalreporter.write_sep("=", "REAL BROKERS WERE NOT TESTED", yellow=True, bold=True)
        terminalreporter.write_line(reason)


def _version(item: pytest.Item) -> str | None:
    """Return the real release an item runs on, None when it runs on none."""
    parameters: dict[str, str] = item.callspec.params if hasattr(item, "callspec") else {}
    version = parameters.get("real_version") or parameters.get("cluster_kind")
    return None if version == EMBEDDED else version


def _options_key(item: pytest.Item) -> str:
    return repr(sorted(_cluster_options(item).items()))


def _cluster_options(item: pytest.Item) -> dict[str, Any]:
    marker = item.get_closest_marker("cluster")
    return dict(marker.kwargs) if marker else {}


class RealClusters:
    """The real cluster that runs now, if any: one at a time, kept while tests want the same release."""

    def __init__(self) -> None:
        self._cluster: RealCluster | None = None

    def get(self, version: str, **options: Any) -> RealCluster:
        """Return the cluster asked for, started; of another with the same release only what differs is replaced."""
        if self._cluster is not None and self._cluster.version != version:
            self.close()
        if self._cluster is not None:
            try:
                self._cluster.become(**options)
                return self._cluster
            except BaseException as error:
                self.close()
                if not isinstance(error, PortTaken):
                    raise
        cluster = RealCluster(version, **options)
        cluster.start()
        self._cluster = cluster
        return cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


@pytest.fixture(scope="session")
def real_clusters() -> Iterator[RealClusters]:
    clusters = RealClusters()
    yield clusters
    clusters.close()


@pytest.fixture
def real_cluster(real_version: str, real_clusters: RealClusters, request: pytest.FixtureRequest) -> RealCluster:
    """A real cluster, of each release in turn. It is shared: use fresh names, and set settings back."""
    return real_clusters.get(real_version, **_cluster_options(request.node))


@pytest.fixture
def cluster(cluster_kind: str, real_clusters: RealClusters, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A cluster of each kind in turn: embedded, and real ones. Tests use what both have."""
    options = _cluster_options(request.node)
    if cluster_kind != EMBEDDED:
        yield real_clusters.get(cluster_kind, **options)
        return
    from pyrocket_consumer.testing import EmbeddedCluster

    with EmbeddedCluster(**options) as embedded:
        yield embedded


class JavaMachines:
    """The machine with Java clients that runs now, if any: one at a time, kept while tests want the same release."""

    def __init__(self) -> None:
        self._machine: JavaMachine | None = None

    def get(self, version: str) -> JavaMachine:
        if self._machine is None or self._machine.version != version or not self._machine.running:
            self.close()
            self._machine = JavaMachine(version)
        return self._machine

    def close(self) -> None:
        if self._machine is not None:
            self._machine.close()
            self._machine = None


@pytest.fixture(scope="session")
def java_machines() -> Iterator[JavaMachines]:
    machines = JavaMachines()
    yield machines
    machines.close()


@pytest.fixture
def java(real_version: str, java_machines: JavaMachines) -> JavaMachine:
    """Java clients of the release under test. It is shared: close what you start."""
    return java_machines.get(real_version)


class Names:
    """Topic and group names that no other test has used."""

    def __init__(self, test: str) -> None:
        self._test = re.sub(r"[^A-Za-z0-9_]+", "_", test)[:60].strip("_")

    def topic(self, hint: str = "topic") -> str:
        return self._name(hint)

    def group(self, hint: str = "group") -> str:
        return self._name(hint)

    def _name(self, hint: str) -> str:
        return f"{self._test}-{hint}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Names:
    return Names(request.node.name)


@pytest.fixture(scope="session")
def database_servers() -> Iterator[dict[str, Server]]:
    """Database servers of this worker by kind, each started by the first test that needs it."""
    with ExitStack() as stack:

        class Servers(dict[str, Server]):
            def __missing__(self, kind: str) -> Server:
                self[kind] = stack.enter_context(running(kind))
                return self[kind]

        yield Servers()


@pytest.fixture
def database(database_kind: str, database_servers: dict[str, Server], tmp_path: Path) -> Database:
    """Return an empty database of the kind; marked `databases("postgresql")` a test gets that kind alone."""
    if database_kind == "sqlite":
        return Database("sqlite", make_url(f"sqlite:///{tmp_path}/app.db"))
    return database_servers[database_kind].new_database()
