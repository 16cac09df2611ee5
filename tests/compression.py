"""Messages of other producers: compressed in any way, and with any sysFlag."""

from __future__ import annotations

import zlib

import lz4.frame
import zstandard

from pyrocket_consumer.cluster import Cluster, make_client_id
from pyrocket_consumer.config import ClientConfig
from pyrocket_consumer.protocol.command import SendMessageHeader
from tests.consuming import WAIT_S

ZLIB, LZ4, ZSTD = 0x301, 0x101, 0x201
COMPRESSED = {ZLIB: zlib.compress, LZ4: lz4.frame.compress, ZSTD: zstandard.compress}


def send(cluster, topic, *bodies, sys_flag=0, queue_id=0):
    """Send bodies unchanged to one queue, with any sysFlag."""
    config = ClientConfig(name_server=cluster.name_server)
    with_cluster = Cluster(config, make_client_id(config))
    with_cluster.start()
    try:
        for body in bodies:
            header = SendMessageHeader(
                producer_group="stranger",
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue_id,
                sys_flag=sys_flag,
                born_timestamp=0,
                flag=0,
                properties="",
                reconsume_times=0,
                unit_mode=False,
                max_reconsume_times=0,
                batch=False,
                broker_name="broker-a",
            )

            async def sent(header=header, body=body):
                await with_cluster.routes.get(topic)
                await with_cluster.broker("broker-a").send(header, body)

            with_cluster.run(sent(), WAIT_S)
    finally:
        with_cluster.close()
