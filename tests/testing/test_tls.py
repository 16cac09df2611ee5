"""A cluster that takes TLS only."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from pyrocket_consumer.wire.codes import RequestCode
from tests.testing.raw_client import RawClient

CERTIFICATE = Path(__file__).parents[1] / "cluster" / "localhost.pem"


def test_it_ends_although_a_client_does_not_answer_its_farewell() -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(CERTIFICATE)
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with EmbeddedCluster(tls=server) as cluster:
        host, _, port = cluster.name_server.rpartition(":")
        silent = client.wrap_socket(socket.create_connection((host, int(port))))
        cluster.wait_until(lambda: bool(cluster.name_server_node.connections))
    silent.close()


@pytest.mark.differs("tls")
def test_it_does_not_talk_to_plain_connections() -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(CERTIFICATE)
    with EmbeddedCluster(tls=server) as cluster, RawClient(cluster.broker("broker-a").address) as plain:
        plain.post(RequestCode.GET_BROKER_CONFIG)
        assert plain.wait_closed()
