"""A cluster with TLS and accounts, from the shell."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from pyrocket_consumer.testing import EmbeddedCluster

ROOT = Path(__file__).parents[2]
CERTIFICATE = ROOT / "tests" / "spark" / "loopback.pem"  # of 127.0.0.1, signed by itself; of no worth
ACCESS_KEY, SECRET_KEY = "reader", "do-not-show-12345"
ACCOUNT = {"PYROCKET_ACCESS_KEY": ACCESS_KEY, "PYROCKET_SECRET_KEY": SECRET_KEY}


@pytest.fixture(scope="module")
def secured():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with EmbeddedCluster(tls=context, account=(ACCESS_KEY, SECRET_KEY)) as cluster:
        cluster.create_topic("orders", queues=1)
        yield cluster


def pyrocket(cluster, *arguments, account=ACCOUNT):
    """Run the command as from a shell; its output never holds the secret."""
    command = [sys.executable, "-m", "pyrocket_consumer.cli", *arguments, "-n", cluster.name_server]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYROCKET_")}
    environment |= {"PYTHONPATH": str(ROOT), **account}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert SECRET_KEY not in done.stdout + done.stderr
    return done


TRUSTING = ("--tls-ca", str(CERTIFICATE))


def test_a_secured_cluster_is_used_from_the_shell(secured):
    done = pyrocket(secured, "produce", "orders", "first", "second", *TRUSTING)
    assert (done.returncode, done.stdout) == (0, "2 messages sent to orders\n"), done.stderr
    done = pyrocket(secured, "consume", "orders", *TRUSTING)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
    member = ("--group", "pyrocket-cli", "--from", "first", "--count", "2")
    done = pyrocket(secured, "consume", "orders", *member, *TRUSTING)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
    done = pyrocket(secured, "offsets", "reset", "pyrocket-cli", "orders", "--to", "earliest", "--execute", *TRUSTING)
    assert done.returncode == 0, done.stderr
    done = pyrocket(secured, "offsets", "show", "pyrocket-cli", "orders", "-o", "json", *TRUSTING)
    assert '"committed": 0' in done.stdout, done.stderr
    done = pyrocket(secured, "offsets", "lag", "pyrocket-cli", "--max", "1", *TRUSTING)
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize(
    ("options", "account", "told"),
    [
        (("--tls",), ACCOUNT, "certificate verify failed"),
        (("--tls-ca", "no-such.pem"), ACCOUNT, "--tls-ca 'no-such.pem' cannot be used: No such file"),
        (("--tls-ca", __file__), ACCOUNT, "it must be a file of certificates in PEM"),
        (TRUSTING, {"PYROCKET_ACCESS_KEY": ACCESS_KEY}, "PYROCKET_SECRET_KEY is missing"),
        (TRUSTING, {"PYROCKET_SECRET_KEY": SECRET_KEY}, "PYROCKET_ACCESS_KEY is missing"),
        (TRUSTING, {**ACCOUNT, "PYROCKET_SECRET_KEY": "wrong"}, "ignature"),
    ],
    ids=["unknown authority", "no file", "no certificates", "no secret", "no access key", "wrong secret"],
)
def test_what_is_missing_is_said_in_one_sentence(secured, options, account, told):
    done = pyrocket(secured, "offsets", "show", "some-group", "orders", *options, account=account)
    assert done.returncode not in (0, 3)
    assert told in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_help_says_where_an_account_comes_from(secured):
    for command in (("consume",), ("produce",), ("offsets", "reset")):
        assert "PYROCKET_ACCESS_KEY" in pyrocket(secured, *command, "--help").stdout


def test_only_brokers_at_allowed_addresses_are_connected_to(secured):
    done = pyrocket(secured, "produce", "orders", "one", *TRUSTING, "--allowed-addresses", "10.0.0.0/8,broker-a")
    assert done.returncode == 1
    assert "allowed_addresses=['10.0.0.0/8', 'broker-a'] has no such address" in done.stderr
    done = pyrocket(secured, "produce", "orders", "one", *TRUSTING, "--allowed-addresses", "127.0.0.1,10.0.0.0/8")
    assert done.returncode == 0, done.stderr
    done = pyrocket(secured, "produce", "orders", "one", *TRUSTING, "--allowed-addresses", "10.0.0.1/8")
    assert done.returncode == 2
