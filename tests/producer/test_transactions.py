"""Messages that wait for a transaction of the application."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from pyrocket_consumer import ConfigError, MessageQueue, ProtocolError, RouteNotFound, SendError
from pyrocket_consumer.producer import OutgoingMessage, TransactionProducer, TransactionState
from pyrocket_consumer.protocol.codes import RequestCode, SysFlag
from pyrocket_consumer.protocol.message import StoredMessage, encode_message
from pyrocket_consumer.testing import EmbeddedCluster, answer, drop
from tests.for_each import for_each
from tests.producer.programs import in_a_thread, producer_threads
from tests.real_brokers import wait_until
from tests.server_requests import RequestSender

# The broker checks every second, and requests the state of half messages older than a second.
QUICK_CHECKS = {"transactionCheckInterval": "1000", "transactionTimeOut": "1000"}


class Check:
    """A check that records its requests, and returns configured states."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self._changed = threading.Condition()
        self.checked = []

    def __call__(self, message):
        with self._changed:
            self.checked.append(message)
            self._changed.notify_all()
        given = self._answers.pop(0) if self._answers else TransactionState.UNKNOWN
        if isinstance(given, Exception):
            raise given
        return given

    def wait_for(self, count, timeout_s=30):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.checked) >= count, timeout_s), self.checked
        return self.checked[count - 1]


PAID = OutgoingMessage(b"x", topic="orders")


def never(message):
    raise AssertionError(f"the broker asked about {message.message_id}")


def commit(sent):
    return TransactionState.COMMIT


def unknown(sent):
    return TransactionState.UNKNOWN


def undecided(producer):
    return producer.send_in_transaction(PAID, unknown)


@pytest.fixture
def quick():
    with EmbeddedCluster(settings=QUICK_CHECKS) as cluster:
        cluster.create_topic("orders", queues=2)
        yield cluster


@pytest.fixture
def transacting(quick, producing):
    """`transacting(check, **options)` starts a producer of the group `payments`."""
    return lambda check, **options: producing(quick, TransactionProducer, group="payments", check=check, **options)


def test_a_committed_message_is_delivered(cluster, topic, names, producing):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster, TransactionProducer, group=names.group(), check=never)
    seen = []

    def run(sent):
        seen.append((sent, cluster.messages(topic)))
        return TransactionState.COMMIT

    message = OutgoingMessage(b"paid", tags="t", keys=["k"], properties={"a": "b"}, flag=3, topic=topic)
    result = producer.send_in_transaction(message, run)
    wait_until(lambda: cluster.messages(topic), "the committed message")
    (found,) = cluster.messages(topic)
    assert (found.body, found.tags, found.keys, found.property("a"), found.flag) == (b"paid", "t", ("k",), "b", 3)
    assert (found.message_id, found.queue) == (result.sent.message_id, MessageQueue(topic, "broker-a", 0))
    assert found.sys_flag & 0xC == 8
    assert result.state is TransactionState.COMMIT
    assert seen == [(result.sent, [])]  # during the transaction the message was held back


def test_a_rolled_back_message_is_never_delivered(cluster, topic, names, producing):
    cluster.create_topic(topic, queues=1)
    producer = producing(cluster, TransactionProducer, group=names.group(), check=never)
    no = OutgoingMessage(b"no", topic=topic)
    assert producer.send_in_transaction(no, lambda sent: TransactionState.ROLLBACK).state is TransactionState.ROLLBACK
    producer.send_in_transaction(OutgoingMessage(b"yes", topic=topic), commit)
    wait_until(lambda: cluster.messages(topic), "the committed message")
    assert [message.body for message in cluster.messages(topic)] == [b"yes"]


@pytest.mark.cluster(settings=QUICK_CHECKS)
def test_a_broker_without_a_result_requests_a_check(cluster, topic, names, producing):
    cluster.create_topic(topic, queues=1)
    check = Check(TransactionState.UNKNOWN, ValueError("ask again"), TransactionState.COMMIT)
    producer = producing(cluster, TransactionProducer, group=names.group(), check=check)
    message = OutgoingMessage(b"later", tags="t", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "1"}, topic=topic)
    result = producer.send_in_transaction(message, unknown)
    assert result.state is TransactionState.UNKNOWN
    checked = check.wait_for(3)
    assert (checked.message_id, checked.body, checked.tags, checked.topic) == (
        result.sent.message_id,
        b"later",
        "t",
        topic,
    )
    wait_until(lambda: cluster.messages(topic), "the committed message")


@pytest.mark.parametrize("returned", [None, True, "COMMIT"])
def test_an_invalid_state_leaves_the_decision_to_the_check(quick, transacting, returned):
    producer = transacting(check := Check(TransactionState.COMMIT))
    result = producer.send_in_transaction(PAID, lambda sent: returned)
    assert result.state is TransactionState.UNKNOWN
    assert quick.messages("orders") == []
    check.wait_for(1)
    quick.wait_until(lambda: quick.messages("orders") != [])


@pytest.mark.cluster(settings=QUICK_CHECKS)
def test_a_running_transaction_is_not_checked(cluster, topic, names, producing):
    """Its `check` finds no result yet. A rollback would lose the message, although the transaction commits."""

    def run(sent):
        later = producer.send_in_transaction(message, unknown)
        check.wait_for(2)  # a broker that asks twice about the later one has asked about the running one
        assert [each.message_id for each in check.checked] == 2 * [later.sent.message_id]
        return TransactionState.UNKNOWN

    cluster.create_topic(topic, queues=1)
    check = Check(TransactionState.UNKNOWN, TransactionState.ROLLBACK, TransactionState.COMMIT)
    producer = producing(cluster, TransactionProducer, group=names.group(), check=check)
    message = OutgoingMessage(b"x", topic=topic)
    running = producer.send_in_transaction(message, run)
    assert check.wait_for(3).message_id == running.sent.message_id
    wait_until(lambda: cluster.messages(topic), "the committed message")
    assert [each.message_id for each in cluster.messages(topic)] == [running.sent.message_id]


def test_after_an_error_of_the_application_the_check_decides(quick, transacting):
    def run(sent):
        raise KeyError("no such order")

    producer = transacting(check := Check(TransactionState.ROLLBACK))
    with pytest.raises(KeyError, match="no such order"):
        producer.send_in_transaction(PAID, run)
    check.wait_for(1)
    (end,) = quick.broker("broker-a").wait_for(RequestCode.END_TRANSACTION)
    assert (end.command.fields["commitOrRollback"], end.command.fields["fromTransactionCheck"]) == ("12", "true")
    assert quick.messages("orders") == []


def test_a_lost_decision_is_requested_by_the_broker(quick, transacting):
    producer = transacting(check := Check(TransactionState.COMMIT), call_timeout_s=1)
    quick.broker("broker-a").on(RequestCode.END_TRANSACTION, drop)
    result = producer.send_in_transaction(PAID, commit)
    assert (result.state, result.decided) == (TransactionState.UNKNOWN, TransactionState.COMMIT)
    assert "got no response" in result.not_told
    check.wait_for(1)
    quick.wait_until(lambda: quick.messages("orders") != [])


def test_a_decision_that_the_broker_refuses_is_reported(quick, transacting, caplog):
    producer = transacting(Check())
    quick.broker("broker-a").on(RequestCode.END_TRANSACTION, answer(1, "Find prepared transaction message failed"))
    result = producer.send_in_transaction(PAID, commit)
    assert (result.state, result.decided) == (TransactionState.UNKNOWN, TransactionState.COMMIT)
    assert "Find prepared transaction message failed" in result.not_told
    assert "did not accept COMMIT" in caplog.text


class SlowCheck:
    """A check that waits until it may return."""

    def __init__(self):
        self.began, self.may_answer = threading.Event(), threading.Event()
        self.checked = []

    def __call__(self, message):
        self.checked.append(message.message_id)
        self.began.set()
        self.may_answer.wait(60)
        return TransactionState.COMMIT


@pytest.fixture
def slow_check():
    check = SlowCheck()
    yield check
    check.may_answer.set()


def test_a_slow_check_does_not_delay_callbacks(transacting, slow_check):
    producer = transacting(slow_check)
    undecided(producer)
    assert slow_check.began.wait(30)
    called = threading.Event()
    producer.send_async("orders", b"y").add_done_callback(lambda future: called.set())
    assert called.wait(30)


def test_repeated_requests_are_checked_once(slow_check, producing):
    with EmbeddedCluster(settings={**QUICK_CHECKS, "transactionCheckMax": "3"}) as cluster:
        cluster.create_topic("orders", queues=1)
        producer = producing(cluster, TransactionProducer, group="payments", check=slow_check)
        undecided(producer)
        cluster.wait_until(lambda: cluster.messages("TRANS_CHECK_MAX_TIME_TOPIC") != [])  # requested three times
        slow_check.may_answer.set()
        cluster.wait_until(lambda: cluster.messages("orders") != [])
        producer.close()
        assert len(slow_check.checked) == 1


def test_no_check_begins_after_close(quick, slow_check):
    producer = TransactionProducer("payments", check=slow_check, name_server=quick.name_server)
    for _ in range(5):
        undecided(producer)
    assert slow_check.began.wait(30)
    with in_a_thread(producer.close):
        quick.wait_until(lambda: producer.state.value == "closed")
        slow_check.may_answer.set()
    assert len(slow_check.checked) == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_a_check_that_calls_exit_is_repeated(quick, transacting, error):
    def check(message):
        checked.append(message)
        if len(checked) == 1:
            raise error
        return TransactionState.COMMIT

    checked = []
    undecided(transacting(check))
    quick.wait_until(lambda: quick.messages("orders") != [])


def test_a_dropped_producer_runs_no_checks(quick):
    with pytest.warns(ResourceWarning, match="TransactionProducer"):
        TransactionProducer("payments", check=never, topics=["orders"], name_server=quick.name_server).start()
    quick.wait_until(lambda: not quick.broker("broker-a").connections and not producer_threads())


def test_another_producer_checks_for_a_closed_one(quick, transacting):
    with TransactionProducer("payments", check=never, name_server=quick.name_server) as closed:
        half = undecided(closed)
    check = Check(TransactionState.COMMIT)
    transacting(check, topics=["orders"])
    assert check.wait_for(1).message_id == half.sent.message_id
    quick.wait_until(lambda: quick.messages("orders") != [])


CHECK_FIELDS = {"tranStateTableOffset": "0", "commitLogOffset": "0", "msgId": "A"}


def test_a_name_server_may_not_request_a_check(quick, transacting):
    transacting(never, topics=["orders"])
    record = encode_message(StoredMessage("orders", b"x", {"UNIQ_KEY": "A"}))
    refused = RequestSender(quick.name_server_node).call(RequestCode.CHECK_TRANSACTION_STATE, CHECK_FIELDS, record)
    assert refused.remark == "CHECK_TRANSACTION_STATE is refused: only brokers of the topics in use may send requests"


def test_a_body_is_not_decompressed_before_its_check(quick, transacting):
    """Thousands may wait. Each may be small when stored but large when decompressed, or impossible to decompress."""
    transacting(check := Check(), topics=["orders"])
    quick.broker("broker-a").wait_for(RequestCode.HEART_BEAT)
    packed = StoredMessage("orders", b"no zlib", {"UNIQ_KEY": "A"}, sys_flag=SysFlag.COMPRESSED)
    RequestSender(quick.broker("broker-a")).oneway(
        RequestCode.CHECK_TRANSACTION_STATE, CHECK_FIELDS, encode_message(packed)
    )
    message = check.wait_for(1)
    assert message.message_id == "A"
    with pytest.raises(ProtocolError):
        print(message.body)


@pytest.mark.parametrize(
    ("fields", "body"), [({}, b"x" * 900_000), ({"transactionId": "x" * 900_000}, b"x")], ids=["messages", "headers"]
)
def test_a_larger_repeated_request_is_dropped(quick, transacting, slow_check, fields, body):
    transacting(slow_check, topics=["orders"])
    quick.broker("broker-a").wait_for(RequestCode.HEART_BEAT)
    sender = RequestSender(quick.broker("broker-a"))

    def send_check(fields, body):
        for number in range(120):
            record = encode_message(StoredMessage("orders", body, {"UNIQ_KEY": str(number)}))
            sender.oneway(RequestCode.CHECK_TRANSACTION_STATE, CHECK_FIELDS | fields, record)
            sender.call(9999, {})  # it responds when it has handled the one before

    send_check({}, b"x")
    tracemalloc.start()
    try:
        send_check(fields, body)
        assert tracemalloc.get_traced_memory()[0] < 80 << 20
    finally:
        tracemalloc.stop()
        slow_check.may_answer.set()


def test_a_broker_that_floods_checks_leaves_capacity_to_others(producing, slow_check):
    with EmbeddedCluster(brokers=2, settings=QUICK_CHECKS) as cluster:
        cluster.create_topic("orders", queues=1)
        producing(cluster, TransactionProducer, group="payments", check=slow_check, topics=["orders"])
        for name in ("broker-a", "broker-b"):
            cluster.broker(name).wait_for(RequestCode.HEART_BEAT)
        many, one = (RequestSender(cluster.broker(name)) for name in ("broker-a", "broker-b"))
        for sender, count in ((many, 1500), (one, 1)):
            for number in range(count):
                record = encode_message(StoredMessage("orders", b"x", {"UNIQ_KEY": f"{number} of {count}"}))
                sender.oneway(RequestCode.CHECK_TRANSACTION_STATE, CHECK_FIELDS, record)
            sender.call(9999, {})  # it responds when it has handled the ones before
        assert len(slow_check.checked) == 1
        slow_check.may_answer.set()
        cluster.wait_until(lambda: len(slow_check.checked) == 252)  # a running one, 250, the other broker
        assert "0 of 1" in slow_check.checked[:3]


@for_each(
    "fault, error, expected",
    [
        # without the position, the result could not be reported, so the transaction would be undone or not delivered
        (answer(0, fields={"msgId": "none", "queueId": "0", "queueOffset": "0"}), ProtocolError, "message id 'none'"),
        (answer(13, "illegal"), SendError, "illegal"),
    ],
)
def test_run_is_not_called_without_a_stored_position(quick, transacting, fault, error, expected):
    quick.broker("broker-a").on(RequestCode.SEND_MESSAGE_V2, fault, times=1)
    with pytest.raises(error, match=expected):
        transacting(never).send_in_transaction(PAID, never)


def test_wrong_arguments_are_reported(transacting):
    producer = transacting(never)
    for call, expected in (
        (lambda: transacting(None), "not callable"),
        (lambda: transacting(never, topics="orders"), "list of topics"),
        (lambda: producer.send_in_transaction(OutgoingMessage(b"x"), commit), "with its topic"),
        (lambda: producer.send_in_transaction(PAID, None), "not callable"),
    ):
        with pytest.raises(ConfigError, match=expected):
            call()


def test_a_topic_to_connect_to_must_exist(quick):
    producer = TransactionProducer("payments", check=never, topics=["missing"], name_server=quick.name_server)
    with pytest.raises(RouteNotFound):
        producer.start()
    assert producer.state.value == "closed"


def test_a_close_during_the_transaction_reports_the_decision(embedded):
    """The message is stored and the transaction committed. An error would make the caller repeat both."""
    producer = TransactionProducer("payments", check=never, name_server=embedded.name_server)

    def run(sent):
        producer.close()
        return TransactionState.COMMIT

    result = producer.send_in_transaction(PAID, run)
    assert (result.state, result.decided) == (TransactionState.UNKNOWN, TransactionState.COMMIT)
    assert result.not_told is not None
    assert "closed" in result.not_told
