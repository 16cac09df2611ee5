"""Processes forked from a consumer's: they keep nothing of it, neither its place in the group nor its store."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import pytest

from tests.consumer.processes import Child
from tests.consuming import QUICK, consuming, until
from tests.resetting import fill

pytestmark = [pytest.mark.live, pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")]

PARENT = """
import json, os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks while threads run
from pyrocket_consumer import ConsumerClosed, PushConsumer
topic, options = sys.argv[1], json.loads(sys.argv[2])

def handle(message):
    os.write(1, message.body + bytes([10]))

consumer = PushConsumer(**options)
consumer.subscribe(topic, handle)
consumer.start()
begin = next((each for each in sys.argv[3].split() if os.fork() == 0), None)
if begin is not None:
    if begin == "closes":
        consumer.close()
    elif begin == "collects":
        del consumer
        import gc
        gc.collect()
    elif begin == "joins":
        try:
            consumer.join(30)
        except ConsumerClosed as error:
            assert "fork" in str(error), error
        else:
            os.write(1, b"joined\\n")
    elif begin == "consumes":
        own = PushConsumer(**{**options, "group": options["group"] + "-of-the-child"})
        own.subscribe(topic, handle)
        own.start()
    os.write(1, b"child %d\\n" % os.getpid())
    time.sleep(600)
os.write(1, b"parent\\n")
time.sleep(600)
"""


class Pair:
    """A process with a consumer, and the children it has forked."""

    def __init__(self, cluster, topic, group, begin="sleeps", **options):
        whole = {"group": group, "name_server": cluster.name_server, **QUICK, **options}
        self.parent = Child("-c", PARENT, topic, json.dumps(whole), begin)
        self.parent.wait(lambda lines: len(self._numbers()) == len(begin.split()))
        self.children = self._numbers()

    def _numbers(self):
        return [int(line.split()[1]) for line in self.parent.lines if line.startswith("child ")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.parent.process.kill()
        for child in self.children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.parent.ended()


def test_a_membership_ends_with_the_forked_process(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    with Pair(embedded, topic, group, "sleeps closes collects joins") as pair:
        fill(embedded, topic, 10)
        pair.parent.wait(lambda lines: len(pair.parent.bodies) == 10)
        assert len(embedded.members(group)) == 1
        assert "joined" not in pair.parent.lines
        pair.parent.send(signal.SIGKILL)
        until(lambda: embedded.members(group) == [], "the connections of the parent have ended")
        embedded.send(topic, lambda number: b"n%d" % number, count=10)
        with consuming(embedded, topic, group) as (_, seen):
            seen.wait_for(10)
        for child in pair.children:
            os.kill(child, 0)  # it lives


def test_a_child_with_a_consumer_of_its_own_disturbs_nobody(embedded, topic, group):
    embedded.create_topic(topic, queues=2)
    with Pair(embedded, topic, group, "consumes") as pair:
        fill(embedded, topic, 10)
        pair.parent.wait(lambda lines: sum(pair.parent.bodies.values()) == 20)
        assert set(pair.parent.bodies.values()) == {2}
        os.kill(pair.children[0], signal.SIGKILL)
        until(lambda: embedded.members(group + "-of-the-child") == [], "the child's connections have ended")
        embedded.send(topic, lambda number: b"m1%d" % number, count=10)
        pair.parent.wait(lambda lines: sum(pair.parent.bodies.values()) == 30)


@pytest.mark.hazard("H12")
def test_the_store_is_free_when_the_forked_process_has_ended(embedded, topic, group, tmp_path):
    options = {"message_model": "broadcasting", "offset_store_dir": str(tmp_path)}
    with Pair(embedded, topic, group, **options) as pair:
        embedded.send(topic, b"m0")
        pair.parent.wait(lambda lines: "m0" in lines)
        pair.parent.send(signal.SIGKILL)
        until(lambda: embedded.members(group) == [], "the parent has ended")
        with consuming(embedded, topic, group, **options) as (consumer, _):
            assert consumer.client_id.endswith("@DEFAULT")
