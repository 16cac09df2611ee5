"""Members killed with -9 and frozen at random: the ledger has each message once, but not in the other ways."""

from __future__ import annotations

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.exactly_once.killing import run
from tests.exactly_once.member import WAYS

pytestmark = pytest.mark.timeout(600)


@pytest.mark.live
@pytest.mark.slow("members are killed and come again, until 3000 messages are consumed")
@pytest.mark.versions("4.9.7", "5.5.0")
@pytest.mark.databases("sqlite", "postgresql")
def test_the_ledger_has_each_message_once(cluster, database, names):
    printed: list[str] = []
    wrong = run(cluster, database, 3000, every_s=0.7, report=printed.append, topic=names.topic(), group=names.group())
    assert wrong == "", printed[-1]
    assert ", 0 kills" not in printed[-1]


@pytest.mark.slow("kills members until some message comes twice", proof=True)
@pytest.mark.databases("postgresql")
@pytest.mark.parametrize("way", WAYS[1:])
def test_the_other_way_repeats_some_messages(database, way, names):
    with EmbeddedCluster() as cluster:
        for seed in range(4):  # the signals may miss all members
            wrong = run(cluster, database, 4000, way, 0.3, seed, topic=names.topic(), group=names.group())
            if "twice: 0" not in wrong and wrong:
                return
    raise AssertionError(f"{way} had each message once, so the search proves nothing")
