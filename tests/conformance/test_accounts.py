"""Members, producers, admins and the shell with brokers that require signed requests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocket_consumer import Admin, Producer
from pyrocket_consumer.errors import BrokerError, SendError
from pyrocket_consumer.testing import EmbeddedCluster
from tests.consuming import LONG_TIMEOUT_S, WAIT_S, RecordingListener, consuming, numbered, until
from tests.real_brokers.accounts import ACCOUNT, ACL_1, ACL_2

ROOT = Path(__file__).parents[2]
ACCESS_KEY, SECRET_KEY = ACCOUNT
KEYS = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
STRANGERS = [{}, {**KEYS, "secret_key": "wrong"}, {**KEYS, "access_key": "nobody"}]


@pytest.mark.versions("4.9.7")
@pytest.mark.cluster(settings={"aclEnable": True}, account=ACCOUNT, home_files=ACL_1)
def test_accounts_of_version_4(real_cluster, topic, group):
    an_account_is_let_in_and_others_are_not(real_cluster, topic, group)


@pytest.mark.versions("5.5.0")
@pytest.mark.cluster(settings=ACL_2, account=ACCOUNT)
def test_accounts_of_version_5(real_cluster, topic, group):
    an_account_is_let_in_and_others_are_not(real_cluster, topic, group)


@pytest.mark.live
@pytest.mark.differs("accounts")
def test_accounts_of_the_embedded_cluster(topic, group):
    with EmbeddedCluster(account=ACCOUNT) as embedded:
        an_account_is_let_in_and_others_are_not(embedded, topic, group)


def an_account_is_let_in_and_others_are_not(cluster, topic, group):
    cluster.create_topic(topic, queues=2)
    timeouts = {
        "name_server": cluster.name_server,
        "call_timeout_s": LONG_TIMEOUT_S,
        "connect_timeout_s": LONG_TIMEOUT_S,
    }
    for keys in STRANGERS:
        with Producer(**timeouts, **keys, send_timeout_s=LONG_TIMEOUT_S) as stranger:
            with pytest.raises(SendError) as refused:
                stranger.send(topic, b"not stored")
            assert SECRET_KEY not in str(refused.value)
    with Producer(**timeouts, **KEYS, send_timeout_s=WAIT_S) as producer:
        for body in numbered(10):
            producer.send(topic, body)
    seen = RecordingListener()
    with consuming(cluster, topic, group, seen, **KEYS, commit_interval_s=0.1):
        seen.wait(lambda seen: len(seen.messages) >= 10)
        until(lambda: sum(cluster.committed(group, topic).values()) == 10, "committed")
        with Admin(**timeouts, **KEYS) as admin:
            assert admin.plan_reset(group, topic, "earliest").execute().verified
        seen.wait(lambda seen: len(seen.messages) >= 20)
        shell_resets(cluster.name_server, group, topic)
        seen.wait(lambda seen: len(seen.messages) >= 30)
    assert sorted(seen.bodies) == sorted(3 * numbered(10))
    with Admin(**timeouts, **STRANGERS[1]) as stranger, pytest.raises(BrokerError):
        stranger.plan_reset(group, topic, "earliest")


def shell_resets(name_server, group, topic):
    """Reset the group to the first offsets with the command."""
    command = [sys.executable, "-m", "pyrocket_consumer.cli", "offsets", "reset", group, topic, "--to", "earliest"]
    account = {"PYROCKET_ACCESS_KEY": ACCESS_KEY, "PYROCKET_SECRET_KEY": SECRET_KEY}
    done = subprocess.run(
        [*command, "--execute", "-n", name_server],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, **account},
    )
    assert (done.returncode, SECRET_KEY in done.stdout + done.stderr) == (0, False), done.stdout + done.stderr
