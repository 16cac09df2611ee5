"""Programs with a consumer, each for its own process. The arguments are name server, topic, group, and others."""

from __future__ import annotations

from typing import Any

from tests.consumer.orders import GROUP, TOPIC
from tests.consumer.processes import Child

HEAD = """
import asyncio, os, signal, sys, threading, time
from pyrocket_consumer import AsyncPushConsumer, ClientClosed, PushConsumer
signal.signal(signal.SIGINT, signal.default_int_handler)
name_server, topic, group, *rest = sys.argv[1:]

def tell(line):
    os.write(1, line + bytes([10]))  # in one piece: threads print at the same time

def handle(message):
    tell(message.body)

def wait_until(reached, what=None):
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline, what and what()
        time.sleep(0.01)

def consumed(progress):
    return sum(each.committed or 0 for each in progress.values())
"""


def run(cluster: Any, program: str, *arguments: object, topic: str = TOPIC, group: str = GROUP) -> Child:
    """Start a program."""
    return Child("-c", HEAD + program, cluster.name_server, topic, group, *map(str, arguments))
