"""The shell with a cluster that uses TLS and accounts."""

from __future__ import annotations

import ssl

import pytest

from pyrocket_consumer.testing import EmbeddedCluster
from tests.for_each import for_each
from tests.pages import ROOT

pytestmark = pytest.mark.live

CERTIFICATE = ROOT / "tests" / "spark" / "loopback.pem"  # of 127.0.0.1, self-signed; public
ACCESS_KEY, SECRET_KEY = "reader", "do-not-show-12345"
ACCOUNT = {"PYROCKET_ACCESS_KEY": ACCESS_KEY, "PYROCKET_SECRET_KEY": SECRET_KEY}
TRUSTING = ("--tls-ca", str(CERTIFICATE))


@pytest.fixture
def secured(pyrocket, monkeypatch):
    """Run `pyrocket …` for a cluster with TLS and an account. Its output must not contain the secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)

    def run(*arguments, account=ACCOUNT):
        with monkeypatch.context() as environment:
            for name in (*ACCOUNT, "PYROCKET_SECURITY_TOKEN"):
                environment.delenv(name, raising=False)
            for name, value in account.items():
                environment.setenv(name, value)
            code, printed, stderr = pyrocket(*arguments, "-n", cluster.name_server)
        assert SECRET_KEY not in printed + stderr
        assert "Traceback" not in stderr, stderr
        return code, printed, stderr

    with EmbeddedCluster(tls=context, account=(ACCESS_KEY, SECRET_KEY)) as cluster:
        cluster.create_topic("orders", queues=1)
        yield run


def test_a_secured_cluster_is_used_from_the_shell(secured):
    sent, printed, stderr = secured("produce", "orders", "first", "second", *TRUSTING)
    assert (sent, printed) == (0, "2 messages sent to orders\n"), stderr
    code, printed, stderr = secured("consume", "orders", *TRUSTING)
    assert (code, len(printed.splitlines())) == (0, 2), stderr
    member = ("--group", "pyrocket-cli", "--from", "first", "--count", "2")
    code, printed, stderr = secured("consume", "orders", *member, *TRUSTING)
    assert (code, len(printed.splitlines())) == (0, 2), stderr
    code, _, stderr = secured("offsets", "reset", "pyrocket-cli", "orders", "--to", "earliest", "--execute", *TRUSTING)
    assert code == 0, stderr
    _, printed, stderr = secured("offsets", "show", "pyrocket-cli", "orders", "-o", "json", *TRUSTING)
    assert '"committed": 0' in printed, stderr
    assert secured("offsets", "lag", "pyrocket-cli", "--max", "1", *TRUSTING)[0] == 3


@for_each(
    "options, account, reason",
    [
        (("--tls",), ACCOUNT, "certificate verify failed"),
        (("--tls-ca", "no-such.pem"), ACCOUNT, "--tls-ca 'no-such.pem' cannot be used: No such file"),
        (("--tls-ca", ""), ACCOUNT, "--tls-ca '' is empty; it must be a file of certificates in PEM"),
        (("--tls-ca", __file__), ACCOUNT, "it must be a file of certificates in PEM"),
        (TRUSTING, {"PYROCKET_ACCESS_KEY": ACCESS_KEY}, "PYROCKET_SECRET_KEY is missing"),
        (TRUSTING, {"PYROCKET_SECRET_KEY": SECRET_KEY}, "PYROCKET_ACCESS_KEY is missing"),
        (TRUSTING, {**ACCOUNT, "PYROCKET_SECRET_KEY": "wrong"}, "ignature"),
    ],
    ids=["unknown authority", "no file", "empty name", "no certificates", "no secret", "no access key", "wrong secret"],
)
def test_a_missing_part_of_an_account_is_one_sentence(secured, options, account, reason):
    code, _, stderr = secured("offsets", "show", "some-group", "orders", *options, account=account)
    assert code not in (0, 3)
    assert reason in stderr, stderr


def test_help_names_the_variables_of_an_account(secured):
    for command in (("consume",), ("produce",), ("offsets", "reset")):
        assert "PYROCKET_ACCESS_KEY" in secured(*command, "--help")[1]


@pytest.mark.slow("starts programs")
def test_only_brokers_at_allowed_addresses_are_connected_to(secured):
    def produce(allowed):
        code, _, stderr = secured("produce", "orders", "one", *TRUSTING, "--allowed-addresses", allowed)
        return code, stderr

    code, stderr = produce("10.0.0.0/8,broker-a")
    assert code == 1
    assert "allowed_addresses=['10.0.0.0/8', 'broker-a'] has no such address" in stderr
    assert produce("127.0.0.1,10.0.0.0/8")[0] == 0
    assert produce("10.0.0.1/8")[0] == 2
