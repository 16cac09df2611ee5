"""Read and write with the options `tls` and `tlsCaFile`, where name servers and brokers accept TLS only."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from pyrocket_consumer.errors import ConfigError, RocketError
from pyrocket_consumer.model import MessageQueue
from pyrocket_consumer.testing import EmbeddedCluster
from tests.spark.spark_calls import FROM_FIRST, read_batch, running, start_offsets, with_options

CERTIFICATE = Path(__file__).parent / "loopback.pem"  # of 127.0.0.1, self-signed; public, because it contains its key
TRUSTING = {"tls": True, "tlsCaFile": CERTIFICATE}


@pytest.fixture(scope="module")
def secured():
    """A cluster that accepts TLS only, with 20 orders in each of two queues."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with EmbeddedCluster(tls=context) as cluster:
        cluster.create_topic("orders", queues=2)
        cluster.send("orders", lambda number: b"m%d" % number, count=40)
        yield cluster


ORDERS = [(MessageQueue("orders", "broker-a", queue_id), offset) for queue_id in range(2) for offset in range(20)]


@pytest.mark.live
def test_a_batch_and_a_stream(secured):
    assert sorted(read_batch(secured, **TRUSTING)) == ORDERS
    with running(secured, **FROM_FIRST, **TRUSTING) as run:
        assert sorted(run.batch()) == ORDERS
        assert run.batch() is None


@pytest.mark.live
@pytest.mark.parametrize("ask", [start_offsets, read_batch])
def test_an_untrusted_certificate_is_refused(secured, ask):
    """Spark's driver connects first, and gets the reason. So no query starts that reads nothing."""
    with pytest.raises(RocketError, match="(?i)certificate verify failed"):
        ask(secured, **FROM_FIRST, tls=True, retries=1)


@pytest.mark.live
def test_a_file_of_authorities_that_cannot_be_used_is_named(secured, tmp_path):
    (tmp_path / "junk.pem").write_text("junk")
    for file in (tmp_path / "nowhere.pem", tmp_path, tmp_path / "junk.pem"):
        with pytest.raises(ConfigError) as raised:
            read_batch(secured, subscribe="orders", tls=True, tlsCaFile=file)
        assert f"option tlsCaFile={str(file)!r} cannot be used: " in str(raised.value)
        assert "a file of certificates in PEM, here and on every executor" in str(raised.value)


@pytest.mark.live
def test_without_tls_nothing_is_read(secured):
    with pytest.raises(RocketError, match=secured.name_server):
        read_batch(secured, subscribe="orders", requestTimeoutMs=500, retries=1)


def test_written_and_read_by_spark(spark, secured, tmp_path):
    """The driver and the tasks, in separate processes, read the certificate from the options."""
    secured.create_topic("copies", queues=2)
    orders = with_options(spark.readStream, secured, **FROM_FIRST, **TRUSTING).load().select("body")
    to = {**TRUSTING, "topic": "copies"}
    copying = with_options(orders.writeStream, secured, **to, checkpointLocation=tmp_path).trigger(availableNow=True)
    copying.start().awaitTermination()
    more = spark.createDataFrame([("more",)], "body string")
    with_options(more.write.mode("append"), secured, **to).save()
    read = with_options(spark.read, secured, **TRUSTING, subscribe="copies").load()
    assert {bytes(row["body"]) for row in read.collect()} == {b"m%d" % number for number in range(40)} | {b"more"}
    with pytest.raises(PySparkException, match="tlsCaFile='/nowhere.pem' cannot be used: No such file"):
        with_options(more.write.mode("append"), secured, **{**to, "tlsCaFile": "/nowhere.pem"}).save()
