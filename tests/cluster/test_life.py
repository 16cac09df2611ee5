"""A client's life: start, blocking calls, close, fork, and failures in the background."""

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
from pyrocket_consumer.errors import ConnectError, ConsumerClosed, RequestTimeout, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.net.io_thread import IoThread
from pyrocket_consumer.testing import EmbeddedCluster, answer, drop
from pyrocket_consumer.wire.codes import RequestCode
from tests.cluster.conftest import Told, consumer_of, find_route
from tests.consuming import until


def io_threads():
    return [thread for thread in threading.enumerate() if thread.name == "pyrocket-io"]


@pytest.fixture
def nobody():
    """An address where nobody listens: the port is taken, so that nobody will."""
    with EmbeddedCluster() as cluster:
        cluster.stop_name_server()
        yield cluster.name_server


def test_a_wrong_name_server_address_leaves_nothing_running(nobody):
    before = io_threads()
    client = Cluster(ClientConfig(name_server=nobody), "me")
    with pytest.raises(ConnectError, match=nobody) as raised:
        client.start()
    assert raised.value.address == nobody
    assert client.state is ClusterState.CLOSED
    until(lambda: io_threads() == before, "its thread has ended")


def test_a_silent_name_server_fails_the_start_in_time(embedded):
    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, drop, times=None)
    client = Cluster(ClientConfig(name_server=embedded.name_server, call_timeout_s=0.2), "me")
    began = time.monotonic()
    with pytest.raises(ConnectError, match=f"{embedded.name_server}: no answer within"):
        client.start()
    assert time.monotonic() - began < 20


def test_a_name_server_that_refuses_fails_the_start(embedded):
    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, answer(1, "not now"), times=None)
    client = Cluster(ClientConfig(name_server=embedded.name_server), "me")
    with pytest.raises(ConnectError, match=f"{embedded.name_server}: it refuses the first request: .*not now"):
        client.start()


def test_a_brokers_address_is_not_taken_for_a_name_servers(embedded):
    client = Cluster(ClientConfig(name_server=embedded.broker("broker-a").address), "me")
    with pytest.raises(ConnectError, match="as a broker does, not as a name server"):
        client.start()


def test_start_fails_within_its_own_deadline(embedded):
    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, drop, times=None)
    client = Cluster(ClientConfig(name_server=embedded.name_server, call_timeout_s=60), "me")
    with pytest.raises(ConnectError, match="no answer within 0.2 s"):
        client.start(timeout_s=0.2)
    assert client.state is ClusterState.CLOSED


def test_close_ends_thread_and_connections_and_can_be_repeated(embedded, connect):
    before = io_threads()
    client = connect(embedded)
    find_route(client)
    assert embedded.name_server_node.connections
    client.close()
    client.close()
    embedded.wait_until(lambda: not embedded.name_server_node.connections)
    until(lambda: io_threads() == before, "its thread has ended")


def test_close_gives_waiting_calls_an_error(embedded, broker, connect):
    client = connect(embedded, call_timeout_s=60)
    find_route(client)
    broker.on(RequestCode.GET_MAX_OFFSET, drop)
    waiting = client.submit(client.broker("broker-a").max_offset(MessageQueue("orders", "broker-a", 0)))
    broker.wait_for(RequestCode.GET_MAX_OFFSET)
    client.close()
    with pytest.raises((RocketError, concurrent.futures.CancelledError)):
        waiting.result(30)


@pytest.mark.parametrize("moment", ["before start", "after close"])
def test_a_client_that_is_not_running_says_so(embedded, connect, moment):
    if moment == "before start":
        client = Cluster(ClientConfig(name_server=embedded.name_server), "me")
    else:
        client = connect(embedded)
        client.close()
    for call in (client.run, lambda coroutine, timeout_s: client.submit(coroutine)):
        with pytest.raises(ConsumerClosed, match="created|closed"):
            call(client.route("orders"), 30)


def test_a_client_starts_once(client):
    with pytest.raises(ConsumerClosed, match="only once"):
        client.start()
    client.close()
    with pytest.raises(ConsumerClosed, match="only once"):
        client.start()


def test_a_client_that_was_never_started_closes_without_a_word(nobody):
    Cluster(ClientConfig(name_server=nobody), "me").close()


def test_a_blocking_call_on_the_io_thread_is_refused(client):
    async def block():
        return find_route(client)

    with pytest.raises(RuntimeError, match="await it instead"):
        client.run(block(), 30)

    async def close():
        client.close()

    with pytest.raises(RuntimeError, match="await it instead"):
        client.run(close(), 30)
    assert find_route(client).topic == "orders"


def test_a_blocking_call_ends_at_its_deadline(embedded, connect):
    client = connect(embedded, call_timeout_s=60)
    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, drop)
    with pytest.raises(RequestTimeout):
        client.run(client.route("orders"), 0.2)


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


def test_a_client_runs_on_a_loop_without_any_thread():
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
        await client.route("TBW102")
        client.add_consumer("g", consumer_of("g"))
        answered = await client.heartbeat()
        await client.close_on_loop()
        cluster.shut()
        await asyncio.sleep(0.01)  # transports end in the loop's next rounds
        return answered

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == 1


def test_a_background_task_that_ends_by_surprise_is_reported(embedded):
    client = Cluster(ClientConfig(name_server=embedded.name_server), "me")
    told = Told()
    client.on_failure(told)
    client.start()

    async def fail():
        raise ZeroDivisionError("a defect")

    async def in_the_background():
        client.spawn(fail(), "doomed")

    client.run(in_the_background(), 30)
    (error,) = told.next()
    assert isinstance(error, ZeroDivisionError)
    assert told.nothing
    client.close()


@pytest.mark.parametrize("hook", ["on_route_changed", "on_answer"])
def test_what_fails_in_a_callback_is_reported_and_harms_no_call(embedded, hook):
    client = Cluster(ClientConfig(name_server=embedded.name_server), "me")
    told = Told()
    client.on_failure(told)

    def fail(*facts):
        raise ZeroDivisionError("a defect")

    if hook == "on_route_changed":
        client.on_route_changed(fail)
    client.start()
    route = find_route(client)
    assert len(route.consume_queues()) == 4
    if hook == "on_answer":

        async def pull():
            connection = await client.connection(client.address("broker-a"))
            connection.send(lambda opaque: b"", fail, 0.01)

        client.run(pull(), 30)
    assert isinstance(told.next()[0], ZeroDivisionError)
    assert find_route(client, refresh=True) is route
    client.close()


FORKED = """
import os, sys
from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import ConsumerClosed

config = ClientConfig(name_server=sys.argv[1])
made_before, started_before = Cluster(config, "a"), Cluster(config, "b")
started_before.start()
started_before.run(started_before.route("orders"), 30)
child = os.fork()
if child == 0:
    try:
        started_before.run(started_before.route("orders"), 30)
    except ConsumerClosed as error:
        assert "make a new one after the fork" in str(error), error
        started_before.close()
        made_before.start()
        made_before.run(made_before.route("orders"), 30)
        made_before.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
started_before.run(started_before.route("orders", refresh=True), 30)
started_before.close()
print("parent works on")
"""


@pytest.mark.live
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_fork_the_parent_goes_on_and_the_child_refuses(embedded):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, embedded.name_server],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "parent works on", done.stderr


@pytest.mark.live
def test_importing_starts_nothing():
    code = "import threading, pyrocket_consumer.cluster; print(threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"
