"""Create, delete and list consumer groups."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import chain
from typing import Any

from pyrocket_consumer.admin.topics import MAX_QUEUES, NO_MASTER, BrokerMissing, call_many, delete_topic, find_masters
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.cluster.gather import gather_limited
from pyrocket_consumer.cluster.names import unwrap, wrap
from pyrocket_consumer.config import check_bool, check_int
from pyrocket_consumer.errors import (
    ConfigError,
    ConnectError,
    ConnectionLost,
    PermissionDenied,
    RequestTimeout,
    RocketError,
)
from pyrocket_consumer.model import MASTER_ID, dlq_topic, retry_topic
from pyrocket_consumer.protocol.bodies import (
    SubscriptionGroupConfig,
    decode_subscription_groups,
    encode_subscription_group,
)
from pyrocket_consumer.protocol.command import (
    CreateSubscriptionGroupHeader,
    DeleteSubscriptionGroupHeader,
    GetAllSubscriptionGroupsHeader,
)
from pyrocket_consumer.text import join_truncated

# Every broker has them. Source: MixAll.
_SYSTEM_GROUPS = frozenset(
    {
        "TOOLS_CONSUMER",
        "SCHEDULE_CONSUMER",
        "FILTERSRV_CONSUMER",
        "__MONITOR_CONSUMER",
        "SELF_TEST_C_GROUP",
        "CID_ONS-HTTP-PROXY",
        "CID_ONSAPI_OWNER",
        "CID_ONSAPI_PERMISSION",
        "CID_ONSAPI_PULL",
        "CID_SYS_RMQ_TRANS",
        "CID_DefaultHeartBeatSyncerTopic",
    }
)
_SYSTEM_PREFIX = "CID_RMQ_SYS_"

_MAX_COMPARED_NAMES, _MAX_COMPARED_CHARS = 500, 255  # brokers accept no longer name of a group

_SETTINGS = {each.name: str(each.type) for each in fields(SubscriptionGroupConfig) if each.name != "group_name"}
"""Name -> its annotation."""


async def create_group(cluster: Cluster, name: str, settings: dict[str, Any]) -> None:
    """Create or change a group on every master."""
    group = wrap(cluster.config.namespace, name)
    body = encode_subscription_group(SubscriptionGroupConfig(group_name=group, **settings))
    await call_many(
        await find_masters(cluster), lambda address: cluster.call(address, CreateSubscriptionGroupHeader(), body)
    )


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if a group has no such setting, or if a value is not allowed."""
    unknown = sorted(set(settings) - _SETTINGS.keys())
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r} of a group; known settings: {', '.join(sorted(_SETTINGS))}")
    for setting, value in settings.items():
        _check_setting(setting, value)


def _check_setting(name: str, value: object) -> None:
    kind = _SETTINGS[name]
    if value is None and "None" in kind:
        return
    if "bool" in kind:
        check_bool(name, value)
    else:
        check_int(name, value, 0, MAX_QUEUES if name == "retry_queue_nums" else 2**31 - 1)


async def delete_group(cluster: Cluster, name: str, *, remove_offsets: bool, remove_dead_letters: bool) -> None:
    """Delete a group on every master, and its retry topic. A group that does not exist is no error."""
    header = DeleteSubscriptionGroupHeader(wrap(cluster.config.namespace, name), remove_offsets)
    await call_many(await find_masters(cluster), lambda address: cluster.call(address, header))
    await delete_topic(cluster, retry_topic(name))
    if remove_dead_letters:
        await delete_topic(cluster, dlq_topic(name))


async def list_groups(cluster: Cluster, *, include_system: bool) -> list[str]:
    """Return all groups that any master knows, sorted."""
    masters = await find_masters(cluster)
    found = set(chain.from_iterable((await call_many(masters, lambda address: _groups_at(cluster, address))).values()))
    if include_system:
        return sorted(found)
    namespace = cluster.config.namespace
    return sorted(
        unwrap(namespace, name)
        for name in found
        if name not in _SYSTEM_GROUPS
        and not name.startswith(_SYSTEM_PREFIX)
        and (not namespace or name.startswith(f"{namespace}%"))
    )


async def _groups_at(cluster: Cluster, address: str) -> Iterable[str]:
    return await cluster.read(address, GetAllSubscriptionGroupsHeader(), decode_subscription_groups)


async def check_group_exists(cluster: Cluster, group: str, brokers: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if no broker knows the group. Without permission to list groups, do nothing.

    A later request of the caller then shows whether the group exists.

    Raises:
        ConnectError, ConnectionLost, RequestTimeout: a broker does not respond, and no other one knows the group.
    """
    masters: Mapping[str, str | None]
    if brokers is None:
        info = await cluster.name_servers.cluster_info()
        masters = {name: data.addresses.get(MASTER_ID) for name, data in info.brokers.items()}
    else:
        masters = brokers
    known: set[str] = set()
    forbidden: list[str] = []
    silent: list[RocketError] = []

    async def fetch(name: str) -> None:
        address = masters[name]
        try:
            if address is None:
                raise BrokerMissing(f"broker {name}", NO_MASTER)
            known.update(await _groups_at(cluster, address))
        except PermissionDenied:
            forbidden.append(name)
        except (ConnectError, ConnectionLost, RequestTimeout) as error:
            silent.append(error)

    await gather_limited(sorted(masters), fetch)
    if forbidden or wrap(cluster.config.namespace, group) in known:
        return
    if silent:
        raise silent[0]
    nearest = await asyncio.get_running_loop().run_in_executor(None, _nearest_first, group, known)
    raise ConfigError(f"no broker knows group {group!r}; check its name (known: {join_truncated(nearest)})")


def _nearest_first(group: str, known: Iterable[str]) -> list[str]:
    """Return `known`, sorted by similarity to `group`. Of many or very long names, only some are compared."""
    by_length = sorted(known, key=lambda name: (abs(len(name) - len(group)), name))
    compared = [name for name in by_length[:_MAX_COMPARED_NAMES] if len(name) <= _MAX_COMPARED_CHARS]
    return difflib.get_close_matches(group, compared, max(1, len(compared)), cutoff=0.0) + by_length[len(compared) :]
