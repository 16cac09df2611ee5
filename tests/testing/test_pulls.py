"""PULL_MESSAGE: each request gets the response of real brokers."""

from __future__ import annotations

import pytest

from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.protocol.message import decode_messages
from pyrocket_consumer.testing import EmbeddedCluster
from tests.for_each import for_each
from tests.testing.brokers import every_version, pull_result
from tests.testing.raw_client import RawClient


@every_version
@for_each(
    "offset, expected",
    [
        (0, (19, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)),
        (1, (21, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)),
        (100, (21, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)),
        (-1, (21, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)),
    ],
)
def test_an_empty_queue(client, offset, expected):
    assert pull_result(client.pull("T", 0, offset)) == expected


@every_version
@for_each(
    "offset, subscription, expected, found",
    [
        (0, "*", (0, "FOUND", 5, 0, 5), [0, 1, 2, 3, 4]),
        (3, "*", (0, "FOUND", 5, 0, 5), [3, 4]),
        (0, "odd", (0, "FOUND", 5, 0, 5), [1, 3]),
        (0, "nobody", (20, "NO_MATCHED_MESSAGE", 5, 0, 5), []),
        (5, "*", (19, "OFFSET_OVERFLOW_ONE", 5, 0, 5), []),
        (6, "*", (21, "OFFSET_OVERFLOW_BADLY", 5, 0, 5), []),
        (105, "*", (21, "OFFSET_OVERFLOW_BADLY", 5, 0, 5), []),
        (-1, "*", (21, "OFFSET_TOO_SMALL", 0, 0, 5), []),
        (-100, "*", (21, "OFFSET_TOO_SMALL", 0, 0, 5), []),
    ],
)
def test_a_queue_of_five(client, offset, subscription, expected, found):
    for number in range(5):
        client.produce("T", properties={"TAGS": "odd"} if number % 2 else {})
    answer = client.pull("T", 0, offset, subscription=subscription)
    assert pull_result(answer) == expected
    assert [message.queue_offset for message in decode_messages(answer.body)] == found


@pytest.mark.parametrize("offset", [0, 42])
def test_a_deleted_offset_is_too_small(broker, client, offset):
    for _ in range(48):
        client.produce("T")
    broker.delete_before("T", 0, 43)
    assert pull_result(client.pull("T", 0, offset)) == (21, "OFFSET_TOO_SMALL", 43, 43, 48)
    assert pull_result(client.pull("T", 0, 43)) == (0, "FOUND", 48, 43, 48)
    broker.delete_before("T", 0, 48)
    assert pull_result(client.pull("T", 0, 48)) == (19, "OFFSET_OVERFLOW_ONE", 48, 48, 48)


@every_version
def test_the_first_answer_holds_few_messages(broker, client, version):
    for _ in range(60):
        client.produce("T")
    for _ in range(6):
        client.produce("T", b"x" * 100_000, queue_id=1)
    assert len(decode_messages(client.pull("T", 0, 0, maxMsgNums=100).body)) == 32
    assert len(decode_messages(client.pull("T", 0, 0, maxMsgNums=0).body)) == 1
    assert len(decode_messages(client.pull("T", 1, 0).body)) == 2
    negative = client.pull("T", 0, 0, maxMsgNums=-1)
    assert negative.code == (1 if version == "4.9.7" else 0)
    broker.count_as_on_disk()
    assert len(decode_messages(client.pull("T", 0, 0).body)) == 8
    assert len(decode_messages(client.pull("T", 1, 0).body)) == 1


def test_one_pull_reads_at_most_800_messages(broker, client):
    broker.cluster.send("T", count=1000, queue_id=0)
    assert pull_result(client.pull("T", 0, 0, subscription="nobody")) == (20, "NO_MATCHED_MESSAGE", 800, 0, 1000)


@every_version
def test_the_heartbeat_s_subscription_counts(broker, client):
    assert client.pull("T", 0, 0, sysFlag=0).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    client.heartbeat("G", "other")
    assert client.pull("T", 0, 0, sysFlag=0).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    client.heartbeat("G", "T", expression="A", sub_version=7)
    assert client.pull("T", 0, 0, sysFlag=0, subVersion=8).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    client.produce("T", properties={"TAGS": "A"})
    client.produce("T", properties={"TAGS": "B"})
    client.produce("T")
    answer = client.pull("T", 0, 0, sysFlag=0, subVersion=7)
    assert [message.tags for message in decode_messages(answer.body)] == ["A"]
    assert pull_result(answer)[2] == 3


@for_each(
    "expression, expected",
    [
        ("||", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        (" || ", ResponseCode.PULL_RETRY_IMMEDIATELY),  # contains no tag and is not *, so it matches no message
        ("", ResponseCode.SUCCESS),
        (None, ResponseCode.SUCCESS),
        (" A || || B ||", ResponseCode.SUCCESS),
        ("AaAa", ResponseCode.PULL_RETRY_IMMEDIATELY),
        ("BBBB", ResponseCode.SUCCESS),  # has the same hash as AaBB
    ],
)
def test_expressions(client, expression, expected):
    client.produce("T", properties={"TAGS": "AaBB" if expression == "BBBB" else "A"})
    assert client.pull("T", 0, 0, subscription=expression).code == expected


@pytest.mark.differs("sql92")
def test_sql_is_refused_and_unknown_types_select_everything(broker, client):
    client.produce("T")
    for enabled in (False, True):
        broker.update_config(enablePropertyFilter=enabled)
        assert client.pull("T", 0, 0, subscription="a > 1", expressionType="SQL92").code == 1
    assert client.pull("T", 0, 0, subscription="a > 1", expressionType="GROOVY").code == 0


@every_version
def test_a_refused_pull_has_the_reason(broker, client, version):
    kinds = {} if version == "4.9.7" else {"broker": "1", "group": "2", "topic": "3", "broadcasting": "4"}

    def refused(**options):
        answer = client.pull("T", 0, 0, **options)
        return answer.code, answer.fields.get("forbiddenType")

    broker.update_config(brokerPermission=2)
    assert refused() == (16, kinds.get("broker"))
    broker.update_config(brokerPermission=6)
    broker.create_group("G", consumeEnable=False)
    assert refused() == (16, kinds.get("group"))
    broker.create_group("G", consumeBroadcastEnable=False)
    client.heartbeat("G", "T", model="BROADCASTING")
    assert refused(sysFlag=0) == (16, kinds.get("broadcasting"))
    assert client.pull("T", 0, 0, sysFlag=4).code == 19
    broker.cluster.create_topic("T", perm=2)
    assert refused() == (16, kinds.get("topic"))


def test_a_pull_creates_a_group_unless_that_is_forbidden(broker, client):
    broker.update_config(autoCreateSubscriptionGroup=False)
    assert client.pull("T", 0, 0).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    broker.update_config(autoCreateSubscriptionGroup=True)
    assert client.commit("G", "T", 0, 1).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert client.pull("T", 0, 0).code == ResponseCode.PULL_NOT_FOUND
    assert client.commit("G", "T", 0, 1).code == ResponseCode.SUCCESS


@every_version
def test_a_missing_or_broken_field_does_not_end_the_connection(client):
    assert client.call(RequestCode.PULL_MESSAGE, {"topic": "T"}).code == 1
    assert client.pull("T", 0, 0, maxMsgNums="many").code == 1
    assert client.pull("T", 0, 0).code == 19


@every_version
def test_the_commit_bit_stores_any_offset_once(broker, client):
    client.produce("T")
    client.pull("T", 0, 1, sysFlag=5, commitOffset=1)
    assert broker.committed("G", "T") == {0: 1}
    client.pull("T", 0, 99, sysFlag=5, commitOffset=77)  # the response is 21, and the offset is stored
    assert broker.committed("G", "T") == {0: 77}
    client.pull("T", 0, 0, sysFlag=5, commitOffset=-1)
    assert broker.committed("G", "T") == {0: -1}
    client.pull("T", 0, 0, sysFlag=4, commitOffset=5)
    assert broker.committed("G", "T") == {0: -1}
    assert client.pull("nowhere", 0, 0, sysFlag=5, commitOffset=3).code == 17
    assert broker.committed("G", "nowhere") == {}


@pytest.mark.differs("slaves")
@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_a_slave_answers_but_does_not_correct(version: str) -> None:
    with EmbeddedCluster(version=version, slaves=1) as cluster:
        cluster.create_topic("T", queues=2)
        cluster.send("T", count=5, queue_id=0)
        master, slave = cluster.broker("broker-a"), cluster.broker("broker-a-1")
        with RawClient(slave.address) as client:
            assert pull_result(client.pull("T", 0, 0)) == (0, "FOUND", 5, 0, 5)
            assert pull_result(client.pull("T", 0, 5)) == (19, "OFFSET_OVERFLOW_ONE", 5, 0, 5)
            for offset in (6, 11, -1):
                answer = client.pull("T", 0, offset)
                assert pull_result(answer)[0::2] == (20, offset, 5)
                assert answer.fields["suggestWhichBrokerId"] == "0"
            client.pull("T", 0, 0, sysFlag=5, commitOffset=3)
            assert slave.committed("G", "T") == ({} if version == "4.9.7" else {0: 3})
            assert master.committed("G", "T") == {}
            slave.update_config(offsetCheckInSlave=True)
            assert pull_result(client.pull("T", 0, 6)) == (21, "OFFSET_OVERFLOW_BADLY", 5, 0, 5)
            slave.update_config(slaveReadEnable=False)
            assert client.pull("T", 0, 0).code == (0 if version == "4.9.7" else 2)


def test_the_suggested_broker_can_be_set(broker, client):
    broker.suggest_broker(1)
    assert client.pull("T", 0, 0).fields["suggestWhichBrokerId"] == "1"


@every_version
def test_lite_pull_came_with_5(broker, client, version):
    code = client.answer(client.post_pull("T", 0, 0, code=RequestCode.LITE_PULL_MESSAGE)).code
    assert code == (3 if version == "4.9.7" else 19)
    broker.update_config(litePullMessageEnable=False)
    code = client.answer(client.post_pull("T", 0, 0, code=RequestCode.LITE_PULL_MESSAGE)).code
    assert code == (3 if version == "4.9.7" else 16)


@every_version
def test_only_4_9_responds_to_a_binary_request_with_a_binary_header(client, version):
    client.produce("T")
    fields = {"consumerGroup": "G", "topic": "T", "queueId": 0}
    answer = client.call(RequestCode.QUERY_CONSUMER_OFFSET, fields, header_type=1)
    assert answer.header_type == (1 if version == "4.9.7" else 0)
    assert answer.fields == {"offset": "0"}
