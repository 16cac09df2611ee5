"""The life cycle of a client: start, blocking calls, close, fork, and background failures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading
import time

import pytest

from pyrocket_consumer.cluster import Cluster, ClusterState
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import ClientClosed, ConnectError, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, answer, drop
from pyrocket_consumer.transport.io_thread import IoThread
from tests.cluster.conftest import RecordedCalls, consumer_of, find_route
from tests.consuming import until
from tests.for_each import for_each


def io_threads():
    return [thread for thread in threading.enumerate() if thread.name == "pyrocket-io"]


def unstarted(name_server, **options):
    return Cluster(ClientConfig(name_server=name_server, **options), "me")


@pytest.fixture
def nobody():
    """An address without a listener. The port is in use, so that no server can listen there."""
    with EmbeddedCluster() as cluster:
        cluster.stop_name_server()
        yield cluster.name_server


def test_a_wrong_name_server_address_leaves_nothing_running(nobody):
    before = io_threads()
    unstarted(nobody).close()  # silently
    client = unstarted(nobody)
    with pytest.raises(ConnectError, match=nobody) as raised:
        client.start()
    assert raised.value.address == nobody
    assert client.state is ClusterState.CLOSED
    until(lambda: io_threads() == before, "its thread has ended")


@for_each(
    "options, start, fault, reason",
    [
        ({"call_timeout_s": 0.2}, {}, drop, "no response within"),
        ({"call_timeout_s": 60}, {"timeout_s": 0.2}, drop, "no response within 0.2 s"),
        ({}, {}, answer(1, "not now"), "it refuses the first request: .*not now"),
    ],
    ids=["silent", "silent, and start has a deadline", "refusing"],
)
def test_an_unavailable_name_server_fails_the_start_in_time(embedded, options, start, fault, reason):
    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, fault, times=None)
    client, began = unstarted(embedded.name_server, **options), time.monotonic()
    with pytest.raises(ConnectError, match=f"{embedded.name_server}: {reason}"):
        client.start(**start)
    assert time.monotonic() - began < 20
    assert client.state is ClusterState.CLOSED
    with pytest.raises(ConnectError, match="like a broker, not like a name server"):
        unstarted(embedded.broker("broker-a").address).start()
    embedded.name_server_node.clear_faults()


def test_close_ends_thread_and_connections_and_can_be_repeated(embedded, connect):
    before = io_threads()
    client = connect(embedded)
    find_route(client)
    assert embedded.name_server_node.connections
    client.close()
    client.close()
    embedded.wait_until(lambda: not embedded.name_server_node.connections)
    until(lambda: io_threads() == before, "its thread has ended")


def test_close_and_deadlines_raise_in_waiting_calls(embedded, broker, connect):
    client = connect(embedded, call_timeout_s=60)
    find_route(client)
    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, drop)
    with pytest.raises(RequestTimeout):
        client.run(client.routes.get("orders", refresh=True), 0.2)
    broker.on(RequestCode.GET_MAX_OFFSET, drop)
    waiting = client.submit(client.broker("broker-a").max_offset(MessageQueue("orders", "broker-a", 0)))
    broker.wait_for(RequestCode.GET_MAX_OFFSET)
    client.close()
    with pytest.raises((RocketError, concurrent.futures.CancelledError)):
        waiting.result(30)


def test_a_client_that_is_not_running_raises_and_starts_once(embedded, connect):
    closed = connect(embedded)
    for _ in range(2):
        with pytest.raises(ClientClosed, match="only once"):
            closed.start()
        closed.close()
    for client in (unstarted(embedded.name_server), closed):
        for call in (client.run, lambda coroutine, timeout_s, client=client: client.submit(coroutine)):
            with pytest.raises(ClientClosed, match="created|closed"):
                call(client.routes.get("orders"), 30)


def test_a_blocking_call_on_the_io_thread_is_refused(client):
    for work in (lambda: find_route(client), client.close):

        async def block(work=work):
            return work()

        with pytest.raises(RuntimeError, match="await it instead"):
            client.run(block(), 30)
    assert find_route(client).topic == "orders"


def test_clients_can_share_an_io_thread_that_is_not_theirs(embedded):
    io = IoThread()
    io.start()
    config = ClientConfig(name_server=embedded.name_server)
    first, second = Cluster(config, "first", io=io), Cluster(config, "second", io=io)
    first.start()
    second.start()
    first.close()
    assert find_route(second).topic == "orders"
    second.close()
    assert io_threads() != []
    io.stop()


def test_a_client_runs_on_a_loop_without_a_thread():
    async def scenario():
        loop = asyncio.get_running_loop()
        cluster = EmbeddedCluster(loop=loop)
        await cluster.open()

        class Io(IoThread):
            def __init__(self):
                self.loop = loop

        config = ClientConfig(name_server=cluster.name_server, call_timeout_s=30, connect_timeout_s=30)
        client = Cluster(config, "me", io=Io())
        await client.start_on_loop()
        await client.routes.get("TBW102")
        client.membership.add_consumer("g", consumer_of("g"))
        answered = await client.membership.heartbeat()
        await client.close_on_loop()
        cluster.shut()
        await asyncio.sleep(0.01)  # transports end in the loop's next rounds
        return answered

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == 1


def defect(*facts):
    raise ZeroDivisionError("a defect")


@pytest.mark.parametrize("where", ["route_changed", "on_answer", "in the background"])
def test_a_defect_is_reported_and_harms_no_call(embedded, where):
    client, calls = unstarted(embedded.name_server), RecordedCalls()
    client.events.client_failed = calls
    if where == "route_changed":
        client.events.route_changed = defect
    client.start()
    route = find_route(client)
    assert len(route.consume_queues()) == 4

    async def fail():
        defect()

    async def work():
        if where == "in the background":
            client.spawn(fail(), "doomed")
        elif where == "on_answer":
            connection = await client.connection(client.routes.address("broker-a"))
            connection.send(lambda opaque: b"", defect, 0.01)

    client.run(work(), 30)
    (error,) = calls.next()
    assert isinstance(error, ZeroDivisionError)
    assert calls.is_empty
    assert find_route(client, refresh=True) is route
    client.close()


FORKED = """
import os, sys
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import ClientClosed

config = ClientConfig(name_server=sys.argv[1])
made_before, started_before = Cluster(config, "a"), Cluster(config, "b")
started_before.start()
started_before.run(started_before.routes.get("orders"), 30)
child = os.fork()
if child == 0:
    try:
        started_before.run(started_before.routes.get("orders"), 30)
    except ClientClosed as error:
        assert "make a new one after the fork" in str(error), error
        started_before.close()
        made_before.start()
        made_before.run(made_before.routes.get("orders"), 30)
        made_before.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
started_before.run(started_before.routes.get("orders", refresh=True), 30)
started_before.close()
print("parent works on")
"""


def run_python(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.live
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_fork_the_parent_continues_and_the_child_refuses(embedded):
    done = run_python("-W", "ignore::DeprecationWarning", "-c", FORKED, embedded.name_server)
    assert done.stdout.strip() == "parent works on", done.stderr


@pytest.mark.live
def test_importing_starts_nothing():
    done = run_python("-c", "import threading, pyrocket_consumer.cluster; print(threading.active_count())")
    assert done.stdout.strip() == "1", done.stderr
