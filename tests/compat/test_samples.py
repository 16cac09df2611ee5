"""The samples of the package that the facade replaces, and the code of its README, run unchanged."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.compat.old_package import old_package
from tests.compat.port import name_server_at_its_port
from tests.compat.running import running
from tests.consumer.processes import Child
from tests.consuming import until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow("the old package's samples wait"),
    pytest.mark.versions("4.9.7", "5.5.0"),
    pytest.mark.timeout(900),  # another test may hold the port
]

QUICK_CHECKS = {"transactionCheckInterval": "1000", "transactionTimeOut": "1000"}
PROMPT_S = 20

IMPORT = "from rocketmq.client import"
OUR_IMPORT = "from pyrocket_consumer.compat.rocketmq.client import"

SENT = re.compile(r"send message status: 0 msgId: (\S+)")


@pytest.fixture(params=["import-changed", "unchanged"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., AbstractContextManager[Child]]:
    """Run a program written for the old package, or a function of it, in one of the two ways the facade allows."""

    def run(program: Path, call: str | None = None) -> AbstractContextManager[Child]:
        options = {} if call is None else {"name": "sample", "then": f"[{call!r}](10)"}
        if request.param == "unchanged":
            return running(program, **options)
        text = program.read_text()
        assert text.count(IMPORT) == 1
        changed = tmp_path / f"changed_{program.name}"
        changed.write_text(text.replace(IMPORT, OUR_IMPORT))
        return running(changed, installed=False, **options)

    return run


@pytest.fixture
def cluster_at_port(cluster) -> Iterator[Any]:
    """A cluster at the address in the samples."""
    with name_server_at_its_port(cluster.name_server):
        yield cluster


def sample(name: str) -> Path:
    return old_package() / "samples" / name


def readme_code(tmp_path: Path, number: int) -> Path:
    """Return a file with one of the README's two programs: 0 sends, 1 consumes."""
    blocks = re.findall(r"```python\n(.*?)```", (old_package() / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    path = tmp_path / f"readme_{number}.py"
    path.write_text(blocks[number])
    return path


def sent_by(child: Child, timeout_s: float = 60) -> list[str]:
    """Wait for the end of a program that sends; return the message ids it has printed."""
    assert child.ended(timeout_s) == 0, child.errors
    assert child.errors == []
    return [found[1] for found in map(SENT.fullmatch, child.lines) if found]


def stored(cluster, topic: str, ids: list[str]) -> list:
    """Wait until a topic has messages of these ids, and return them."""

    def found():
        return [message for message in cluster.messages(topic) if message.message_id in ids]

    until(lambda: {message.message_id for message in found()} == set(ids), f"{len(ids)} messages of {topic} are stored")
    return found()


def assert_interrupted(child: Child) -> None:
    """Send Ctrl-C, and check that the program ends at once with only Python's traceback."""
    child.send(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(PROMPT_S / 2)
    if child.process.poll() is None:  # a thread that just started received the signal, and the main thread still sleeps
        child.send(signal.SIGINT)
    assert child.ended(PROMPT_S) == -signal.SIGINT, child.errors
    assert child.errors[0].startswith("Traceback") and child.errors[-1] == "KeyboardInterrupt", child.errors
    assert len([line for line in child.errors if "Traceback" in line]) == 1, child.errors


def test_the_sample_sends(cluster_at_port, run):
    with run(sample("producer.py")) as child:
        ids = sent_by(child)
    assert len(set(ids)) == 10 and child.lines[-1] == "send sync message done"
    for message in stored(cluster_at_port, "TopicTest", ids):
        assert (message.body, message.tags, message.keys) == (b"message body", "XXX", ("XXX",))
        assert message.property("property") == "test"


def test_the_sample_sends_messages_of_one_key_to_one_queue(cluster_at_port, run):
    with run(sample("producer.py"), "send_orderly_with_sharding_key") as child:
        ids = sent_by(child)
    assert len(set(ids)) == 10 and child.lines[-1] == "send sync order message done"
    found = stored(cluster_at_port, "TopicTest", ids)
    assert len({message.queue for message in found}) == 1
    assert [message.message_id for message in found] == ids


@pytest.mark.cluster(settings=QUICK_CHECKS)
def test_the_sample_has_its_transactions_committed_by_the_check(cluster_at_port, run):
    with run(sample("producer.py"), "send_transaction_message") as child:
        child.wait_for_line("send transaction message done")
        ids = [found[1] for found in map(SENT.fullmatch, child.lines) if found]
        assert len(set(ids)) == 10 and child.lines.count("local:   message body") == 10
        child.wait(lambda lines: lines.count("check: message body") >= 10, timeout_s=90)
        found = stored(cluster_at_port, "TopicTest", ids)
        assert {message.body for message in found} == {b"message body"}
        assert_interrupted(child)


def test_the_sample_consumes_what_the_sample_sends(cluster_at_port, run):
    with run(sample("producer.py")) as first:
        sent_by(first)  # so that the topic exists
    with run(sample("consumer.py")) as consumer:
        consumer.wait_for_line("start consume message")
        until_it_consumes(cluster_at_port, "consumer_group", "TopicTest")
        with run(sample("producer.py")) as producer:
            ids = sent_by(producer)
        consumer.wait(lambda lines: has_printed(" ".join(lines), ids))
        assert_interrupted(consumer)
    assert_it_left(cluster_at_port, "consumer_group", "TopicTest")


def has_printed(text: str, ids: list[str]) -> bool:
    """Return whether messages were printed, with body and property. The parts of two threads' lines may be mixed."""
    times = {text.count(part) for part in ("b'message body'", "b'test'")}
    return all(each in text for each in ids) and len(times) == 1 and min(times) >= len(ids)


@pytest.mark.cluster(settings={"messageDelayLevel": "1s 1s 1s"})
def test_the_code_of_the_readme_sends_and_consumes(cluster_at_port, run, tmp_path):
    sender, receiver = readme_code(tmp_path, 0), readme_code(tmp_path, 1)
    with run(sender) as first:
        assert first.ended() == 0, first.errors  # so that the topic exists
    with run(receiver) as consumer:
        until_it_consumes(cluster_at_port, "CID_XXX", "YOUR-TOPIC")
        with run(sender) as producer:
            assert (producer.ended(), producer.errors) == (0, [])
        (line,) = producer.lines
        status, message_id, offset = line.split()
        (message,) = stored(cluster_at_port, "YOUR-TOPIC", [message_id])
        assert (status, int(offset)) == ("0", message.queue_offset)
        consumer.wait_for_line(f"{message_id} b'XXXX'")
        (later,) = cluster_at_port.send("YOUR-TOPIC", b"later", delay_level=3)  # after all redeliveries
        consumer.wait_for_line(f"{later.message_id} b'later'")
        assert consumer.lines.count(f"{message_id} b'XXXX'") == 1
        assert_interrupted(consumer)
    assert_it_left(cluster_at_port, "CID_XXX", "YOUR-TOPIC")


def until_it_consumes(cluster, group: str, topic: str) -> None:
    """Wait until each queue of the topic has an owner, whose start offset is stored before it pulls."""
    queues = {message.queue.queue_id for message in cluster.messages(topic)}
    until(lambda: cluster.members(group), "the consumer is a member")
    until(lambda: queues <= cluster.committed(group, topic).keys(), "it has begun with every queue")


def assert_it_left(cluster, group: str, topic: str) -> None:
    """Check that a consumer closed: it is no longer a member, and its offsets are committed."""
    until(lambda: cluster.members(group) == [], "it has left the group")
    assert sum(cluster.committed(group, topic).values()) == len(cluster.messages(topic))
