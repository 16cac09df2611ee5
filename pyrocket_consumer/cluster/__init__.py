"""Typed calls to name servers and brokers, routes, and heartbeats. Each consumer or producer has one Cluster."""

from pyrocket_consumer.cluster.broker import Broker
from pyrocket_consumer.cluster.client import ClusterEvents, ClusterState
from pyrocket_consumer.cluster.cluster import Cluster
from pyrocket_consumer.cluster.names import local_ip, make_client_id

__all__ = ["Broker", "Cluster", "ClusterEvents", "ClusterState", "local_ip", "make_client_id"]
