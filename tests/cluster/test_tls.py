"""TLS to name servers and brokers, with a certificate as brokers create it: self-signed, without a host name."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, contextmanager

import pytest

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import ConnectError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.testing import EmbeddedCluster
from tests.transport.peer import server_tls, trusting

pytestmark = pytest.mark.live


@pytest.fixture
def secured():
    """A cluster that accepts only TLS."""
    with EmbeddedCluster(tls=server_tls()) as cluster:
        cluster.create_topic("orders")
        yield cluster


def test_the_users_context_is_used_for_all_servers(secured, connect):
    client = connect(secured, tls=trusting())
    queue = MessageQueue("orders", "broker-a", 0)
    assert client.run(client.broker("broker-a").max_offset(queue), 30) == 0


def refused(name_server, **options):
    """Return the error of a client that cannot start."""
    with pytest.raises(ConnectError) as raised:
        Cluster(ClientConfig(name_server=name_server, **options), "me").start()
    return str(raised.value)


def test_untrusted_certificates_and_plain_servers_are_refused(secured):
    assert "certificate verify failed" in refused(secured.name_server, tls=True).lower()
    assert secured.name_server in refused(secured.name_server, call_timeout_s=1)
    assert "pass tls=True" in refused(secured.name_server)


@contextmanager
def responding_with(response):
    """Start a server without TLS, and yield its address. It sends `response`, if any, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as taken:

        def serve():
            while True:
                try:
                    connected = taken.enter_context(listening.accept()[0])
                    connected.recv(1000)
                    if response is not None:
                        connected.sendall(response)
                        connected.close()
                except OSError:
                    return

        server = threading.Thread(target=serve)
        server.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        server.join(30)


@pytest.mark.parametrize("response", [b"", b"HTTP/1.1 400 Bad\r\n\r\n", None], ids=["nothing", "words", "silence"])
def test_a_server_that_speaks_without_tls(response):
    with responding_with(response) as address:
        assert "leave tls out" in refused(address, tls=True, connect_timeout_s=1, call_timeout_s=1)


def test_our_own_brokers_without_tls(embedded):
    assert "leave tls out" in refused(embedded.name_server, tls=True)
