"""Find the masters for an admin call, and call them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TypeVar

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import check_names, check_text
from pyrocket_consumer.errors import ConfigError, ConnectError, RocketError
from pyrocket_consumer.model import MASTER_ID
from pyrocket_consumer.protocol.bodies import ClusterInfo, decode_cluster_info
from pyrocket_consumer.protocol.command import GetClusterInfoHeader
from pyrocket_consumer.text import escape_controls, join_truncated

T = TypeVar("T")


class BrokerMissing(ConnectError):
    """The name server knows no master of a broker. So there is no address to check."""

    def __str__(self) -> str:
        return escape_controls(f"{self.address}: {self.reason}")


NO_MASTER = "the name server knows no master of it now; check that it runs"


async def cluster_info(cluster: Cluster) -> ClusterInfo:
    """Return the brokers and clusters that the name server knows."""
    return await cluster.name_servers.read(GetClusterInfoHeader(), decode_cluster_info)


def check_targets(brokers: Iterable[str] | None, cluster_name: str | None) -> list[str] | None:
    """Return the names of the selected brokers, or None for all, or for all of a cluster.

    Raises:
        ConfigError: a name is not allowed, or both arguments are set.
    """
    if brokers is not None and cluster_name is not None:
        raise ConfigError("brokers and cluster exclude each other; give one of them")
    check_text("cluster", cluster_name)
    named = None if brokers is None else check_names("brokers", brokers)
    if named == []:
        raise ConfigError(f"brokers={brokers!r} names no broker; pass None for all")
    return named


async def find_masters(
    cluster: Cluster, named: Collection[str] | None = None, cluster_name: str | None = None
) -> dict[str, str]:
    """Return broker name -> address of its master, for the named brokers, those of a cluster, or all.

    Raises:
        ConfigError: the broker or cluster does not exist.
        ConnectError: one of them has no master now.
    """
    info = await cluster_info(cluster)
    if cluster_name is not None:
        if cluster_name not in info.clusters:
            raise ConfigError(
                f"there is no cluster {cluster_name!r}; choose one of {join_truncated(sorted(info.clusters))}"
            )
        named = list(info.clusters[cluster_name])
    names = sorted(info.brokers) if named is None else sorted(named)
    unknown = [name for name in names if name not in info.brokers]
    if unknown:
        raise ConfigError(f"there is no broker {unknown[0]!r}; choose one of {join_truncated(sorted(info.brokers))}")
    found = {name: info.brokers[name].addresses.get(MASTER_ID) for name in names}
    without = [name for name, address in found.items() if address is None]
    if without or not found:
        what = f"broker {join_truncated(without)}" if without else "the cluster"
        raise BrokerMissing(what, NO_MASTER)
    return {name: address for name, address in found.items() if address is not None}


async def call_many(brokers: Mapping[str, str], call: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Return broker name -> result of `call(address)`. All calls run at the same time.

    Raises:
        RocketError: the error of one broker; a note names the brokers where the call succeeded.
    """
    outcomes = await asyncio.gather(*(call(address) for address in brokers.values()), return_exceptions=True)
    done: dict[str, T] = {}
    failures: list[BaseException] = []
    for name, outcome in zip(brokers, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            failures.append(outcome)
        else:
            done[name] = outcome
    if failures:
        error = next((each for each in failures if not isinstance(each, RocketError)), failures[0])
        if done:
            error.add_note(f"done at {join_truncated(list(done))}; it is safe to repeat")
        raise error
    return done
