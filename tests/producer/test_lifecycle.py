"""Start and close a producer, its threads, and its limits of messages in flight."""

from __future__ import annotations

import gc
import os
import pickle
import queue
import time

import pytest

from pyrocket_consumer import ClientClosed, ConfigError, ConnectError, MessageQueue, SendError
from pyrocket_consumer.producer import Producer, ProducerState
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster, Gate
from tests.for_each import for_each
from tests.interruptions import exit_code, fork_child, name_servers_held
from tests.producer.programs import in_a_thread, in_threads, producer_threads, run_program, within

SEND = RequestCode.SEND_MESSAGE_V2

# --- ids

FORKS = """
import os, random, sys
from pyrocket_consumer import ConnectError, Producer
random.seed(42)
producer = Producer(name_server=sys.argv[1])
try:
    Producer(name_server="127.0.0.1:1").send("orders", b"x")
except ConnectError:
    pass
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        for _ in range(2):
            os.write(1, producer.send("orders", b"x").message_id.encode() + b"\\n")
        producer.close()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
"""


def makers(program: str, name_server: str) -> list[str]:
    """Return the process-specific part of the id of each message, without the address."""
    done = run_program(program, name_server)
    assert (done.returncode, done.stderr) == (0, "")
    return [message_id[8:20] for message_id in done.stdout.split()]


@pytest.mark.live
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_processes_forked_before_the_start_make_ids_of_their_own(embedded):
    found = makers(FORKS, embedded.name_server)
    assert len(found) == 6
    assert len({maker[4:] for maker in found}) >= 3  # the first message may differ from the next one


@pytest.mark.live
def test_programs_that_seed_random_alike_make_ids_of_their_own(embedded):
    """In containers they have the same process id, too."""
    program = "import random, sys; random.seed(42); from pyrocket_consumer import Producer\n"
    program += "with Producer(name_server=sys.argv[1]) as producer: print(producer.send('orders', b'x').message_id)"
    (one,), (other,) = makers(program, embedded.name_server), makers(program, embedded.name_server)
    assert one[4:] != other[4:]


# --- not closed


def test_unclosed_producers_send_their_messages(embedded):
    with pytest.warns(ResourceWarning, match=r"unclosed Producer\(.*call close\(\)") as warned:
        futures = [Producer(name_server=embedded.name_server).send_async("orders", b"x") for _ in range(30)]
    assert len(warned) == 30
    assert {future.result(30).message_id for future in futures} == {m.message_id for m in embedded.messages("orders")}
    embedded.wait_until(lambda: not producer_threads() and not embedded.broker("broker-a").connections)


def test_a_dropped_producer_sends_its_messages(embedded, gate):
    with pytest.warns(ResourceWarning):
        futures = [Producer(name_server=embedded.name_server).send_async("orders", b"x") for _ in range(2)]
    gate.open()
    assert [future.result(30).attempts for future in futures] == [1, 1]
    embedded.wait_until(lambda: not producer_threads())


def test_closed_and_unstarted_ones_are_dropped_silently(embedded, recwarn):
    with Producer(name_server=embedded.name_server) as producer:
        producer.send("orders", b"x")
    Producer(name_server=embedded.name_server).close()
    Producer(name_server=embedded.name_server)
    del producer
    gc.collect()
    assert [str(each.message) for each in recwarn if each.category is ResourceWarning] == []


# --- start and close


def test_the_first_message_starts_a_producer(embedded):
    producer = Producer(name_server=embedded.name_server)
    assert producer.state is ProducerState.CREATED
    assert producer_threads() == []
    producer.send("orders", b"x")
    assert producer.state is ProducerState.RUNNING
    producer.close()
    assert producer.state is ProducerState.CLOSED
    assert producer_threads() == []


def test_threads_that_send_first_at_the_same_time_start_it_once(embedded):
    producer = Producer(name_server=embedded.name_server)
    results = []
    with in_threads(lambda: results.append(producer.send("orders", b"x")), 8):
        pass
    assert len(results) == 8
    assert len(producer_threads()) == 1
    producer.close()


def test_an_unreachable_name_server_is_an_error_and_may_return(embedded):
    embedded.stop_name_server()
    producer = Producer(name_server=embedded.name_server)
    for start in (producer.start, lambda: producer.send("orders", b"x")):
        with pytest.raises(ConnectError, match=embedded.name_server):
            start()
    assert producer_threads() == []
    embedded.start_name_server()
    producer.send("orders", b"x")
    producer.close()


def test_a_closed_producer_refuses(embedded):
    producer = Producer(name_server=embedded.name_server)
    producer.send("orders", b"x")
    producer.close()
    producer.close()
    for refused in (
        lambda: producer.send("orders", b"x"),
        lambda: producer.send_async("orders", b"x"),
        lambda: producer.send_oneway("orders", b"x"),
        lambda: producer.send_batch("orders", [b"x"]),
        producer.start,
    ):
        with pytest.raises(ClientClosed, match="the producer is closed; make a new one"):
            refused()


def test_a_second_close_waits_for_the_first(embedded, gate):
    producer = Producer(name_server=embedded.name_server)
    future = producer.send_async("orders", b"x", timeout_s=60)
    gate.wait_held()
    with in_a_thread(producer.close):
        embedded.wait_until(lambda: producer.state is ProducerState.CLOSED)
        with in_a_thread(producer.close) as closing_again:
            closing_again.join(0.5)
            assert closing_again.is_alive()
            gate.open()
        assert future.done()
    assert producer_threads() == []


@for_each("timeout_s", [-1, 3601, float("nan"), "soon", True])
def test_a_close_with_a_wrong_timeout_is_refused(embedded, timeout_s):
    with Producer(name_server=embedded.name_server) as producer:
        with pytest.raises(ConfigError, match="timeout_s=.* is not allowed; it must be a number from 0 to 3600"):
            producer.close(timeout_s=timeout_s)
        assert producer.send("orders", b"x")


def test_an_unstarted_producer_can_be_closed():
    producer = Producer(name_server="127.0.0.1:1")
    producer.close()
    assert producer.state is ProducerState.CLOSED


def test_close_waits_for_sends_in_flight(embedded, gate):
    producer = Producer(name_server=embedded.name_server, send_timeout_s=30)
    futures = [producer.send_async("orders", b"x") for _ in range(20)]
    gate.wait_held(20)
    with in_a_thread(producer.close):
        with pytest.raises(ClientClosed):
            while True:
                futures.append(producer.send_async("orders", b"y"))  # until close() has begun
        assert not any(future.done() for future in futures)
        gate.open()
    assert len({future.result(0).message_id for future in futures}) == len(embedded.messages("orders"))


@pytest.mark.live
def test_a_close_that_fails_no_send_reports_none(embedded, caplog):
    """A send may get its result after the close has stopped waiting, and before it fails the others."""
    for step in range(100):
        producer = Producer(name_server=embedded.name_server)
        producer.send("orders", b"x")
        send = producer.send_async("orders", b"x")
        time.sleep(step * 0.00001)
        producer.close(0)
        assert send.done()
    assert "with 0 sends in flight" not in caplog.text


def test_close_fails_sends_that_take_too_long(embedded, gate):
    producer = Producer(name_server=embedded.name_server, send_timeout_s=30)
    futures = [producer.send_async("orders", b"x"), producer.send_async("orders", b"x", sharding_key="k")]
    futures += [producer.send_async("orders", b"x", sharding_key="k")]
    gate.wait_held(2)
    with within(20):
        producer.close(timeout_s=0.2)
    for future in futures:
        with pytest.raises(SendError, match="closed before a response arrived"):
            future.result(0)


@pytest.mark.parametrize("others", [{}, {"sharding_key": "k"}, {"queue": MessageQueue("later", "broker-a", 0)}])
def test_a_route_that_arrives_after_the_close_is_ignored(embedded, caplog, others):
    embedded.create_topic("later", queues=1)
    route, leave = Gate(answers=True), Gate()
    embedded.broker("broker-a").on(RequestCode.UNREGISTER_CLIENT, leave)
    producer = Producer(name_server=embedded.name_server, send_timeout_s=30)
    producer.send("orders", b"x")
    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, route, times=None)
    future = producer.send_async("later", b"x", **others)
    route.wait_held(1)
    with in_a_thread(producer.close, 0):
        leave.wait_held(1)
        with pytest.raises(SendError, match="closed before a response arrived"):
            future.result(0)
        route.open()
        leave.open()
    assert [record.exc_info for record in caplog.records if record.exc_info] == []
    assert embedded.messages("later") == []


def test_a_producer_registers_and_unregisters_its_group(embedded):
    broker = embedded.broker("broker-a")
    with Producer("payments", name_server=embedded.name_server) as producer:
        producer.send("orders", b"x")
        (heartbeat,) = broker.wait_for(RequestCode.HEART_BEAT)
        assert b'"producerDataSet":[{"groupName":"payments"}]' in heartbeat.command.body
    (leave,) = broker.wait_for(RequestCode.UNREGISTER_CLIENT)
    assert leave.command.fields["producerGroup"] == "payments"
    assert leave.command.fields["clientID"] in heartbeat.command.body.decode()


FORKED = """
import os, sys
from pyrocket_consumer import ClientClosed
from pyrocket_consumer.producer import Producer
made_before, started_before = Producer(name_server=sys.argv[1]), Producer(name_server=sys.argv[1])
started_before.send("orders", b"before")
child = os.fork()
if child == 0:
    for refused in (started_before.send, started_before.send_async, started_before.send_oneway):
        try:
            refused("orders", b"never")
        except ClientClosed as error:
            assert "make a new one after the fork" in str(error), error
        else:
            os._exit(1)
    started_before.close()
    made_before.send("orders", b"child")
    made_before.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
started_before.send("orders", b"parent")
started_before.close()
print("done")
"""


@pytest.mark.live
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_fork_the_child_is_refused_and_the_parent_works(embedded):
    done = run_program(FORKED, embedded.name_server, flags=("-W", "ignore::DeprecationWarning"))
    assert done.stdout.strip() == "done", done.stderr
    assert sorted(message.body for message in embedded.messages("orders")) == [b"before", b"child", b"parent"]


# --- limits of messages in flight


@pytest.mark.parametrize(
    "limit", [{"max_in_flight_messages": 3}, {"max_in_flight_bytes": 350, "compress_above_bytes": 1000}]
)
def test_messages_above_the_limit_wait_within_the_timeout(embedded, producing, gate, limit):
    producer = producing(embedded, send_timeout_s=30, **limit)
    futures = [producer.send_async("orders", b"x" * 100) for _ in range(3)]
    gate.wait_held(3)
    started = time.monotonic()
    with pytest.raises(SendError, match=r"no free capacity within 0\.2 s: .*max_in_flight"):
        producer.send_async("orders", b"x" * 100, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started < 20
    with in_a_thread(lambda: futures.append(producer.send_async("orders", b"x" * 100))):
        gate.open()
    assert [bool(future.result(30)) for future in futures] == [True] * 4


def test_a_message_larger_than_the_limit_is_sent_alone(embedded, producing):
    producer = producing(embedded, max_in_flight_bytes=100)
    futures = [producer.send_async("orders", b"x" * 1000) for _ in range(5)]
    assert len({future.result(30).message_id for future in futures}) == 5


def test_close_releases_senders_that_wait_for_capacity(embedded, gate):
    producer = Producer(name_server=embedded.name_server, max_in_flight_messages=1, send_timeout_s=30)
    producer.send_async("orders", b"x")
    gate.wait_held(1)
    refused = []

    def send():
        with pytest.raises(ClientClosed, match="closed") as error:
            producer.send_async("orders", b"x")
        refused.append(error)

    with in_a_thread(send):
        producer.close(timeout_s=0.3)
    assert refused


# --- during a start


def test_close_does_not_wait_for_the_start_of_another_thread(embedded):
    producer, ended = Producer(name_server=embedded.name_server, call_timeout_s=60), queue.SimpleQueue()

    def start():
        with pytest.raises(ClientClosed) as error:
            producer.start()
        ended.put(error)

    with name_servers_held(embedded) as gate, in_a_thread(start):
        gate.wait_held(1)
        producer.close(timeout_s=0.1)
        assert ended.get(timeout=20)
        embedded.wait_until(lambda: not producer_threads())


@pytest.mark.live
@pytest.mark.timeout(90)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_during_a_start_can_close_and_send(embedded):
    producer = Producer(name_server=embedded.name_server, call_timeout_s=60)
    with name_servers_held(embedded) as gate, in_a_thread(producer.start):
        gate.wait_held(1)
        closes = fork_child(producer.close)
        sends = fork_child(lambda: producer.send("orders", b"child"))
        gate.open()
    assert (exit_code(closes), exit_code(sends)) == (0, 0)
    producer.send("orders", b"parent")
    producer.close()
    assert sorted(message.body for message in embedded.messages("orders")) == [b"child", b"parent"]


# --- names and settings


def test_a_namespace_is_in_requests_but_not_in_results(producing):
    with EmbeddedCluster() as embedded:
        embedded.create_topic("shop%orders", queues=2)
        producer = producing(embedded, group="payments", namespace="shop")
        sent = producer.send("orders", b"x", sharding_key="k")
        assert sent.queue.topic == "orders"
        assert producer.send("orders", b"x", queue=sent.queue).queue == sent.queue
        (batched,) = producer.send_batch("orders", [b"x"])
        assert batched.queue.topic == "orders"
        assert len(embedded.messages("shop%orders")) == 3
        request = embedded.broker("broker-a").requests(SEND)[0]
        assert (request.command.fields["a"], request.command.fields["b"]) == ("shop%payments", "shop%orders")


def test_results_and_configurations_pickle(producer):
    sent = producer.send("orders", b"x")
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert pickle.loads(pickle.dumps(producer.config)) == producer.config
