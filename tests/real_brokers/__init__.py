"""Real RocketMQ servers and Java clients for tests. Maven downloads their jars into a cache; nothing is installed."""

from tests.real_brokers.cluster import RealBroker, RealCluster, Sent, wait_until
from tests.real_brokers.jars import NEWEST, VERSIONS, CannotRun, check_machine, jars
from tests.real_brokers.programs import JavaConsumer, JavaMachine, JavaMessage, JavaOffsetStore, JavaProducer

__all__ = [
    "NEWEST",
    "VERSIONS",
    "CannotRun",
    "JavaConsumer",
    "JavaMachine",
    "JavaMessage",
    "JavaOffsetStore",
    "JavaProducer",
    "RealBroker",
    "RealCluster",
    "Sent",
    "check_machine",
    "jars",
    "wait_until",
]
