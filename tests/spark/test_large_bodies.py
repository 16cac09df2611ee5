"""Spark writes and reads the largest bodies that brokers accept (maxMessageSize, 4 MiB)."""

from __future__ import annotations

import hashlib
import random

import pytest

from tests.spark.spark_calls import with_options

LARGEST = 4 * 1024 * 1024


@pytest.mark.versions("5.5.0", "4.9.7")
def test_bodies_of_4_mib_are_written_and_read_back(spark, cluster, names):
    """Uncompressed and compressed bodies return byte for byte."""
    topic = names.topic()
    cluster.create_topic(topic, queues=2)
    noise = random.Random(5)
    compressible = (noise.randbytes(LARGEST // 4) * 4)[:-1]
    bodies = [noise.randbytes(LARGEST), compressible, bytes(LARGEST), b"small"]
    rows = spark.createDataFrame([(bytearray(body),) for body in bodies], "body binary")
    with_options(rows.write, cluster, topic=topic, sendTimeoutMs="30000").mode("append").save()
    frame = with_options(spark.read, cluster, subscribe=topic).load()
    found = frame.selectExpr("length(body) AS size", "sha2(body, 256) AS hash").collect()
    wanted = sorted((len(body), hashlib.sha256(body).hexdigest()) for body in bodies)
    assert sorted((row["size"], row["hash"]) for row in found) == wanted
    largest = frame.where(f"length(body) = {LARGEST - 1}").select("body").first()
    assert hashlib.sha256(largest["body"]).digest() == hashlib.sha256(bodies[1]).digest(), "up to the driver"
