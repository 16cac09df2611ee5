"""Fixtures of real brokers and Java clients, and the choice of releases for a run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.releases import NEWEST, OLDEST, VERSIONS, CannotRun

if TYPE_CHECKING:
    from pyrocket_consumer.testing import EmbeddedCluster
    from tests.real_brokers import JavaMachine, RealCluster

EMBEDDED = "embedded"
NO_VERSION = "none"
OLDEST_AND_NEWEST = (OLDEST, NEWEST)

WORKER_BYTES = 2 << 30
"""The memory of a worker with its brokers."""

_ON_A_RELEASE = re.compile(rf"[\[-]real-({'|'.join(map(re.escape, VERSIONS))})[-\]]")
_WITHOUT_THE_SESSION = re.compile(r"tests/spark/test_(discovery|kill|read|sink_faults|source_faults)\.py")
_versions = pytest.StashKey[tuple[str, ...]]()
_required = pytest.StashKey[bool]()
_not_run = pytest.StashKey[str]()
_why_failed = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real",
        metavar="VERSIONS",
        help=f"RocketMQ releases to run against: none, all, or some of {','.join(VERSIONS)}. Default: "
        f"{' and '.join(OLDEST_AND_NEWEST)} where Java and Maven are present; with CI=true they must run.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster(**options): how the test's cluster is made, for example brokers=2")
    config.addinivalue_line("markers", "versions(*names): the RocketMQ releases a test is about; others are left out")
    config.addinivalue_line("markers", "differs(*which): shows what embedded or real brokers do unlike the others")
    requested = config.getoption("--real")
    named = (
        VERSIONS
        if requested == "all"
        else ()
        if requested == NO_VERSION
        else tuple(requested.split(","))
        if requested
        else None
    )
    versions = OLDEST_AND_NEWEST if named is None else named
    if set(versions) - set(VERSIONS):
        raise pytest.UsageError(f"--real={requested}: choose none, all, or some of {','.join(VERSIONS)}")
    config.stash[_versions], config.stash[_not_run] = versions, "" if versions else "--real=none was given"
    config.stash[_required] = requested is not None or os.environ.get("CI") == "true"


def pytest_report_header(config: pytest.Config) -> str:
    return f"RocketMQ releases: {', '.join((EMBEDDED, *config.stash[_versions]))}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the fixture `cluster` on each kind of cluster, and one with `real_cluster` on each release."""
    only = metafunc.definition.get_closest_marker("versions")
    versions = metafunc.config.stash[_versions]
    chosen = [_release(version) for version in versions if only is None or version in only.args]
    if "cluster_kind" in metafunc.fixturenames:
        metafunc.parametrize("cluster_kind", [EMBEDDED, *chosen])
    if "real_version" in metafunc.fixturenames:
        metafunc.parametrize("real_version", chosen or [pytest.param(NO_VERSION, marks=pytest.mark.real)])


def _release(version: str) -> Any:
    """Return a parameter with a distinct id, because other tests have versions, too."""
    return pytest.param(version, id=f"real-{version}", marks=pytest.mark.real)


@pytest.hookimpl(trylast=True)  # tests that -k and -m deselect need no broker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that cannot run, and sort the others so that each release is started once."""
    wanted = {_version(item) for item in items}
    if not config.getoption("collectonly") and wanted & set(VERSIONS):
        _prepare(config, filter(wanted.__contains__, VERSIONS))
    possible = {None, *config.stash[_versions]}
    config.hook.pytest_deselected(items=[item for item in items if _version(item) not in possible])
    items[:] = [item for item in items if _version(item) in possible]
    items.sort(key=partial(_sort_key, released_first=hasattr(config, "workerinput")))
    if hasattr(config, "workeroutput"):
        config.workeroutput["not_run"] = config.stash[_not_run]


def _prepare(config: pytest.Config, versions: Iterable[str]) -> None:
    """Prepare jars and programs, because a download would exceed the time limits of tests.

    If real brokers cannot run, continue without them, unless the options request them.
    """
    from tests.real_brokers import check_machine
    from tests.real_brokers.jars import classes

    try:
        check_machine()
        for version in versions:
            classes(version)
    except CannotRun as error:
        if config.stash[_required]:
            reason = f"tests against real brokers cannot run: {error}"
            if not hasattr(config, "workerinput"):
                raise pytest.UsageError(reason) from error
            config.stash[_why_failed] = reason  # a worker's usage error would be an internal error
            return
        config.stash[_versions] = ()
        config.stash[_not_run] = str(error)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _version(item) in VERSIONS and (reason := item.config.stash.get(_why_failed, "")):
        pytest.fail(reason, pytrace=False)


def _version(item: pytest.Item) -> str | None:
    """Return the real release for an item, None without real brokers."""
    parameters: dict[str, str] = item.callspec.params if hasattr(item, "callspec") else {}
    version = parameters.get("real_version") or parameters.get("cluster_kind")
    return None if version == EMBEDDED else version


def _sort_key(item: pytest.Item, released_first: bool) -> tuple[int, str]:
    """Return the sort key of an item: by release, then by the settings of the cluster.

    Workers begin with the releases, because their tests take longest.
    """
    version = _version(item)
    if version is None:
        return (len(VERSIONS) if released_first else -1, "")
    return (VERSIONS.index(version) if version in VERSIONS else 0, repr(sorted(_cluster_options(item).items())))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the workers of `-n auto`: one per core, and three more with real brokers, whose tests wait a lot."""
    cores, memory = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.getoption("--real") == NO_VERSION:
        return cores
    return max(2, min(cores + 3, memory // WORKER_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, run each release on one worker and Spark's session on another; other tests on any free worker."""
    from xdist.scheduler import LoadScopeScheduling, WorkStealingScheduling

    if not config.stash[_versions]:  # this one communicates less often with workers
        return WorkStealingScheduling(config, log)

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/spark/") and not _WITHOUT_THE_SESSION.match(nodeid):
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


def _cluster_options(item: pytest.Item) -> dict[str, Any]:
    marks = reversed([*item.iter_markers("cluster")])  # marks of a test override those of its module
    return {name: value for mark in marks for name, value in mark.kwargs.items()}


class RealClusters:
    """The running real cluster, if any. There is one at a time, kept while tests need the same release."""

    def __init__(self) -> None:
        self._cluster: RealCluster | None = None

    def get(self, version: str, **options: Any) -> RealCluster:
        """Return the requested cluster, started. Reuse a running one of the same release, with changed settings."""
        from tests.real_brokers import RealCluster
        from tests.real_brokers.cluster import PortTaken

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
    """A real cluster of each release in turn. Tests share it, so use new names, and restore settings."""
    return real_clusters.get(real_version, **_cluster_options(request.node))


@pytest.fixture
def cluster(cluster_kind: str, real_clusters: RealClusters, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A cluster of each kind in turn: embedded and real. Tests use their common methods."""
    options = _cluster_options(request.node)
    if cluster_kind != EMBEDDED:
        yield real_clusters.get(cluster_kind, **options)
        return
    from pyrocket_consumer.testing import EmbeddedCluster

    with EmbeddedCluster(**options) as embedded:
        yield embedded


@pytest.fixture
def embedded(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """An embedded cluster."""
    from pyrocket_consumer.testing import EmbeddedCluster

    with EmbeddedCluster(**_cluster_options(request.node)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def java_machines() -> Iterator[dict[str, JavaMachine]]:
    """The running Java clients, by their release. There is one at a time, kept while tests need the same release."""
    machines: dict[str, JavaMachine] = {}
    yield machines
    for machine in machines.values():
        machine.close()


@pytest.fixture
def java(real_version: str, java_machines: dict[str, JavaMachine]) -> JavaMachine:
    """Java clients of the release under test. Tests share them, so close the clients that you start."""
    from tests.real_brokers import JavaMachine

    if real_version not in java_machines or not java_machines[real_version].running:
        for version in list(java_machines):
            java_machines.pop(version).close()
        java_machines[real_version] = JavaMachine(real_version)
    return java_machines[real_version]
