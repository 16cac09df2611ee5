"""Forked children of a consumer's process keep neither its membership nor its store."""

import json
import os
import signal
from contextlib import suppress

import pytest

from tests.consumer.lifecycle.programs import run
from tests.consumer.orders import GROUP
from tests.consuming import QUICK, until

pytestmark = [pytest.mark.live, pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")]

PARENT = """
import json, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forks while threads run
options = {"name_server": name_server, "group": group, **json.loads(rest[0])}
consumer = PushConsumer(**options)
consumer.subscribe(topic, handle)
consumer.start()
begin = next((each for each in rest[1].split() if os.fork() == 0), None)
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
        except ClientClosed as error:
            assert "fork" in str(error), error
        else:
            tell(b"joined")
    elif begin == "consumes":
        own = PushConsumer(**{**options, "group": group + "-of-the-child"})
        own.subscribe(topic, handle)
        own.start()
    tell(b"child %d" % os.getpid())
    time.sleep(600)
tell(b"parent")
time.sleep(600)
"""


class Pair:
    """A process with a consumer, and the children it has forked."""

    def __init__(self, orders, begin="sleeps", **options):
        self.parent = run(orders.cluster, PARENT, json.dumps({**QUICK, **options}), begin)
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


def test_a_membership_ends_with_the_forked_process(orders):
    orders.make(queues=2)
    with Pair(orders, "sleeps closes collects joins") as pair:
        orders.fill(10)
        pair.parent.wait(lambda lines: len(pair.parent.bodies) == 10)
        assert len(orders.members) == 1
        assert "joined" not in pair.parent.lines
        pair.parent.send(signal.SIGKILL)
        orders.wait_left()
        orders.fill(10, start=10)
        with orders.consuming() as (_, seen):
            seen.wait_for(10)
        for child in pair.children:
            os.kill(child, 0)  # it is alive


def test_a_child_with_its_own_consumer_disturbs_no_other(orders):
    orders.make(queues=2)
    with Pair(orders, "consumes") as pair:
        orders.fill(10)
        pair.parent.wait(lambda lines: sum(pair.parent.bodies.values()) == 20)
        assert set(pair.parent.bodies.values()) == {2}
        os.kill(pair.children[0], signal.SIGKILL)
        until(lambda: orders.cluster.members(GROUP + "-of-the-child") == [], "the child's connections have ended")
        orders.fill(10, start=10)
        pair.parent.wait(lambda lines: sum(pair.parent.bodies.values()) == 30)


@pytest.mark.hazard("H12")
def test_the_store_is_free_when_the_forked_process_has_ended(embedded, orders, tmp_path):
    options = {"message_model": "broadcasting", "offset_store_dir": str(tmp_path)}
    with Pair(orders, **options) as pair:
        orders.send(b"m0")
        pair.parent.wait(lambda lines: "m0" in lines)
        pair.parent.send(signal.SIGKILL)
        until(lambda: embedded.members(GROUP) == [], "the parent has ended")
        with orders.consuming(**options) as (consumer, _):
            assert consumer.client_id.endswith("@DEFAULT")
