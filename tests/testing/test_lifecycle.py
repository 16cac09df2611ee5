"""Processes that stop, are killed, start again, lose data or change roles."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from pyrocket_consumer import Admin, Producer
from pyrocket_consumer.errors import ConfigError
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import sign
from pyrocket_consumer.protocol.message import decode_messages
from pyrocket_consumer.testing import EmbeddedCluster
from pyrocket_consumer.testing.node import Clock
from pyrocket_consumer.testing.server import Changes, Server
from tests.testing.brokers import broker_and_client, pull_result
from tests.testing.raw_client import RawClient


def test_a_broker_starts_again_on_its_port_with_its_data(broker, client):
    address = broker.address
    client.heartbeat("G", "T")
    client.produce("T", b"kept")
    client.commit("G", "T", 0, 1)
    broker.stop()
    assert not broker.running
    assert client.wait_closed() == "closed"
    with pytest.raises(ConnectionRefusedError):
        RawClient(address)
    broker.start()
    assert broker.address == address
    with RawClient(address) as again:
        assert decode_messages(again.pull("T", 0, 0).body)[0].body == b"kept"
        assert again.query("G", "T", 0).fields == {"offset": "1"}
        assert broker.members("G") == []


@pytest.mark.differs("ends")
@pytest.mark.parametrize("lose", [False, True])
def test_a_killed_broker_may_lose_unflushed_commits(lose: bool) -> None:
    with broker_and_client(flush_offsets_s=600) as (broker, client):
        broker.create_group("G")
        client.commit("G", "T", 0, 1)
        broker.flush_offsets()
        client.commit("G", "T", 0, 2)
        broker.kill(lose_commits=lose)
        assert client.wait_closed() == "reset"
        broker.start()
        assert broker.committed("G", "T") == {0: 1 if lose else 2}


@pytest.mark.live
def test_a_cluster_and_clients_start_although_their_threads_begin_late() -> None:
    def wait(*event: object) -> None:
        """Delay a new thread, as a busy machine does."""
        sys.setprofile(None)
        time.sleep(0.05)

    threading.setprofile(wait)
    try:
        with EmbeddedCluster() as cluster:
            cluster.create_topic("T")
            with Producer("late", name_server=cluster.name_server) as producer:
                sent = producer.send("T", b"late")
            with Admin(name_server=cluster.name_server) as admin:
                assert sent.queue in admin.topic_offsets("T")
    finally:
        threading.setprofile(None)


def test_commits_are_flushed_by_time() -> None:
    with broker_and_client(flush_offsets_s=0.05) as (broker, client):
        broker.create_group("G")
        client.commit("G", "T", 0, 2)
        before = broker.core.offsets._flushed
        broker.cluster.wait_until(lambda: broker.core.offsets._flushed is not before)
        broker.kill(lose_commits=True)
        broker.start()
        assert broker.committed("G", "T") == {0: 2}


def test_a_delayed_message_survives_a_restart() -> None:
    with broker_and_client(delay_scale=2) as (broker, client):
        client.produce("T", properties={"DELAY": "1"})
        broker.kill()
        assert broker.max_offset("T", 0) == 0
        broker.start()
        broker.cluster.wait_until(lambda: broker.max_offset("T", 0) == 1)


@pytest.mark.differs("disk")
def test_messages_are_lost_at_either_end(broker, client):
    broker.cluster.send("T", count=10, queue_id=0)
    broker.delete_before("T", 0, 3)
    broker.truncate("T", 0, 8)
    assert (broker.min_offset("T", 0), broker.max_offset("T", 0)) == (3, 8)
    assert pull_result(client.pull("T", 0, 10)) == (21, "OFFSET_OVERFLOW_BADLY", 8, 3, 8)
    broker.cluster.send("T", b"new", queue_id=0)
    assert decode_messages(client.pull("T", 0, 8).body)[0].body == b"new"


def test_everything_is_lost(broker, client):
    broker.cluster.send("T", count=3, queue_id=0)
    broker.commit("G", "T", {0: 3})
    broker.lose_data(messages=False)
    assert (broker.committed("G", "T"), broker.max_offset("T", 0)) == ({}, 3)
    broker.commit("G", "T", {0: 3})
    broker.lose_data(offsets=False)
    assert pull_result(client.pull("T", 0, 3)) == (21, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)
    assert broker.committed("G", "T") == {0: 3}


@pytest.mark.differs("roles")
def test_a_slave_takes_over() -> None:
    with EmbeddedCluster(slaves=1) as cluster:
        cluster.create_topic("T", queues=1)
        old, slave = cluster.broker("broker-a"), cluster.broker("broker-a-1")
        cluster.send("T", b"replicated")
        old.commit("G", "T", {0: 1})
        slave.sync_with_master()
        slave.pause_replication()
        cluster.send("T", b"not replicated")
        old.commit("G", "T", {0: 2})
        assert [message.body for message in slave.messages("T")] == [b"replicated"]
        old.kill()
        new = cluster.switch_master("broker-a")
        assert new is slave is cluster.broker("broker-a")
        assert (new.broker_id, old.broker_id, new.committed("G", "T")) == (0, 1, {0: 1})
        cluster.send("T", b"after")
        old.start()
        assert [message.body for message in old.messages("T")] == [b"replicated", b"after"]
        with RawClient(new.address) as to_new, RawClient(old.address) as to_old:
            assert to_new.produce("T").code == 0
            assert to_old.produce("T").code == 2
            assert pull_result(to_old.pull("T", 0, 9))[0] == 20


def test_a_new_master_delivers_the_delayed_messages_of_the_old_one() -> None:
    with EmbeddedCluster(slaves=1, delay_scale=2) as cluster:
        cluster.create_topic("T", queues=1)
        old = cluster.broker("broker-a")
        with RawClient(old.address) as client:
            client.produce("T", b"delayed", properties={"DELAY": "1"})
            properties = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": "U"}
            half = client.produce("T", b"half", properties=properties, sysFlag=4).fields
        new = cluster.switch_master("broker-a")
        with RawClient(new.address) as client:
            decision = {
                "producerGroup": "P",
                "tranStateTableOffset": half["queueOffset"],
                "commitOrRollback": 8,
                "commitLogOffset": int(half["msgId"][16:], 16),
                "fromTransactionCheck": False,
                "msgId": "U",
            }
            assert client.call(RequestCode.END_TRANSACTION, decision).code == 0
        cluster.wait_until(lambda: new.max_offset("T", 0) == 2)
        assert [message.body for message in new.messages("T")] == [b"half", b"delayed"]
        assert [message.body for message in old.messages("T")] == [b"half", b"delayed"]


def test_a_dead_broker_may_keep_its_route() -> None:
    with broker_and_client() as (broker, _), RawClient(broker.cluster.name_server) as client:
        broker.kill(keep_route=True)
        assert client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "T"}).code == 0


def test_a_simulated_node_has_the_port_it_is_given() -> None:
    loop = asyncio.new_event_loop()
    server = Server(Clock(loop), Changes(), port=1, simulated=True, on_failure=lambda address, error: None)
    assert server.address == "127.0.0.1:1"
    server.release_port()
    loop.close()


def test_replication_catches_up() -> None:
    with EmbeddedCluster(slaves=1) as cluster:
        cluster.create_topic("T", queues=1)
        slave = cluster.broker("broker-a-1")
        slave.pause_replication()
        cluster.send("T", count=3)
        assert slave.messages("T") == []
        slave.resume_replication()
        ids = [message.offset_message_id for message in cluster.messages("T")]
        assert [message.offset_message_id for message in slave.messages("T")] == ids


def test_broken_frames_end_the_connection_without_an_answer() -> None:
    json = b"not json"
    for data in (
        struct.pack(">I", 17 * 1024 * 1024),
        struct.pack(">iI", -1, 0),
        struct.pack(">II", 8, 100),
        struct.pack(">II", 4 + len(json), 2 << 24 | len(json)) + json,
        struct.pack(">II", 4 + len(json), len(json)) + json,
    ):
        with broker_and_client() as (broker, client):
            client.send_bytes(data.ljust(12, b"\0"))
            assert client.wait_closed() in ("closed", "reset")
            assert broker.requests() == []


def test_idle_connections_are_closed() -> None:
    with broker_and_client(idle_timeout_s=0.2) as (_, client):
        assert client.wait_closed() == "closed"


def test_connections_can_be_ended_by_the_test(broker, client):
    broker.cluster.wait_until(lambda: broker.connections == [client.address])
    broker.close_connections()
    assert client.wait_closed() == "reset"


def test_requests_must_be_signed_where_there_is_an_account() -> None:
    for version, code in (("4.9.7", 1), ("5.5.0", 16)):
        with broker_and_client(version=version, account=("ak", "sk")) as (_, client):
            fields = {"topic": "T", "queueId": "0"}
            assert client.call(RequestCode.GET_MAX_OFFSET, fields).code == code
            assert client.call(RequestCode.GET_MAX_OFFSET, sign(fields, b"", "ak", "sk")).code == 0
            assert client.call(RequestCode.GET_MAX_OFFSET, sign(fields, b"", "ak", "wrong")).code == code
            assert client.call(RequestCode.GET_MAX_OFFSET, sign(fields, b"", "nobody", "sk")).code == code


@pytest.mark.live
def test_a_stopped_broker_keeps_its_port_reserved(broker):
    broker.stop()
    host, port = broker.address.split(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))
        other.listen()
    broker.start()


def test_calls_come_from_any_thread() -> None:
    with EmbeddedCluster() as cluster:
        cluster.create_topic("T", queues=4)
        threads = [threading.Thread(target=lambda: [cluster.send("T") for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(cluster.messages("T")) == 200
    assert not [thread for thread in threading.enumerate() if thread.name == "rocketmq-embedded"]


def test_a_cluster_runs_on_a_loop_of_the_caller() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        cluster = EmbeddedCluster(slaves=1, loop=loop, wall_clock=lambda: 1_000.0)
        await cluster.open()
        cluster.create_topic("T", queues=1)
        [sent] = cluster.send("T", b"hello")
        assert cluster.messages("T")[0].stored_at_ms == 1_000_000
        client = await loop.run_in_executor(None, RawClient, cluster.broker("broker-a").address)
        answer = await loop.run_in_executor(None, client.pull, "T", 0, sent.queue_offset)
        assert decode_messages(answer.body)[0].body == b"hello"
        client.close()
        cluster.broker("broker-a").kill()
        await cluster.broker("broker-a").open()
        cluster.shut()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_cluster_may_be_used_within_a_coroutine() -> None:
    async def main() -> None:
        with EmbeddedCluster() as cluster:
            cluster.create_topic("T", queues=1)
            cluster.send("T", b"hello")
            await asyncio.sleep(0)
            assert [each.body for each in cluster.messages("T")] == [b"hello"]

    asyncio.run(main())


def test_wrong_options_name_the_remedy() -> None:
    for options, text in (
        ({"version": "3.2.6"}, "4.9.7"),
        ({"brokers": 0}, "1 to 26"),
        ({"brokers": ["a", "a"]}, "different names"),
        ({"settings": {"noSuchThing": 1}}, "noSuchThing"),
        ({"version": "4.9.7", "server_side_reset": True}, "5.1.0"),
        ({"long_poll_tick_s": 0}, "above 0"),
        ({"name_servers": 0}, "name_servers=0 is not allowed; .* from 1 to"),
    ):
        with pytest.raises(ConfigError, match=text):
            EmbeddedCluster(**options)  # type: ignore[arg-type]
    for use in (
        lambda cluster: cluster.create_topic("T"),
        lambda cluster: cluster.name_server,
        lambda cluster: cluster.name_server_node,
        lambda cluster: cluster.stop_name_server(),
    ):
        with pytest.raises(RuntimeError, match="call start"):
            use(EmbeddedCluster())
    with EmbeddedCluster() as cluster, pytest.raises(ConfigError, match="broker-a has no slave .*slaves=1"):
        cluster.switch_master("broker-a")


@pytest.mark.live
def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        with broker_and_client() as (_, client):
            client.heartbeat("G", "T")
    after = len(os.listdir("/proc/self/fd")) if before else 0
    assert after <= before + 1


_OF_FORKS = """
import os, socket, sys
from pyrocket_consumer.testing import EmbeddedCluster
with EmbeddedCluster() as cluster:
    broker = cluster.broker("broker-a")
    host, _, port = broker.address.rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    cluster.wait_until(lambda: broker.connections)
    until, end = os.pipe()
    wait_connected, connected = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        try:
            cluster.send("T", b"from the child")
        except RuntimeError as error:
            print(error)
        cluster.close()
        shown = socket.create_connection((host, int(port)), timeout=30)  # stays open during the search
        os.write(connected, b"x")
        sys.stdout.flush()
        os.read(until, 1)
        os._exit(0)
    os.close(connected)
    os.read(wait_connected, 1)  # the broker may know of a connection before its client does
    cluster.wait_until(lambda: len(broker.connections) > 1)
    getattr(broker, sys.argv[1])()
    try:
        assert client.recv(1) == b""
    except ConnectionResetError:
        pass
    try:
        socket.create_connection((host, int(port)), timeout=30)
    except ConnectionRefusedError:
        pass
    else:
        raise AssertionError("somebody listens")
    broker.start()
    socket.create_connection((host, int(port)), timeout=30).close()
    os.close(end)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.live
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_forked_child_does_not_listen_on_the_port_of_a_stopped_broker(end: str) -> None:
    """A broker with children, forked as `multiprocessing` forks them, still stops completely and starts again."""
    done = subprocess.run(
        [sys.executable, "-c", _OF_FORKS, end], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "runs in the process that started it" in done.stdout


def test_calls_after_close_raise() -> None:
    with EmbeddedCluster() as cluster:
        broker = cluster.broker("broker-a")
    for action in (broker.stop, broker.kill, broker.start, broker.restart, lambda: broker.messages("T")):
        with pytest.raises(RuntimeError, match="was closed; make a new one"):
            action()


ENDS = {
    "close": [],
    "stop name server": [EmbeddedCluster.stop_name_server, EmbeddedCluster.start_name_server],
    "stop broker": [lambda cluster: cluster.broker("broker-a").restart()],
    "kill broker": [lambda cluster, do=do: getattr(cluster.broker("broker-a"), do)() for do in ("kill", "start")],
}


@pytest.mark.live
@pytest.mark.parametrize("attempt", range(3))
@pytest.mark.parametrize("end", ENDS)
def test_connecting_during_a_close_leaks_no_socket(end, attempt):
    connected, closed = threading.Semaphore(0), threading.Event()

    def knock(address: str) -> None:
        host, _, port = address.rpartition(":")
        while not closed.is_set():
            with socket.socket() as knocking, suppress(OSError):
                knocking.settimeout(0.1)  # while nobody accepts, the kernel drops attempts, and repeats them after 1 s
                knocking.connect((host, int(port)))
                connected.release()

    with EmbeddedCluster() as cluster:
        node = cluster.name_server_node if end == "stop name server" else cluster.broker("broker-a")
        threads = [threading.Thread(target=knock, args=(node.address,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            assert all(connected.acquire(timeout=30) for _ in range(200))
            for step in ENDS[end] * 3 or [EmbeddedCluster.close]:
                step(cluster)
        finally:
            closed.set()
            for thread in threads:
                thread.join()
    gc.collect()  # an open socket warns, and warnings are errors
