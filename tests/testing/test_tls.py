"""A cluster that accepts TLS only."""

from __future__ import annotations

import gc
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from pyrocket_consumer.protocol.codes import RequestCode
from pyrocket_consumer.testing import EmbeddedCluster
from tests.testing.raw_client import RawClient

pytestmark = pytest.mark.live

CERTIFICATE = Path(__file__).parents[1] / "cluster" / "localhost.pem"


def tls_cluster() -> EmbeddedCluster:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(CERTIFICATE)
    return EmbeddedCluster(tls=server)


def connected(cluster: EmbeddedCluster) -> socket.socket:
    host, _, port = cluster.name_server.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def talking_tls(cluster: EmbeddedCluster) -> ssl.SSLSocket:
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return client.wrap_socket(connected(cluster))


def test_close_does_not_wait_for_the_tls_shutdown_of_a_client() -> None:
    with tls_cluster() as cluster:
        silent = talking_tls(cluster)
        cluster.wait_until(lambda: bool(cluster.name_server_node.connections))
    silent.close()


def test_close_does_not_wait_for_the_tls_handshake_of_a_client() -> None:
    with tls_cluster() as cluster:
        silent = connected(cluster)
        with talking_tls(cluster):  # by now the cluster has accepted the earlier, silent connection
            cluster.wait_until(lambda: bool(cluster.name_server_node.connections))
    with silent, suppress(ConnectionResetError):
        assert silent.recv(1) == b""
    gc.collect()  # an open socket warns, and warnings are errors


@pytest.mark.differs("tls")
def test_plain_connections_are_refused() -> None:
    with tls_cluster() as cluster, RawClient(cluster.broker("broker-a").address) as plain:
        plain.post(RequestCode.GET_BROKER_CONFIG)
        assert plain.wait_closed()
