"""A process that exits without closing its producer, with default options, still sends its messages."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pyrocket_consumer.protocol.codes import RequestCode, ResponseCode
from pyrocket_consumer.testing import Gate, answer, delay, drop, rewrite
from tests.producer.programs import run_program

pytestmark = [
    pytest.mark.cluster(brokers=2),
    pytest.mark.live,
    pytest.mark.slow("starts a Python, which ends when its messages are answered"),
]

ROOT = Path(__file__).parents[2]
SEND = RequestCode.SEND_MESSAGE_V2

BEGIN = """
import multiprocessing, os, sys, threading, time
sys.path.insert(0, {root!r})
from pyrocket_consumer import Producer

def send(count=2000, **options):
    producer = Producer(name_server=sys.argv[1], **options)
    for number in range(count):
        producer.send_async("orders", b"%d" % number)
    return producer

"""

LONG_TIMEOUTS = "send_timeout_s=60, call_timeout_s=60"  # for messages that must be sent, however slow the machine is


def run(program: str, name_server: str) -> subprocess.CompletedProcess[str]:
    whole = BEGIN.format(root=str(ROOT)) + textwrap.dedent(program)
    return run_program(whole, name_server, flags=("-W", "error"))


def bodies(embedded) -> list[int]:
    return sorted(int(message.body) for message in embedded.messages("orders"))


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("producer = send(2000, {0})", 0),
        ("send(2000, {0})", 0),
        ("producer = send(2000, {0})\nsys.exit(3)", 3),
        ("producer = send(2000, {0})\nraise LookupError('on purpose')", 1),
        ("def main():\n    send(2000, {0})\n    sys.exit()\nmain()", 0),
    ],
    ids=["kept", "not kept", "sys.exit", "exception", "inside a function"],
)
def test_all_2000_are_sent_however_the_process_ends(embedded, program, code):
    done = run(program.format(LONG_TIMEOUTS), embedded.name_server)
    assert done.returncode == code
    assert bodies(embedded) == list(range(2000)), done.stderr


def test_by_default_none_of_2000_is_lost_silently(embedded):
    """All are sent, unless the machine is so busy that 3 s are not enough. Then the log has the lost ones."""
    done = run(
        """
        import atexit
        futures = []
        atexit.register(lambda: print(sum(not each.done() or each.exception() is not None for each in futures)))
        producer = Producer(name_server=sys.argv[1])
        for number in range(2000):
            futures.append(producer.send_async("orders", b"%d" % number))
        """,
        embedded.name_server,
    )
    lost = int(done.stdout)
    assert lost == 0 or "not closed" in done.stderr
    assert len(set(bodies(embedded))) >= 2000 - lost
    assert done.returncode == 0


def test_the_log_has_the_number_of_messages_in_flight(embedded):
    for name in ("broker-a", "broker-b"):
        embedded.broker(name).on(SEND, delay(2), times=None)  # enough time for a busy machine
    done = run(f"producer = send(50, group='shop', {LONG_TIMEOUTS})", embedded.name_server)
    assert bodies(embedded) == list(range(50))
    (line,) = done.stderr.splitlines()
    assert re.search(r"group=shop .*not closed: 50 messages were in flight, all are sent.*flush\(\)", line)


def test_nothing_is_logged_without_messages_in_flight(embedded):
    done = run("producer = send(20)\nproducer.flush()", embedded.name_server)
    assert (done.returncode, done.stderr) == (0, "")
    done = run("with send(20):\n    pass", embedded.name_server)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(bodies(embedded)) == 40


@pytest.mark.cluster(brokers=1)
def test_a_silent_broker_does_not_delay_the_exit(embedded):
    embedded.broker("broker-a").on(SEND, drop, times=None)
    started = time.monotonic()
    done = run("send(10, send_timeout_s=3)\nsend(5, send_timeout_s=3, group='other')", embedded.name_server)
    assert time.monotonic() - started < 60, "3 s, and what a busy machine adds"
    assert done.returncode == 0
    assert re.search(r"10 messages were in flight, 0 are sent, 10 were not sent, 0 have no answer", done.stderr)
    assert re.search(r"group=other .*5 messages were in flight, 0 are sent, 5 were not sent", done.stderr)


@pytest.mark.cluster(brokers=1)
def test_a_message_with_a_long_deadline_does_not_delay_the_exit(embedded):
    embedded.broker("broker-a").on(SEND, Gate(), times=None)
    done = run(
        """
        producer = Producer(name_server=sys.argv[1], send_timeout_s=0.5)
        for _ in range(4):
            producer.send_async("orders", b"1", timeout_s=3000)
        """,
        embedded.name_server,
    )
    assert re.search(r"4 messages.*4 .*no answer", done.stderr)


@pytest.mark.cluster(brokers=1)
def test_refused_messages_are_counted_with_a_reason(embedded):
    def refuse(exchange):
        exchange.later(2, lambda: answer(ResponseCode.MESSAGE_ILLEGAL, "too odd")(exchange))

    embedded.broker("broker-a").on(SEND, refuse, times=3)
    embedded.broker("broker-a").on(SEND, delay(2), times=None)
    done = run(f"send(10, {LONG_TIMEOUTS})", embedded.name_server)
    assert re.search(r"10 messages.*7 are sent, 3 were not sent, 0 have no answer; .* reason=.*too odd", done.stderr)


def test_messages_that_a_thread_sends_after_the_main_thread_are_sent(embedded):
    done = run(
        f"""
        producer = send(10, {LONG_TIMEOUTS})

        def later():
            threading.main_thread().join()
            time.sleep(0.2)
            for number in range(10, 30):
                producer.send_async("orders", b"%d" % number)

        threading.Thread(target=later).start()
        """,
        embedded.name_server,
    )
    assert bodies(embedded) == list(range(30)), done.stderr


def test_a_producer_may_be_the_first_after_the_main_thread_ended(embedded):
    """Modules that are imported on first use can still be imported then."""
    program = """
    import sys, threading
    import pyrocket_consumer

    def later():
        threading.main_thread().join()
        with pyrocket_consumer.Producer(name_server=sys.argv[1]) as producer:
            producer.send("orders", b"1")

    threading.Thread(target=later).start()
    """
    done = run_program(program, embedded.name_server)
    assert bodies(embedded) == [1] and done.stderr == ""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_multiprocessing_sends_its_messages(embedded, method, tmp_path):
    if sys.platform == "win32":
        method = "spawn"
    program = tmp_path / "program.py"
    program.write_text(
        BEGIN.format(root=str(ROOT))
        + textwrap.dedent(
            f"""
            def child():
                time.sleep(0)
                send(100, {LONG_TIMEOUTS})

            if __name__ == "__main__":
                parents = Producer(name_server=sys.argv[1])
                parents.send("orders", b"-1")
                process = multiprocessing.get_context({method!r}).Process(target=child)
                process.start()
                process.join()
                print(process.exitcode)
                parents.close()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program), embedded.name_server], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "0\n", done.stderr
    assert bodies(embedded) == list(range(-1, 100)), done.stderr


def test_a_broker_with_a_host_name_is_found_at_the_exit(embedded):
    """Threads resolve host names, and Python ends these threads before it ends the process."""

    def by_name(answer):
        answer.body = answer.body.replace(b"127.0.0.1:", b"localhost:")
        return answer

    embedded.name_server_node.on(RequestCode.GET_ROUTEINFO_BY_TOPIC, rewrite(by_name), times=None)
    done = run(f"send(100, {LONG_TIMEOUTS})", embedded.name_server)
    assert bodies(embedded) == list(range(100)), done.stderr


def test_callbacks_of_the_last_messages_run(embedded):
    done = run(
        f"""
        producer = Producer(name_server=sys.argv[1], {LONG_TIMEOUTS})
        for number in range(50):
            future = producer.send_async("orders", b"%d" % number)
            future.add_done_callback(lambda future: print(future.result(0).queue_offset >= 0))
        """,
        embedded.name_server,
    )
    assert done.stdout == "True\n" * 50, done.stderr


def test_a_transaction_producer_is_flushed_too(embedded):
    done = run(
        f"""
        from pyrocket_consumer.producer import TransactionProducer
        producer = TransactionProducer("g", check=print, name_server=sys.argv[1], {LONG_TIMEOUTS})
        for number in range(50):
            producer.send_async("orders", b"%d" % number)
        """,
        embedded.name_server,
    )
    assert bodies(embedded) == list(range(50)), done.stderr
