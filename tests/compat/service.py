"""A small shop that sends its orders, payments, mails and prices through RocketMQ.

    python service.py shop NAME_SERVER PREFIX DATABASE FIRST LAST
    python service.py worker NAME_SERVER PREFIX DATABASE

It is written for rocketmq-client-python 2.0.0, by its README and its source. SIGTERM ends either process.
"""

import json
import os
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing

from rocketmq.client import (
    ConsumeStatus,
    Message,
    MessageModel,
    Producer,
    PushConsumer,
    SendStatus,
    TransactionMQProducer,
    TransactionStatus,
)
from rocketmq.consts import MessageProperty
from rocketmq.exceptions import ProducerException, RocketMQException

STEPS = ["created", "paid", "shipped"]
PRODUCTS = ["apple", "pear", "größe"]
SEND_ATTEMPTS = 3

TABLES = """
CREATE TABLE IF NOT EXISTS charges (order_id INTEGER PRIMARY KEY, amount INTEGER);
CREATE TABLE IF NOT EXISTS declined (order_id INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, order_id INTEGER, step TEXT, keys TEXT, worker TEXT);
CREATE TABLE IF NOT EXISTS mails (msg_id TEXT PRIMARY KEY, order_id INTEGER, kind TEXT, tries INTEGER, late INTEGER);
CREATE TABLE IF NOT EXISTS receipts (order_id INTEGER PRIMARY KEY, amount INTEGER);
CREATE TABLE IF NOT EXISTS audit (entry TEXT PRIMARY KEY);
"""


def print_words(*words):
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


class Database:
    """Opens a connection for each call, because callbacks run on threads of the client."""

    def __init__(self, path):
        self.path = path
        self.run(TABLES)

    def run(self, script):
        with closing(self._connect()) as connection:
            connection.executescript(script)

    def write(self, statement, *values):
        with closing(self._connect()) as connection, connection:
            connection.execute(statement, values)

    def read(self, statement, *values):
        with closing(self._connect()) as connection:
            return connection.execute(statement, values).fetchall()

    def _connect(self):
        return sqlite3.connect(self.path, timeout=60)


class Shop:
    def __init__(self, name_server, prefix, database):
        self.prefix = prefix
        self.database = database
        self.producer = Producer(prefix + "-shop", timeout=10000, max_message_size=1024 * 1024)
        self.orders = Producer(prefix + "-orders", orderly=True)
        self.orders.set_timeout(10000)
        self.payments = TransactionMQProducer(prefix + "-payments", self.check_charge)
        self.all = [self.producer, self.orders, self.payments]
        for producer in self.all:
            producer.set_name_server_address(name_server)
            producer.start()

    def message(self, topic, order_id, body, tags="-"):
        msg = Message(self.prefix + "-" + topic)
        msg.set_keys(f"order-{order_id}")
        msg.set_tags(tags)
        msg.set_property("order", str(order_id))
        msg.set_body(body)
        return msg

    def send(self, send, *args):
        for attempt in range(SEND_ATTEMPTS):
            try:
                result = send(*args)
                if result.status != SendStatus.OK:
                    print_words("stored, but", result.status.name)
                return result
            except ProducerException as e:
                print_words("attempt", attempt, "failed:", e)
                time.sleep(1)
        raise SystemExit("could not send")

    def sell(self, order_id):
        amount = order_id * 10
        for step in STEPS:
            msg = self.message("orders", order_id, json.dumps({"order": order_id, "step": step}), step)
            self.send(self.orders.send_orderly_with_sharding_key, msg, f"order-{order_id}")
        msg = self.message("payments", order_id, json.dumps({"order": order_id, "amount": amount}))
        msg.set_property("amount", str(amount))
        self.send(self.payments.send_message_in_transaction, msg, self.charge, None)
        for kind in ["invoice", "reminder", "newsletter"]:
            msg = self.message("mails", order_id, b"\0\xff picture of " + kind.encode(), kind)
            if kind == "reminder":
                msg.set_delay_time_level(1)
            self.send(self.producer.send_sync, msg)
        self.producer.send_oneway(self.message("audit", order_id, f"sold {order_id}"))

    def charge(self, msg, user_args):
        """Run the local transaction. Some cards are declined, and sometimes the result is unknown."""
        order_id, amount = int(msg.get_property("order")), json.loads(msg.body)["amount"]
        if order_id % 5 == 3:
            self.database.write("INSERT INTO declined VALUES (?)", order_id)
            return TransactionStatus.ROLLBACK
        if order_id % 5 != 0:
            self.database.write("INSERT INTO charges VALUES (?, ?)", order_id, amount)
        else:
            self.database.write("INSERT INTO declined VALUES (?)", order_id)
        return TransactionStatus.COMMIT if order_id % 5 in (1, 2) else TransactionStatus.UNKNOWN

    def check_charge(self, msg):
        order_id = int(msg["order"])
        if self.database.read("SELECT 1 FROM charges WHERE order_id = ?", order_id):
            print_words("checked", order_id, "charged")
            return TransactionStatus.COMMIT
        if self.database.read("SELECT 1 FROM declined WHERE order_id = ?", order_id):
            print_words("checked", order_id, "not charged")
            return TransactionStatus.ROLLBACK
        return TransactionStatus.UNKNOWN  # it still runs, perhaps in another process

    def publish_prices(self):
        for number, product in enumerate(PRODUCTS):
            msg = Message(self.prefix + "-prices")
            msg.set_property("product", product)
            msg.set_body(str(100 + number))
            self.send(self.producer.send_sync, msg)

    def shutdown(self):
        for producer in self.all:
            producer.shutdown()


class Worker:
    def __init__(self, name_server, prefix, database):
        self.database = database
        self.name = f"worker-{os.getpid()}"
        self.prices = {}

        warehouse = PushConsumer(prefix + "-warehouse", orderly=True)
        warehouse.subscribe(prefix + "-orders", self.on_order)

        office = PushConsumer(prefix + "-office")
        office.set_thread_count(8)
        office.subscribe(prefix + "-mails", self.on_mail, "invoice || reminder")
        office.subscribe(prefix + "-payments", self.on_payment)
        office.subscribe(prefix + "-audit", self.on_audit)

        windows = PushConsumer(prefix + "-windows", message_model=MessageModel.BROADCASTING)
        windows.subscribe(prefix + "-prices", self.on_price)

        self.all = [warehouse, office, windows]
        for consumer in self.all:
            consumer.set_name_server_address(name_server)
            consumer.set_instance_name(self.name)
            consumer.start()

    def on_order(self, msg):
        event = json.loads(msg.body.decode("utf-8"))
        order_id, step = event["order"], event["step"]
        before = [row[0] for row in self.database.read("SELECT step FROM events WHERE order_id = ?", order_id)]
        if step in before:
            print_words("again", order_id, step)
            return ConsumeStatus.CONSUME_SUCCESS
        if step != STEPS[len(before)]:
            print_words("out of order", order_id, step, before)
            raise ValueError(f"order {order_id}: {step} after {before}")
        assert step == msg.tags.decode("utf-8")
        keys = msg.get_property(MessageProperty.KEYS).decode("utf-8")
        self.database.write("INSERT INTO events VALUES (NULL, ?, ?, ?, ?)", order_id, step, keys, self.name)
        return ConsumeStatus.CONSUME_SUCCESS

    def on_mail(self, msg):
        order_id, kind = int(msg.get_property("order")), msg.tags.decode("utf-8")
        if msg.reconsume_times == 0:
            if order_id % 4 == 0:
                raise RuntimeError("the mail server is away")
            if order_id % 4 == 1:
                return ConsumeStatus.RECONSUME_LATER
        assert msg.body == b"\0\xff picture of " + kind.encode(), msg.body
        late = msg.store_timestamp - msg.born_timestamp
        self.database.write(
            "INSERT OR IGNORE INTO mails VALUES (?, ?, ?, ?, ?)", msg.id, order_id, kind, msg.reconsume_times, late
        )
        return ConsumeStatus.CONSUME_SUCCESS

    def on_payment(self, msg):
        order_id, amount = int(msg["order"]), int(msg["amount"])
        self.database.write("INSERT OR IGNORE INTO receipts VALUES (?, ?)", order_id, amount)
        return ConsumeStatus.CONSUME_SUCCESS

    def on_audit(self, msg):
        self.database.write("INSERT OR IGNORE INTO audit VALUES (?)", str(msg))
        return ConsumeStatus.CONSUME_SUCCESS

    def on_price(self, msg):
        self.prices[msg.get_property("product").decode("utf-8")] = int(msg.body)
        print_words("prices", json.dumps(self.prices, sort_keys=True))
        return ConsumeStatus.CONSUME_SUCCESS

    def shutdown(self):
        for consumer in self.all:
            consumer.shutdown()


def main(role, name_server, prefix, path, *orders):
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    try:
        service = {"shop": Shop, "worker": Worker}[role](name_server, prefix, Database(path))
    except RocketMQException as e:
        raise SystemExit(f"no start: {type(e).__name__}: {e}") from e
    print_words("ready")
    if role == "shop":
        service.publish_prices()
        first, last = orders
        for order_id in range(int(first), int(last) + 1):
            service.sell(order_id)
        print_words("sold all to", last)
    while not stopping.wait(1):
        pass
    service.shutdown()
    print_words("stopped")


if __name__ == "__main__":
    main(*sys.argv[1:])
