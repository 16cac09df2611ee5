"""A producer's life, its threads, and how much it takes on at a time."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import pytest

from pyrocket_consumer import ConfigError, ConnectError, ConsumerClosed, MessageQueue, SendError
from pyrocket_consumer.producer import Producer, ProducerState
from pyrocket_consumer.testing import EmbeddedCluster, Gate, drop
from pyrocket_consumer.wire.codes import RequestCode
from tests.for_each import for_each
from tests.interrupting import a_signal_once_held, a_start_that_waits, child_that, exit_code

SEND = RequestCode.SEND_MESSAGE_V2

pytestmark = pytest.mark.cluster(brokers=1)


def producer_threads():
    return [each for each in threading.enumerate() if each.name in ("pyrocket-io", "pyrocket-callbacks")]


@pytest.fixture
def gate(embedded):
    """Sends wait here until it opens."""
    gate = Gate()
    embedded.broker("broker-a").on(SEND, gate, times=None)
    yield gate
    gate.open()


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
    """Return the parts of ids that a process has for itself, each as often as there are messages: address aside."""
    done = subprocess.run(
        [sys.executable, "-c", program, name_server], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [message_id[8:20] for message_id in done.stdout.split()]


@pytest.mark.live
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_processes_forked_before_the_start_make_ids_of_their_own(embedded):
    found = makers(FORKS, embedded.name_server)
    assert len(found) == 6
    assert len({maker[4:] for maker in found}) >= 3  # those of a first message may differ from the next one's


@pytest.mark.live
def test_programs_that_seed_random_alike_make_ids_of_their_own(embedded):
    """In containers they have the same process id, too."""
    program = "import random, sys; random.seed(42); from pyrocket_consumer import Producer\n"
    program += "with Producer(name_server=sys.argv[1]) as producer: print(producer.send('orders', b'x').message_id)"
    (one,), (other,) = makers(program, embedded.name_server), makers(program, embedded.name_server)
    assert one[4:] != other[4:]


# --- not closed


def test_thirty_producers_that_nobody_closes_leave_nothing_and_send_what_they_have(embedded):
    with pytest.warns(ResourceWarning, match=r"unclosed <pyrocket_consumer.*Producer.*call close\(\)") as warned:
        futures = [Producer(name_server=embedded.name_server).send_async("orders", b"x") for _ in range(30)]
    assert len(warned) == 30
    assert {future.result(30).message_id for future in futures} == {m.message_id for m in embedded.messages("orders")}
    embedded.wait_until(lambda: not producer_threads() and not embedded.broker("broker-a").connections)


def test_a_producer_that_is_dropped_while_messages_wait_sends_them(embedded, gate):
    with pytest.warns(ResourceWarning):
        futures = [Producer(name_server=embedded.name_server).send_async("orders", b"x") for _ in range(2)]
    gate.open()
    assert [future.result(30).attempts for future in futures] == [1, 1]
    embedded.wait_until(lambda: not producer_threads())


def test_closed_and_never_started_producers_are_dropped_without_a_word(embedded, recwarn):
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
    threads = [threading.Thread(target=lambda: results.append(producer.send("orders", b"x"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 8
    assert len(producer_threads()) == 1
    producer.close()


def test_a_name_server_that_does_not_answer_is_told_at_the_start_and_may_come_later(embedded):
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
        with pytest.raises(ConsumerClosed, match="the producer is closed; make a new one"):
            refused()


def test_whoever_closes_a_second_time_waits_for_the_same_end(embedded, gate):
    producer = Producer(name_server=embedded.name_server)
    future = producer.send_async("orders", b"x", timeout_s=60)
    gate.wait_held()
    closing = [threading.Thread(target=producer.close) for _ in range(2)]
    closing[0].start()
    embedded.wait_until(lambda: producer.state is ProducerState.CLOSED)
    closing[1].start()
    closing[1].join(0.5)
    assert closing[1].is_alive()
    gate.open()
    closing[1].join(30)
    assert not closing[1].is_alive()
    assert future.done()
    assert producer_threads() == []


@for_each("timeout_s", [-1, 3601, float("nan"), "soon", True])
def test_a_close_with_a_wrong_time_is_refused_and_the_producer_goes_on(embedded, timeout_s):
    with Producer(name_server=embedded.name_server) as producer:
        with pytest.raises(ConfigError, match="timeout_s=.* is not allowed; it must be a number from 0 to 3600"):
            producer.close(timeout_s=timeout_s)
        assert producer.send("orders", b"x")


def test_one_that_never_started_can_be_closed():
    producer = Producer(name_server="127.0.0.1:1")
    producer.close()
    assert producer.state is ProducerState.CLOSED


def test_closing_waits_for_what_is_on_its_way(embedded, gate):
    producer = Producer(name_server=embedded.name_server, send_timeout_s=30)
    futures = [producer.send_async("orders", b"x") for _ in range(20)]
    gate.wait_held(20)
    closing = threading.Thread(target=producer.close)
    closing.start()
    with pytest.raises(ConsumerClosed):
        while True:
            futures.append(producer.send_async("orders", b"y"))  # until close() has begun
    assert not any(future.done() for future in futures)
    gate.open()
    closing.join(30)
    assert not closing.is_alive()
    assert len({future.result(0).message_id for future in futures}) == len(embedded.messages("orders"))


def test_closing_gives_up_what_takes_too_long(embedded, gate):
    producer = Producer(name_server=embedded.name_server, send_timeout_s=30)
    futures = [producer.send_async("orders", b"x"), producer.send_async("orders", b"x", sharding_key="k")]
    futures += [producer.send_async("orders", b"x", sharding_key="k")]
    gate.wait_held(2)
    started = time.monotonic()
    producer.close(timeout_s=0.2)
    assert time.monotonic() - started < 20
    for future in futures:
        with pytest.raises(SendError, match="closed before an answer came"):
            future.result(0)


@pytest.mark.parametrize("others", [{}, {"sharding_key": "k"}, {"queue": MessageQueue("later", "broker-a", 0)}])
def test_what_was_given_up_is_no_surprise_when_its_route_comes_after_all(embedded, caplog, others):
    embedded.create_topic("later", queues=1)
    route, leave = Gate(answers=True), Gate()
    embedded.broker("broker-a").on(RequestCode.UNREGISTER_CLIENT, leave)
    producer = Producer(name_server=embedded.name_server, send_timeout_s=30)
    producer.send("orders", b"x")
    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, route, times=None)
    future = producer.send_async("later", b"x", **others)
    route.wait_held(1)
    closing = threading.Thread(target=producer.close, args=(0,))
    closing.start()
    leave.wait_held(1)
    with pytest.raises(SendError, match="closed before an answer came"):
        future.result(0)
    route.open()
    leave.open()
    closing.join(30)
    assert not closing.is_alive()
    assert [record.exc_info for record in caplog.records if record.exc_info] == []
    assert embedded.messages("later") == []


def test_a_producer_tells_brokers_its_group_and_takes_leave(embedded):
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
from pyrocket_consumer import ConsumerClosed
from pyrocket_consumer.producer import Producer
made_before, started_before = Producer(name_server=sys.argv[1]), Producer(name_server=sys.argv[1])
started_before.send("orders", b"before")
child = os.fork()
if child == 0:
    for refused in (started_before.send, started_before.send_async, started_before.send_oneway):
        try:
            refused("orders", b"never")
        except ConsumerClosed as error:
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
def test_after_a_fork_a_started_producer_refuses_in_the_child_and_works_on_in_the_parent(embedded):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, embedded.name_server],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr
    assert sorted(message.body for message in embedded.messages("orders")) == [b"before", b"child", b"parent"]


# --- how much at a time


@pytest.mark.parametrize(
    "limit", [{"max_in_flight_messages": 3}, {"max_in_flight_bytes": 350, "compress_above_bytes": 1000}]
)
def test_more_than_the_limit_waits_for_room_within_the_timeout(embedded, producing, gate, limit):
    producer = producing(embedded, send_timeout_s=30, **limit)
    futures = [producer.send_async("orders", b"x" * 100) for _ in range(3)]
    gate.wait_held(3)
    started = time.monotonic()
    with pytest.raises(SendError, match=r"no room within 0\.2 s: .*max_in_flight"):
        producer.send_async("orders", b"x" * 100, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - started < 20
    late = queue.SimpleQueue()
    waiting = threading.Thread(target=lambda: late.put(producer.send_async("orders", b"x" * 100)))
    waiting.start()
    gate.open()
    waiting.join(30)
    for future in [*futures, late.get_nowait()]:
        future.result(30)


def test_a_message_larger_than_the_limit_goes_alone(embedded, producing):
    producer = producing(embedded, max_in_flight_bytes=100)
    futures = [producer.send_async("orders", b"x" * 1000) for _ in range(5)]
    assert len({future.result(30).message_id for future in futures}) == 5


def test_closing_releases_who_waits_for_room(embedded, gate):
    producer = Producer(name_server=embedded.name_server, max_in_flight_messages=1, send_timeout_s=30)
    producer.send_async("orders", b"x")
    gate.wait_held(1)
    refused = queue.SimpleQueue()

    def send():
        try:
            producer.send_async("orders", b"x")
        except ConsumerClosed as error:
            refused.put(error)

    waiting = threading.Thread(target=send)
    waiting.start()
    producer.close(timeout_s=0.3)
    waiting.join(30)
    assert "closed" in str(refused.get_nowait())


# --- order


def test_messages_with_one_key_are_sent_one_after_the_other_and_others_beside_them(embedded, producing, gate):
    producer = producing(embedded, send_timeout_s=30)
    first = [producer.send_async("orders", b"a%d" % number, sharding_key="a") for number in range(5)]
    other = producer.send_async("orders", b"b", sharding_key="b")
    chosen = [
        producer.send_async("orders", b"c%d" % number, queue=MessageQueue("orders", "broker-a", 0))
        for number in range(3)
    ]
    assert sorted(request.body for request in gate.wait_held(3)) == [b"a0", b"b", b"c0"]
    gate.open()
    wait([*first, other, *chosen], timeout=30)
    for futures in (first, chosen):
        offsets = [future.result(0).queue_offset for future in futures]
        assert offsets == sorted(offsets)


def test_a_message_that_waits_for_those_before_it_keeps_its_own_deadline(embedded, producing, gate):
    producer = producing(embedded, send_timeout_s=30)
    first = producer.send_async("orders", b"a", sharding_key="k")
    gate.wait_held(1)
    with pytest.raises(SendError, match=r"waited 0\.2 s for messages before it"):
        producer.send("orders", b"b", sharding_key="k", timeout_s=0.2)
    last = producer.send_async("orders", b"c", sharding_key="k")
    gate.open()
    assert (first.result(30).queue_offset, last.result(30).queue_offset) == (0, 1)


def test_after_a_message_that_failed_the_next_with_its_key_is_sent(embedded, producing):
    producer = producing(embedded)
    embedded.broker("broker-a").on(SEND, drop)
    futures = [
        producer.send_async("orders", b"%d" % number, sharding_key="k", timeout_s=timeout_s)
        for number, timeout_s in ((1, 2), (2, 0.2))  # the second one's deadline is over before the first one's
    ]
    later = producer.send_async("orders", b"3", sharding_key="k", timeout_s=30)
    for future in futures:
        with pytest.raises(SendError):
            future.result(30)
    assert later.result(30).queue_offset == 0


# --- futures


def test_a_callback_runs_off_the_io_thread_and_may_send(embedded, producing):
    producer = producing(embedded)
    outcomes = queue.SimpleQueue()

    def send_another(future):
        outcomes.put((threading.current_thread().name, future.result(0), producer.send("orders", b"second")))

    producer.send_async("orders", b"first").add_done_callback(send_another)
    thread, first, second = outcomes.get(timeout=30)
    assert thread == "pyrocket-callbacks"
    assert first.message_id != second.message_id


def test_a_callback_that_raises_harms_nobody(embedded, producing, caplog):
    producer = producing(embedded)
    seen = queue.SimpleQueue()
    future = producer.send_async("orders", b"x")
    future.add_done_callback(lambda future: 1 / 0)
    future.add_done_callback(seen.put)
    assert seen.get(timeout=30) is future
    assert "a callback failed" in caplog.text
    producer.send("orders", b"x")


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_callback_that_wants_to_exit_does_not_end_the_callbacks_of_others(embedded, producing, caplog, error):
    def leave(future):
        raise error

    producer, seen = producing(embedded), queue.SimpleQueue()
    producer.send_async("orders", b"x").add_done_callback(leave)
    for number in range(3):
        producer.send_async("orders", b"x").add_done_callback(lambda future, number=number: seen.put(number))
    assert sorted(seen.get(timeout=30) for _ in range(3)) == [0, 1, 2]  # brokers answer in no order
    producer.close()
    assert caplog.text.count("a callback wants to exit") == 1


def test_a_callback_added_when_all_is_over_still_runs(embedded):
    with Producer(name_server=embedded.name_server) as producer:
        future = producer.send_async("orders", b"x")
    seen = []
    future.add_done_callback(seen.append)
    assert seen == [future]


@pytest.mark.live
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such signals")
def test_a_signal_that_closes_once_more_while_close_waits_returns_at_once(embedded, gate):
    producer = Producer(name_server=embedded.name_server, send_timeout_s=60)
    future = producer.send_async("orders", b"x")

    def close_again(number, frame):
        producer.close()
        gate.open()

    before = signal.signal(signal.SIGALRM, close_again)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        producer.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert future.result(0).attempts == 1


def test_whoever_hears_that_a_future_is_done_has_its_result_at_once(embedded, gate):
    with Producer(name_server=embedded.name_server) as producer:
        future, results = producer.send_async("orders", b"x"), queue.SimpleQueue()
        future.add_done_callback(lambda done: results.put(done.result(0)))
        gate.open()
        assert results.get(timeout=30) == future.result(30)


# --- in the middle of a start


@pytest.mark.live
@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system has no such signals")
def test_a_signal_that_closes_while_it_starts_ends_the_start(embedded):
    producer = Producer(name_server=embedded.name_server, call_timeout_s=30)
    with (
        a_start_that_waits(embedded) as gate,
        a_signal_once_held(gate, producer.close),
        pytest.raises(ConsumerClosed),
    ):
        producer.start()
    assert producer.state is ProducerState.CLOSED
    embedded.wait_until(lambda: not producer_threads())


@pytest.mark.live
@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system has no such signals")
def test_a_signal_that_sends_while_it_starts_leaves_one_producer(embedded):
    producer, sent = Producer(name_server=embedded.name_server, call_timeout_s=30), []
    with a_start_that_waits(embedded) as gate:

        def handle():
            gate.open()
            sent.append(producer.send("orders", b"handler"))

        with a_signal_once_held(gate, handle):
            producer.start()
    producer.send("orders", b"main")
    assert len(sent) == 1
    embedded.wait_until(lambda: len(producer_threads()) == 1)
    producer.close()
    embedded.wait_until(lambda: not producer_threads())


def test_close_does_not_wait_for_the_start_of_another_thread(embedded):
    producer, ended = Producer(name_server=embedded.name_server, call_timeout_s=60), queue.SimpleQueue()

    def start():
        try:
            producer.start()
        except ConsumerClosed as error:
            ended.put(error)

    with a_start_that_waits(embedded) as gate:
        threading.Thread(target=start).start()
        gate.wait_held(1)
        producer.close(timeout_s=0.1)
        assert isinstance(ended.get(timeout=20), ConsumerClosed)
        embedded.wait_until(lambda: not producer_threads())


@pytest.mark.live
@pytest.mark.timeout(90)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_starts_can_close_and_send(embedded):
    producer = Producer(name_server=embedded.name_server, call_timeout_s=60)
    with a_start_that_waits(embedded) as gate:
        starting = threading.Thread(target=producer.start)
        starting.start()
        gate.wait_held(1)
        closes = child_that(producer.close)
        sends = child_that(lambda: producer.send("orders", b"child"))
    starting.join()
    assert (exit_code(closes), exit_code(sends)) == (0, 0)
    producer.send("orders", b"parent")
    producer.close()
    assert sorted(message.body for message in embedded.messages("orders")) == [b"child", b"parent"]


def test_a_callback_may_close_the_producer(embedded):
    producer = Producer(name_server=embedded.name_server)
    closed = threading.Event()

    def close(future):
        producer.close()
        closed.set()

    producer.send_async("orders", b"x").add_done_callback(close)
    assert closed.wait(30)
    assert producer.state is ProducerState.CLOSED


def test_a_message_handed_over_cannot_be_cancelled(embedded, producing, gate):
    future = producing(embedded).send_async("orders", b"x")
    assert not future.cancel()
    gate.open()
    assert future.result(30)


def test_a_coroutine_can_await_a_send(embedded, producing):
    producer = producing(embedded)

    async def send_some():
        futures = [asyncio.wrap_future(producer.send_async("orders", b"x")) for _ in range(10)]
        return await asyncio.gather(*futures)

    assert len({each.message_id for each in asyncio.run(send_some())}) == 10


# --- names and settings


def test_a_namespace_is_put_before_names_on_the_wire_and_taken_off_results(producing):
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


def test_results_and_configurations_pickle(embedded, producing):
    producer = producing(embedded)
    sent = producer.send("orders", b"x")
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert pickle.loads(pickle.dumps(producer.config)) == producer.config
