"""The real clusters of other tests do what their methods describe."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from pyrocket_consumer.protocol.codes import RequestCode
from tests.real_brokers import wait_until
from tests.real_brokers.accounts import ACCOUNT, ACL_1, ACL_2
from tests.real_brokers.process import sweep_directories
from tests.real_brokers.remoting import Peer, Refused


def test_messages_are_where_they_were_sent(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, queues=2)
    carried = {"tags": "paid", "keys": ["k1", "k2"], "properties": {"a": "b"}}
    sent = real_cluster.send(topic, b"hello", count=3, queue_id=1, **carried)
    assert [(each.queue.queue_id, each.queue_offset) for each in sent] == [(1, 0), (1, 1), (1, 2)]
    wait_until(lambda: len(real_cluster.messages(topic)) == 3, "the broker shows what it has stored")
    found = real_cluster.messages(topic)
    assert [(each.body, each.tags, each.keys, each.property("a")) for each in found] == [
        (b"hello", "paid", ("k1", "k2"), "b")
    ] * 3
    assert [each.message_id for each in found] == [each.message_id for each in sent]
    assert real_cluster.committed(names.group(), topic) == {}, "a group without offsets has none"


def test_a_killed_broker_keeps_its_messages(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, queues=1)
    real_cluster.send(topic, count=5)
    broker = real_cluster.broker("broker-a")
    address, pid = broker.address, broker.pid
    broker.kill()
    assert not broker.running
    broker.start()
    assert broker.address == address
    assert broker.pid != pid
    wait_until(lambda: len(real_cluster.messages(topic)) == 5, "the broker shows what it had stored")


def test_routes_have_the_readable_and_writable_queues(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, read_queues=3, write_queues=2)
    assert {each.queue.queue_id for each in real_cluster.send(topic, lambda number: b"%d" % number, count=6)} == {0, 1}
    wait_until(lambda: len(real_cluster.messages(topic)) == 6, "the broker shows what it has stored")
    assert sorted(each.body for each in real_cluster.messages(topic)) == [b"0", b"1", b"2", b"3", b"4", b"5"]
    real_cluster.delete_topic(topic)
    with pytest.raises(AssertionError):
        wait_until(lambda: real_cluster.messages(topic), "messages of a topic without a route", timeout_s=0.5)


@pytest.mark.differs("registration")
def test_brokers_register_again_at_a_new_name_server(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, queues=1)
    address = real_cluster.name_server
    real_cluster.stop_name_server()
    real_cluster.start_name_server()
    assert real_cluster.name_server == address
    wait_until(lambda: len(real_cluster.send(topic)) == 1, "a route")
    wait_until(lambda: len(real_cluster.messages(topic)) == 1, "the broker shows what it has stored")


@pytest.mark.cluster(brokers=2, slaves=1, settings={"autoCreateTopicEnable": False})
def test_two_brokers_with_slaves(real_cluster, names):
    topic = names.topic()
    real_cluster.create_topic(topic, queues=1)
    real_cluster.send(topic, count=4)
    assert [len(broker.messages(topic, 0)) for broker in real_cluster.brokers] == [2, 2]
    slave = real_cluster.broker("broker-b-1")
    wait_until(lambda: slave.max_offset(topic, 0) == 2, "replication", timeout_s=60)


ORPHAN = """
import os, sys
from tests.real_brokers import RealCluster
cluster = RealCluster(sys.argv[1])
cluster.start()
print(cluster.name_server_node.pid, cluster.broker("broker-a").pid, cluster.directory, flush=True)
os.kill(os.getpid(), 9)
"""


def test_servers_end_with_the_process_that_started_them(real_version, pytestconfig):
    command = [sys.executable, "-c", ORPHAN, real_version]
    root = pytestconfig.rootpath
    answer = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, timeout=200, check=False)
    assert answer.returncode == -9
    *pids, directory = answer.stdout.split()
    wait_until(lambda: not any(_is_running(int(pid)) for pid in pids), f"end of {pids}")
    sweep_directories()
    assert not Path(directory).exists()


def _is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.versions("4.9.7")
@pytest.mark.cluster(settings={"aclEnable": True}, account=ACCOUNT, home_files=ACL_1)
def test_a_cluster_with_accounts_of_version_4(real_cluster, java, names):
    check_accounts(real_cluster, java, names)


@pytest.mark.versions("5.5.0")
@pytest.mark.cluster(settings=ACL_2, account=ACCOUNT)
def test_a_cluster_with_accounts_of_version_5(real_cluster, java, names):
    check_accounts(real_cluster, java, names)


def check_accounts(cluster, java, names):
    topic, account = names.topic(), {"accessKey": ACCOUNT[0], "secretKey": ACCOUNT[1]}
    cluster.create_topic(topic, queues=1)
    with java.producer(cluster.name_server, **account) as producer:
        producer.send(topic, count=2)
    with java.consumer(cluster.name_server, names.group(), topic, **account) as consumer:
        consumer.wait_for_messages(2)
    with closing(Peer(cluster.broker("broker-a").address)) as stranger, pytest.raises(Refused):
        stranger.call(RequestCode.GET_BROKER_CONFIG)
