"""Which error an answer stands for."""

import asyncio
import pickle
import threading

import pytest

from pyrocket_consumer.cluster.answers import LARGE_BODY_BYTES, check_answer, read_body
from pyrocket_consumer.errors import BrokerError, FlowControl, PermissionDenied, ProtocolError
from pyrocket_consumer.wire.bodies import decode_lock_answer
from pyrocket_consumer.wire.frame import RemotingCommand
from tests.for_each import for_each

ACL_1_REMARK = "org.apache.rocketmq.acl.common.AclException: No accessKey is configured, AclClientRPCHook.java:42"


def test_an_accepted_code_is_no_error():
    answer = RemotingCommand(22)
    assert check_answer(answer, "10.0.0.1:10911", accept=(0, 22)) is answer


@for_each(
    "code, remark, kind, retryable",
    [
        (16, "User:u has no permission to access Topic:T", PermissionDenied, False),
        (1, ACL_1_REMARK, PermissionDenied, False),
        (2, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while", FlowControl, True),
        (215, "slow down", FlowControl, True),
        (1, "java.lang.NullPointerException", BrokerError, True),
        (23, "parse the consumer's subscription failed", BrokerError, False),
        (9999, "something new", BrokerError, False),
    ],
)
def test_other_codes_say_what_went_wrong_and_where(code, remark, kind, retryable):
    with pytest.raises(BrokerError) as raised:
        check_answer(RemotingCommand(code, remark=remark), "10.0.0.1:10911")
    error = pickle.loads(pickle.dumps(raised.value))
    assert type(error) is kind
    assert (error.code, error.remark, error.address, error.retryable) == (code, remark, "10.0.0.1:10911", retryable)
    assert "10.0.0.1:10911" in str(error)
    assert remark in str(error)


@for_each("size", [0, 1, LARGE_BODY_BYTES, LARGE_BODY_BYTES + 1])
def test_only_a_large_body_is_read_by_another_thread(size):
    async def reader():
        return await read_body(lambda body: (len(body), threading.get_ident()), b"x" * size)

    length, thread = asyncio.run(reader())
    assert length == size
    assert (thread != threading.get_ident()) == (size > LARGE_BODY_BYTES)


@for_each("size", [1, LARGE_BODY_BYTES + 1])
def test_what_is_no_such_body_is_an_error_for_whoever_asked(size):
    with pytest.raises(ProtocolError, match="lock answer"):
        asyncio.run(read_body(decode_lock_answer, b"[%b]" % (b" " * size)))
