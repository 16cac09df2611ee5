"""A cluster that takes TLS only."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

from pyrocket_consumer.testing import EmbeddedCluster

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
