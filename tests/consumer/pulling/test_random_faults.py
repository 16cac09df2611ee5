"""Random trouble while a queue is read ahead: every message once, and the commit offset at the end."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pyrocket_consumer import ConsumerState
from pyrocket_consumer.testing import (
    Fault,
    answer,
    close_connection,
    cut_after,
    delay,
    delay_request,
    duplicate,
    garbage,
    handle_and_close,
    reset_connection,
    rewrite,
)
from pyrocket_consumer.wire.codes import RequestCode
from tests.consumer.orders import TOPIC
from tests.consuming import WAIT_S, Seen, until

RUNS = 30


def truncated(rng: random.Random) -> Fault:
    part = rng.random()
    return rewrite(lambda answer: dataclasses.replace(answer, body=answer.body[: int(len(answer.body) * part)]))


def fault(rng: random.Random) -> Fault:
    """Most answers are only late, each for itself, so that they come in any order."""
    if rng.random() < 0.8:
        return rng.choice((delay, delay_request))(rng.random() * 0.02)
    return rng.choice(
        [
            answer(rng.choice((1, 2, 16, 24, 25, 26, 215, 999)), "now and then"),
            duplicate,
            truncated(rng),
            cut_after(rng.randrange(400)),
            garbage(rng.randbytes(20)),
            close_connection,
            handle_and_close,
            reset_connection,
            rewrite(lambda answer: dataclasses.replace(answer, fields={**answer.fields, "nextBeginOffset": "0"})),
        ]
    )


@pytest.mark.parametrize("seed", range(RUNS))
def test_every_message_is_seen_once(orders, broker, seed):
    rng = random.Random(seed)
    queues, count = rng.randint(1, 3), 60 * rng.randint(1, 6)
    orders.make(queues=queues)
    orders.send(b"x", count=count // 2)
    for _ in range(rng.randint(5, 60)):
        broker.on(RequestCode.PULL_MESSAGE, fault(rng), when=lambda command: command.fields["topic"] == TOPIC)
    options = {
        "pull_batch_size": rng.choice((1, 3, 8, 32)),
        "max_cached_messages": rng.choice((1, 10, 50, 1000)),
        "max_span": rng.choice((20, 2000)),
        "consume_threads": rng.choice((1, 4)),
        "listener_batch_size": rng.choice((1, 1, 5)),
        "call_timeout_s": 3.0,  # some garbage looks like the beginning of a frame: then nothing more is answered there
        "pull_retry_delay_s": 0.01,
        "pull_hold_s": 0.1,
        "commit_interval_s": 0.03,
        "rebalance_interval_s": 0.2,
    }
    seen = Seen()

    def handle(unit):
        for message in unit if isinstance(unit, list) else [unit]:
            seen(message)

    with orders.consuming(handle, **options) as (consumer, _):
        orders.send(b"y", count=count - count // 2)
        try:
            seen.wait(lambda seen: len(seen.messages) >= count, 2 * WAIT_S)
            ends = dict.fromkeys(range(queues), count // queues)
            until(lambda: orders.committed == ends, f"the lower edge is the end, seed {seed}")
        except AssertionError as error:
            raise AssertionError(f"seed {seed} with {queues=} {count=} {options}: {error}") from error
        assert consumer.state is ConsumerState.RUNNING
    assert len(seen.messages) == count, f"seed {seed}: {[place for place, times in seen.places.items() if times > 1]}"
    assert set(seen.places.values()) == {1}
