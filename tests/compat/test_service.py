"""A service that was written for the package that the facade replaces runs unchanged."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.compat.running import running
from tests.consumer.processes import Child
from tests.consuming import until

pytestmark = pytest.mark.live
SERVICE = Path(__file__).with_name("service.py")
TOPICS = ("orders", "payments", "mails", "audit", "prices")
STEPS = ["created", "paid", "shipped"]
PRICES = "prices " + json.dumps({"apple": 100, "größe": 102, "pear": 101}, sort_keys=True)
LONG_TIMEOUT_S = 120

QUICK = {  # short delays of checks and retries
    "transactionCheckInterval": "1000",
    "transactionTimeOut": "1000",
    "messageDelayLevel": "1s 1s 1s 1s 1s",
}


class Shop:
    """The observable state of the service: its database, and the messages in the cluster."""

    def __init__(self, cluster, prefix: str, directory: Path) -> None:
        self._cluster, self._prefix, self._path = cluster, prefix, directory / "shop.db"
        for topic in TOPICS:
            cluster.create_topic(f"{prefix}-{topic}", queues=4)

    @contextmanager
    def process(self, role: str, *orders: str):
        """Run one of the service's processes; yield it when it is ready."""
        arguments = (role, self._cluster.name_server, self._prefix, str(self._path), *orders)
        with running(SERVICE, *arguments) as child:
            child.wait_for_line("ready")
            yield child

    def rows(self, statement: str) -> list[tuple]:
        with closing(sqlite3.connect(self._path, timeout=60)) as connection:
            return connection.execute(statement).fetchall()

    def stored(self, topic: str) -> list:
        return self._cluster.messages(f"{self._prefix}-{topic}")

    def steps(self) -> dict[int, list[str]]:
        """Return the steps of each order, in the order in which they happened."""
        found: dict[int, list[str]] = {}
        for order_id, step in self.rows("SELECT order_id, step FROM events ORDER BY id"):
            found.setdefault(order_id, []).append(step)
        return found

    def consumed(self, group: str, topic: str) -> int:
        """Return the number of messages before a group's committed offsets."""
        return sum(self._cluster.committed(f"{self._prefix}-{group}", f"{self._prefix}-{topic}").values())


@pytest.fixture
def shop(cluster, names, tmp_path, monkeypatch) -> Shop:
    monkeypatch.setenv("ROCKETMQ_CLIENT_LOCALOFFSETSTOREDIR", str(tmp_path / "offsets"))
    return Shop(cluster, names.topic(), tmp_path)


def end(*children) -> None:
    """Terminate processes as a supervisor does, and check that they shut down cleanly."""
    for child in children:
        child.send(signal.SIGTERM)
    for child in children:
        assert child.ended() == 0, child.errors
        assert child.lines[-1] == "stopped"


def every(orders: int) -> dict[int, list[str]]:
    return dict.fromkeys(range(1, orders + 1), STEPS)


def charged(orders: int) -> dict[int, int]:
    return {order_id: order_id * 10 for order_id in every(orders) if order_id % 5 not in (0, 3)}


def unknown(orders: int) -> set[str]:
    """Return the lines that a shop prints when brokers check its payments with an unknown result."""
    return {
        f"checked {each} {'charged' if each % 5 else 'not charged'}" for each in every(orders) if each % 5 in (0, 4)
    }


def mails(orders: int) -> dict[tuple[int, str], int]:
    """Return the mails to send, and the number of failures before each."""
    return {(order_id, kind): int(order_id % 4 < 2) for order_id in every(orders) for kind in ("invoice", "reminder")}


def until_all_is_done(shop: Shop, orders: int) -> None:
    until(lambda: shop.steps() == every(orders), "every step of every order, in order", LONG_TIMEOUT_S)
    until(lambda: len(shop.rows("SELECT * FROM mails")) >= len(mails(orders)), "every mail", LONG_TIMEOUT_S)
    until(lambda: len(shop.rows("SELECT * FROM audit")) == orders, "the whole audit", LONG_TIMEOUT_S)
    until(lambda: len(shop.rows("SELECT * FROM receipts")) >= len(charged(orders)), "receipts", LONG_TIMEOUT_S)


@pytest.mark.slow("a whole service works through its orders")
@pytest.mark.cluster(settings=QUICK)
def test_a_service_runs_as_it_is(shop):
    orders = 20
    with shop.process("worker") as first, shop.process("worker") as second:
        with shop.process("shop", "1", str(orders)) as seller:
            seller.wait_for_line(f"sold all to {orders}", LONG_TIMEOUT_S)
            until_all_is_done(shop, orders)
            seller.wait(lambda lines: unknown(orders) <= set(lines), LONG_TIMEOUT_S)  # brokers ask
            until(lambda: shop.consumed("office", "mails") == len(shop.stored("mails")), "newsletters are passed over")
            first.wait_for_line(PRICES)
            second.wait_for_line(PRICES)
            end(seller)
        end(first, second)

    assert trouble(first, second) == []
    assert shop.steps() == every(orders)
    assert {keys for (keys,) in shop.rows("SELECT keys FROM events")} == {f"order-{each}" for each in every(orders)}
    tries = {(order_id, kind): tries for order_id, kind, tries in shop.rows("SELECT order_id, kind, tries FROM mails")}
    assert tries == mails(orders)
    assert min(late for (late,) in shop.rows("SELECT late FROM mails WHERE kind = 'reminder' AND tries = 0")) >= 900
    assert dict(shop.rows("SELECT * FROM charges")) == dict(shop.rows("SELECT * FROM receipts")) == charged(orders)
    assert {int(message.property("order")) for message in shop.stored("payments")} == charged(orders).keys()
    assert {entry for (entry,) in shop.rows("SELECT entry FROM audit")} == {f"sold {each}" for each in every(orders)}
    for group, topic in [("warehouse", "orders"), ("office", "payments"), ("office", "audit")]:
        assert shop.consumed(group, topic) == len(shop.stored(topic)), f"{group} has committed what it did of {topic}"


def trouble(*workers: Child) -> list[str]:
    """Return the duplicates and early messages that workers reported."""
    return [line for child in workers for line in child.lines if line.startswith(("again", "out of order"))]


@pytest.mark.slow("a whole service works through its orders")
@pytest.mark.cluster(settings=QUICK)
def test_a_service_is_redeployed_while_it_works(shop):
    """Replacing one worker after the other loses, duplicates and reorders no order."""
    workers = shop.process("worker"), shop.process("worker")
    with workers[0] as first, workers[1] as second, shop.process("shop", "1", "60") as seller:
        until(shop.steps, "they work")
        end(first)
        with shop.process("worker") as third:
            end(second)
            with shop.process("shop", "61", "80") as other_seller:
                seller.wait_for_line("sold all to 60", LONG_TIMEOUT_S)
                other_seller.wait_for_line("sold all to 80", LONG_TIMEOUT_S)
                until_all_is_done(shop, 80)
                end(third, seller, other_seller)
    assert trouble(first, second, third) == []
    found = shop.rows("SELECT DISTINCT worker FROM events WHERE order_id > 60")
    assert found == [(f"worker-{third.process.pid}",)]


def test_a_service_without_a_name_server_fails_with_an_error(tmp_path):
    with running(SERVICE, "worker", "127.0.0.1:1", "nowhere", str(tmp_path / "shop.db")) as child:
        assert child.ended() == 1
    assert child.errors[-1].startswith("no start: PushConsumerStartFailed: ") and "127.0.0.1:1" in child.errors[-1]
