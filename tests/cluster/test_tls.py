"""TLS to name servers and brokers, with the kind of certificate brokers make for themselves: unsigned, no host name."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from pyrocket_consumer.cluster import Cluster
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.errors import ConnectError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.testing import EmbeddedCluster

CERTIFICATE = Path(__file__).parent / "localhost.pem"  # of no worth: its key is in the same file


@pytest.fixture
def secured():
    """A cluster that takes TLS only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with EmbeddedCluster(tls=context) as cluster:
        cluster.create_topic("orders")
        yield cluster


def test_a_context_of_ones_own_is_used_for_name_servers_and_brokers(secured, connect):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    client = connect(secured, tls=context)
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
