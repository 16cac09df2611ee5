"""A probe's recorded requests to real brokers, sent to the embedded broker, get the same responses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pyrocket_consumer.protocol import fastjson
from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.protocol.frame import RemotingCommand, decode_command
from pyrocket_consumer.protocol.message import Message, decode_messages, parse_offset_message_id
from pyrocket_consumer.testing import EmbeddedCluster
from tests import golden
from tests.testing.raw_client import RawClient

TOPIC = "A_gold"
TO_NAME_SERVER = {105, 106, 206, 100, 101, 102, 219}
NEEDS_MORE = {  # covered by other tests, because they need a member, a special setting or a parser
    RequestCode.CONSUME_MESSAGE_DIRECTLY,
    RequestCode.CHECK_CLIENT_CONFIG,
    RequestCode.CHECK_TRANSACTION_STATE,
}


def conversation(version: str) -> list[tuple[golden.Entry, golden.Entry | None]]:
    """Return the probe's requests and their responses."""
    probe = [entry for entry in golden.index() if entry.version == version and "(probe)" in entry.what]
    answers = {
        entry.name.removesuffix("-response.bin"): entry
        for entry in golden.index()
        if entry.version == version and entry.is_response
    }
    return [
        (entry, answers.get(entry.name.removesuffix("-request.bin")))
        for entry in probe
        if not entry.is_response and entry.code not in NEEDS_MORE
    ]


class Translation:
    """Maps message ids and offsets of the recorded broker to those of the embedded one."""

    def __init__(self) -> None:
        self.commit_log_offsets: dict[int, int] = {}
        self.half_offsets: dict[int, int] = {}

    def here(self, command: RemotingCommand) -> None:
        """Replace the ids and offsets of a recorded request."""
        fields = command.fields
        if command.code in (RequestCode.CONSUMER_SEND_MSG_BACK, RequestCode.VIEW_MESSAGE_BY_ID):
            offset = int(fields["offset"])
            fields["offset"] = str(self.commit_log_offsets.get(offset, offset))
        elif command.code == RequestCode.END_TRANSACTION:
            fields["commitLogOffset"] = str(self.commit_log_offsets[int(fields["commitLogOffset"])])
            fields["tranStateTableOffset"] = str(self.half_offsets[int(fields["tranStateTableOffset"])])
        elif fields.get("topic") == "RMQ_SYS_TRANS_HALF_TOPIC":
            fields["queueOffset"] = str(self.half_offsets[int(fields["queueOffset"])])

    def learn(self, recorded: RemotingCommand, ours: RemotingCommand, is_half: bool) -> None:
        """Learn the ids and offsets of the same messages from two responses."""
        for then, now in zip(records(recorded), records(ours), strict=True):
            self.commit_log_offsets[then.commit_log_offset] = now.commit_log_offset
        if "msgId" in recorded.fields and "," not in recorded.fields["msgId"]:
            then_offset = parse_offset_message_id(recorded.fields["msgId"])[2]
            self.commit_log_offsets[then_offset] = parse_offset_message_id(ours.fields["msgId"])[2]
        if is_half:
            self.half_offsets[int(recorded.fields["queueOffset"])] = int(ours.fields["queueOffset"])


def records(answer: RemotingCommand) -> list[Message]:
    return decode_messages(answer.body) if answer.body and answer.body[4:6] == b"\xda\xa3" else []


def comparable(answer: RemotingCommand, is_half: bool) -> dict[str, Any]:
    """Return the parts of a response that do not depend on times, ports and offsets in the commit log."""
    fields = dict(answer.fields)
    for name in ("msgId", "version", "indexLastUpdateTimestamp", "indexLastUpdatePhyoffset"):
        if name in fields:
            fields[name] = str(fields[name].count(","))
    if is_half and "msgId" in fields or records(answer) and records(answer)[0].queue.topic.startswith("RMQ_SYS"):
        for name in ("queueOffset", "nextBeginOffset", "maxOffset"):
            fields.pop(name, None)
    remark = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:0", answer.remark or "")
    # Only people read the rest of these: texts of exceptions, a topic's settings, statistics.
    remark = re.sub(r"TopicConfig \[.*", "", remark)
    body: Any = answer.body
    if records(answer):
        body = [message_facts(message) for message in records(answer)]
    elif answer.body.startswith(b"{"):
        body = without_addresses(fastjson.loads(answer.body))
    return {
        "code": answer.code,
        "remark": remark,
        "fields": fields,
        "language": answer.language,
        "version": answer.version,
        "body": body,
    }


def message_facts(message: Message) -> dict[str, Any]:
    properties = dict(message.properties)
    if "ORIGIN_MESSAGE_ID" in properties:
        properties["ORIGIN_MESSAGE_ID"] = "an offset id" if len(properties["ORIGIN_MESSAGE_ID"]) == 32 else "another"
    for name, value in properties.items():
        if name == "UNIQ_KEY" and value.startswith(("FD00", "7F00", "AC", "0A", "C0")):
            properties[name] = "generated"
    in_system_topic = message.queue.topic.startswith("RMQ_SYS")
    return {
        "topic": message.queue.topic,
        "queue": message.queue.queue_id,
        "offset": None if in_system_topic else message.queue_offset,
        "body": message.body,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "times": message.reconsume_times,
        "crc": message.body_crc,
        "prepared": message.prepared_transaction_offset > 0,
        "properties": properties,
    }


def without_addresses(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): without_addresses(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_addresses(each) for each in value]
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:0", value) if isinstance(value, str) else value


@pytest.mark.parametrize("version", golden.VERSIONS)
def test_answers_are_those_of_a_real_broker(version: str) -> None:
    translation = Translation()
    differences = []
    with EmbeddedCluster(version=version, delay_scale=0.01, long_poll_tick_s=0.1) as cluster:
        cluster.create_topic(TOPIC, queues=2)
        broker = cluster.broker("broker-a")
        with RawClient(broker.address) as to_broker, RawClient(cluster.name_server) as to_name_server:
            for request_entry, answer_entry in conversation(version):
                if "offset 0 of 3" in request_entry.what:  # earlier sends were not recorded
                    for number, tag in enumerate(("TagA", "TagB", "TagA")):
                        to_broker.produce(
                            TOPIC,
                            b"gold-%d" % number,
                            properties={"UNIQ_KEY": f"G{number}", "TAGS": tag, "KEYS": f"kg{number}"},
                        )
                request = decode_command(request_entry.frame())
                topic = request.fields.get("topic", "")
                if topic.startswith("%RETRY%") and answer_entry is not None and answer_entry.code == 0:
                    cluster.wait_until(lambda topic=topic: broker.max_offset(topic, 0) == 1)
                elif request.fields.get("queueOffset") == "3" and "committed transactional" in request_entry.what:
                    cluster.wait_until(lambda: broker.max_offset(TOPIC, 0) == 4)
                translation.here(request)
                client = to_name_server if request.code in TO_NAME_SERVER else to_broker
                client.send(request, request.header_type)
                if answer_entry is None:
                    assert request.is_oneway, request_entry
                    continue
                ours = client.answer(request.opaque)
                recorded = decode_command(answer_entry.frame())
                is_half = request.fields.get("f") == "4"
                if ours.code == recorded.code:
                    translation.learn(recorded, ours, is_half)
                expected, got = comparable(recorded, is_half), comparable(ours, is_half)
                differences += [
                    f"{request_entry.name}: {part}\n    real {expected[part]}\n    here {got[part]}"
                    for part in expected
                    if expected[part] != got[part]
                ]
    assert not differences, "\n" + "\n".join(differences)
