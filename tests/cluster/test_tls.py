"""TLS to name servers and brokers, with the kind of certificate brokers make for themselves: unsigned, no host name."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import ConnectError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.testing import EmbeddedCluster
from tests.net.peer import server_tls, trusting

pytestmark = pytest.mark.live

@pytest.fixture
def secured():
    """A cluster that takes TLS only."""
    with EmbeddedCluster(tls=server_tls()) as cluster:
        cluster.create_topic("orders")
        yield cluster


def test_the_users_context_is_used_for_all_servers(secured, connect):
    client = connect(secured, tls=trusting())
    queue = MessageQueue("orders", "broker-a", 0)
    assert client.run(client.broker("broker-a").max_offset(queue), 30) == 0


def test_a_certificate_nobody_vouches_for_is_refused(secured):
    client = Cluster(ClientConfig(name_server=secured.name_server, tls=True), "me")
    with pytest.raises(ConnectError, match="(?i)certificate verify failed"):
        client.start()


def test_a_plain_client_is_not_let_in(secured):
    client = Cluster(ClientConfig(name_server=secured.name_server, call_timeout_s=1), "me")
    with pytest.raises(RocketError, match=secured.name_server):
        client.start()


# --- one side speaks TLS, the other does not: who starts is told what to change


def refused(name_server: str, **options: Any) -> str:
    with pytest.raises(ConnectError) as raised:
        Cluster(ClientConfig(name_server=name_server, **options), "me").start()
    return str(raised.value)


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """A server without TLS; returns its address. It says `answer` to whatever comes and goes away, or says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = []

        def serve() -> None:
            while True:
                try:
                    connected, _ = listening.accept()
                    connected.recv(1000)
                    taken.append(connected)
                    if answer is not None:
                        connected.sendall(answer)
                        connected.close()
                except OSError:
                    return

        server = threading.Thread(target=serve)
        server.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        server.join(30)
        for connected in taken:
            connected.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad\r\n\r\n", None], ids=["nothing", "words", "silence"])
def test_a_server_that_speaks_without_tls(answer):
    with answering(answer) as address:
        assert "leave tls out" in refused(address, tls=True, connect_timeout_s=1, call_timeout_s=1)


def test_our_own_brokers_without_tls():
    with EmbeddedCluster() as cluster:
        assert "leave tls out" in refused(cluster.name_server, tls=True)


def test_a_server_that_speaks_tls_only(secured):
    assert "pass tls=True" in refused(secured.name_server)
