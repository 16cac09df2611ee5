"""The interface of rocketmq-client-python 2.0.0, on top of this package: its names, signatures, results and enums.

from pyrocket_consumer.compat.rocketmq.client import ConsumeStatus, Message, Producer, PushConsumer
"""
