"""What stands here for each name of the Java client: the rows of the page's tables, but for the defaults."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One row: names of Java's, separated by blanks; what there is here, if anything; and what is different."""

    java: str
    here: str = ""
    remark: str = ""


class Table(NamedTuple):
    """One table: the Java classes whose every name has a row in it."""

    classes: tuple[str, ...]
    rows: tuple[Row, ...]


CLIENT = Table(
    ("ClientConfig",),
    (
        Row(
            "setNamesrvAddr",
            "`name_server`",
            "Java, too, takes `NAMESRV_ADDR`; here nothing looks for an address server by HTTP",
        ),
        Row("setClientIP", "`client_ip`"),
        Row(
            "setInstanceName changeInstanceNameToPID",
            "`instance_name`",
            "as in Java `DEFAULT` becomes pid and time, unless the group broadcasts. A name of your own is for one "
            "process only",
        ),
        Row("buildMQClientId", "`PushConsumer.client_id`"),
        Row("setUnitName", "`unit_name`"),
        Row("setUnitMode", "", "no unit mode"),
        Row(
            "setNamespace withNamespace withoutNamespace queueWithNamespace queuesWithNamespace",
            "`namespace`",
            "names are given without it. A consumer's `Message.topic` has it in front (`INST%orders`), Java's has not",
        ),
        Row("setNamespaceV2", "", "only namespaces that are part of the name, as with `setNamespace`"),
        Row(
            "setUseTLS",
            "`tls`",
            "`True` verifies the server's certificate; Java only with `tls.test.mode.enable=false` and "
            "`tls.client.authServer=true`. An `ssl.SSLContext` stands for the properties `tls.client.*`",
        ),
        Row("setMqClientApiTimeout", "`call_timeout_s`", "s, not ms"),
        Row("setHeartbeatBrokerInterval", "`heartbeat_interval_s`", "s, not ms"),
        Row("setPollNameServerInterval", "`route_refresh_interval_s`", "s, not ms"),
        Row("setPersistConsumerOffsetInterval", "`commit_interval_s`", "s, not ms"),
        Row("setPullTimeDelayMillsWhenException", "`pull_retry_delay_s`", "s, not ms"),
        Row(
            "setSendLatencyEnable setStartDetectorEnable setDetectTimeout setDetectInterval",
            "",
            "nothing to set: a broker that failed is passed over for 1 s, then longer, up to 30 s, where there is "
            "another",
        ),
        Row("setDecodeReadBody setDecodeDecompressBody", "`Message.body`", "unpacked when it is first asked for"),
        Row("setClientCallbackExecutorThreads", "", "callbacks of futures run on one thread"),
        Row(
            "setEnableTrace setTraceTopic setTraceMsgBatchNum setAccessChannel",
            "",
            "no message trace yet; events and `PushConsumer.progress()` tell what happens",
        ),
        Row(
            "setUseHeartbeatV2 setEnableConcurrentHeartbeat setConcurrentHeartbeatThreadPoolSize "
            "setEnableHeartbeatChannelEventListener",
            "",
            "nothing to set: heartbeats go to all brokers side by side",
        ),
        Row("setVipChannelEnabled", "", "the broker's second port is never used"),
        Row("setSocksProxyConfig", "", "no proxies"),
        Row("setLanguage", "", "brokers are told PYTHON"),
        Row("setEnableStreamRequestType setMaxPageSizeInGetMetadata", "", "not needed"),
        Row(
            "cloneClientConfig resetClientConfig",
            "`ConsumerConfig`, `ProducerConfig`",
            "frozen: `dataclasses.replace(config, …)` makes another, `PushConsumer(config=…)` takes it",
        ),
    ),
)

CONSUMER = Table(
    ("DefaultMQPushConsumer", "ConsumeFromWhere", "MessageModel"),
    (
        Row("setConsumerGroup", "`group`", "the first argument; it must be given"),
        Row(
            "RPCHook",
            "`access_key`, `secret_key`, `security_token`",
            "for `AclClientRPCHook`; hooks of your own have no counterpart",
        ),
        Row("setMessageModel", "`message_model`"),
        Row("CLUSTERING BROADCASTING", '`"clustering"`, `"broadcasting"`'),
        Row("LITE_SELECTIVE", "", "no lite topics"),
        Row(
            "setConsumeFromWhere",
            "`consume_from`",
            "where a queue begins is stored before its first message is pulled, so that a restart changes nothing",
        ),
        Row("CONSUME_FROM_LAST_OFFSET CONSUME_FROM_FIRST_OFFSET", '`"last"`, `"first"`'),
        Row(
            "setConsumeTimestamp CONSUME_FROM_TIMESTAMP",
            "`consume_from`",
            "an aware `datetime` or its text, `2026-11-21T08:00:00Z`; Java's is local time without a zone",
        ),
        Row(
            "CONSUME_FROM_MIN_OFFSET CONSUME_FROM_MAX_OFFSET "
            "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
            "",
            "deprecated in Java, and not there",
        ),
        Row(
            "setMessageListener registerMessageListener",
            "`PushConsumer.subscribe()`",
            "a function, one for each topic; it needs no base class",
        ),
        Row("isConsumeOrderly", "`orderly`", "in Java the kind of listener decides"),
        Row(
            "subscribe setSubscription",
            "`PushConsumer.subscribe(selector=…)`",
            "tags as in Java; `sql(…)` for `MessageSelector.bySql`. Before or after the start",
        ),
        Row("unsubscribe", "`PushConsumer.unsubscribe()`"),
        Row(
            "start shutdown",
            "`PushConsumer.start()`, `PushConsumer.close()`",
            "or `with PushConsumer(…) as consumer:`",
        ),
        Row(
            "setAwaitTerminationMillisWhenShutdown",
            "`shutdown_timeout_s`",
            "s, not ms. Java by default does not wait for listeners that run",
        ),
        Row(
            "suspend resume isPause",
            "`PushConsumer.pause()`, `PushConsumer.resume()`, `QueueProgress.paused`",
            "all queues, or some; what has been pulled is still consumed",
        ),
        Row(
            "setConsumeThreadMin setConsumeThreadMax updateCorePoolSize setAdjustThreadPoolNumsThreshold",
            "`consume_threads`",
            "one number; for `async def` listeners the calls at once",
        ),
        Row(
            "setConsumeMessageBatchMaxSize",
            "`listener_batch_size`",
            "1: the listener takes a message, not a list of one",
        ),
        Row("setPullBatchSize", "`pull_batch_size`", "also `{topic: n}`"),
        Row("setPullBatchSizeInBytes", "", "the broker decides (256 KiB, `maxTransferBytesOnMessageInMemory`)"),
        Row("setPullInterval", "", "pulls follow each other while there is room"),
        Row(
            "setPullThresholdForQueue setPullThresholdForTopic",
            "`max_cached_messages`",
            "for a queue; also `{topic: n}`, for each queue of this topic",
        ),
        Row(
            "setPullThresholdSizeForQueue setPullThresholdSizeForTopic",
            "`max_cached_bytes`",
            "bytes, not MiB, and for the whole consumer, not for a queue; also `{topic: n}`",
        ),
        Row("setConsumeConcurrentlyMaxSpan", "`max_span`"),
        Row("setPostSubscriptionWhenPull", "", "not needed: brokers know what is subscribed to from heartbeats"),
        Row("setMaxReconsumeTimes", "`max_reconsume_times`", "Java's −1 is to leave it out"),
        Row("setSuspendCurrentQueueTimeMillis", "`Suspend(for_s=…)`", "returned by the listener; s, not ms"),
        Row(
            "setConsumeTimeout",
            "`consume_timeout_s`",
            "s, not minutes; the event `message-stuck` tells, too",
        ),
        Row(
            "setAllocateMessageQueueStrategy",
            "`allocation`",
            "a name or a function; members in Java must use the same",
        ),
        Row("setOffsetStore", "`offset_store`"),
        Row(
            "setMessageQueueListener",
            "`on_event`",
            "kinds `queue-assigned` and `queue-revoked`, a call for each queue",
        ),
        Row("sendMessageBack", "`Retry(delay_level=…)`", "returned by the listener"),
        Row("registerConsumeMessageHook", "", "wrap the listener"),
        Row("createTopic", "`Admin.create_topic()`"),
        Row("fetchSubscribeMessageQueues minOffset maxOffset", "`Admin.topic_offsets()`", "all queues at once"),
        Row("searchOffset", "`Admin.plan_reset(to=…)`", "a plan shows the offset of a time, and moves nothing"),
        Row(
            "earliestMsgStoreTime queryMessage viewMessage",
            "`pyrocket consume`",
            "by place (`--queue`, `--offset`) or time, not by key or id; for those `mqadmin`",
        ),
        Row(
            "setClientRebalance setPopInvisibleTime setPopBatchNums setPopThresholdForQueue",
            "",
            "no POP: members share the queues out among themselves",
        ),
        Row("getDefaultMQPushConsumerImpl getTraceDispatcher", "", "internals"),
    ),
)

LISTENER = Table(
    (
        "ConsumeConcurrentlyStatus", "ConsumeOrderlyStatus", "ConsumeConcurrentlyContext", "ConsumeOrderlyContext",
    ),
    (
        Row(
            "CONSUME_SUCCESS SUCCESS",
            "`None`, `ConsumeResult.SUCCESS`",
            "a listener that returns nothing has consumed; in Java `null` means again later",
        ),
        Row("RECONSUME_LATER", "`ConsumeResult.RETRY`", "or raise; what is returned and means nothing is a RETRY, too"),
        Row(
            "SUSPEND_CURRENT_QUEUE_A_MOMENT setSuspendCurrentQueueTimeMillis",
            "`Suspend(for_s=…)`",
            "or raise, or `ConsumeResult.RETRY`: after 1 s",
        ),
        Row(
            "COMMIT ROLLBACK setAutoCommit",
            "`ConsumeResult.COMMIT`, `ConsumeResult.ROLLBACK`, `auto_commit`",
            "of the consumer, not of a call; `auto_commit=False` needs `orderly=True`",
        ),
        Row("setDelayLevelWhenNextConsume", "`Retry(delay_level=…)`", "the same levels, −1 included"),
        Row(
            "setAckIndex",
            "`Retry(messages=…)`",
            "the messages of the batch that failed, wherever they are in it",
        ),
        Row("getMessageQueue", "`ConsumeContext.queue`", "the listener's second parameter, if it has one"),
    ),
)

PRODUCER = Table(
    ("DefaultMQProducer", "TransactionMQProducer", "SendStatus", "LocalTransactionState"),
    (
        Row("setProducerGroup", "`group`"),
        Row("RPCHook", "`access_key`, `secret_key`, `security_token`", "as for consumers"),
        Row("start shutdown", "`Producer.start()`, `Producer.close()`", "the first message starts it, too"),
        Row(
            "send sendDirect",
            "`Producer.send()`, `Producer.send_async()`, `Producer.send_batch()`",
            "with `SendCallback`: `send_async`, which returns a future; with a collection: `send_batch`; with a "
            "`MessageQueue`: `queue=`; with `SelectMessageQueueByHash` and a String: `sharding_key=`, the same queue",
        ),
        Row("sendOneway", "`Producer.send_oneway()`"),
        Row(
            "SEND_OK FLUSH_DISK_TIMEOUT FLUSH_SLAVE_TIMEOUT SLAVE_NOT_AVAILABLE",
            "`SendResult.status`, `SendStatus.OK`, `SendStatus.FLUSH_DISK_TIMEOUT`, `SendStatus.FLUSH_SLAVE_TIMEOUT`, "
            "`SendStatus.SLAVE_NOT_AVAILABLE`",
        ),
        Row("setSendMsgTimeout", "`send_timeout_s`", "s, not ms; all attempts together"),
        Row(
            "setSendMsgMaxTimeoutPerRequest",
            "`call_timeout_s`",
            "with another broker to go to, at most half of what is left",
        ),
        Row(
            "setRetryTimesWhenSendFailed setRetryTimesWhenSendAsyncFailed",
            "`send_attempts`",
            "all attempts, the first included, sync or not. Only those count that may have stored the message; what "
            "was refused is tried again until the timeout",
        ),
        Row(
            "addRetryResponseCode getRetryResponseCodes",
            "",
            "fixed; see [the reference](reference.md#what-a-producer-takes)",
        ),
        Row(
            "setRetryAnotherBrokerWhenNotStoreOK",
            "`accept_degraded`",
            "the other way round: Java's `true` is `accept_degraded=False`",
        ),
        Row("setMaxMessageSize", "`max_message_bytes`"),
        Row("setCompressMsgBodyOverHowmuch", "`compress_above_bytes`"),
        Row("setCompressType setCompressLevel getCompressor", "`compression`", "no levels"),
        Row(
            "setCreateTopicKey setDefaultTopicQueueNums",
            "`auto_create_topic`",
            "**off**: a topic that does not exist is `RouteNotFound`, where Java has the broker create it",
        ),
        Row("createTopic", "`Admin.create_topic()`"),
        Row(
            "setEnableBackpressureForAsyncMode setBackPressureForAsyncSendNum setBackPressureForAsyncSendSize",
            "`max_in_flight_messages`, `max_in_flight_bytes`",
            "always on",
        ),
        Row(
            "setAutoBatch batchMaxBytes batchMaxDelayMs totalBatchMaxBytes sendByAccumulator",
            "`Producer.send_batch()`",
            "nothing is held back to be sent together: many `send_async` share a connection, `send_batch` a request",
        ),
        Row("setCallbackExecutor setAsyncSenderExecutor", "", "callbacks of futures run on one thread of the producer"),
        Row(
            "setSendLatencyFaultEnable setLatencyMax setNotAvailableDuration",
            "",
            "nothing to set: a broker that failed is passed over for 1 s, then longer, up to 30 s, where there is "
            "another",
        ),
        Row("setSendMessageWithVIPChannel", "", "the broker's second port is never used"),
        Row("fetchPublishMessageQueues minOffset maxOffset", "`Admin.topic_offsets()`"),
        Row("searchOffset", "`Admin.plan_reset(to=…)`", "as for consumers"),
        Row("earliestMsgStoreTime queryMessage viewMessage", "`pyrocket consume`", "as for consumers"),
        Row("request", "", "no request and reply: send, and subscribe to a topic of answers"),
        Row("recallMessage", "", "a message with `deliver_at` cannot be taken back"),
        Row("sendMessageInTransaction", "`TransactionProducer.send_in_transaction()`"),
        Row(
            "setTransactionListener setTransactionCheckListener",
            "`TransactionProducer.send_in_transaction(run=…)`, `TransactionProducer(check=…)`",
            "`executeLocalTransaction` is `run`, given with each message; `checkLocalTransaction` is `check`",
        ),
        Row(
            "COMMIT_MESSAGE ROLLBACK_MESSAGE UNKNOW",
            "`TransactionState.COMMIT`, `TransactionState.ROLLBACK`, `TransactionState.UNKNOWN`",
            "what is none of these is UNKNOWN. When `run` raises, that is raised, and `check` is asked later",
        ),
        Row("setTopics", "`TransactionProducer(topics=…)`", "a plain producer needs none"),
        Row(
            "setCheckThreadPoolMinSize setCheckThreadPoolMaxSize setCheckRequestHoldMax setExecutorService",
            "",
            "`check` runs on one thread; at most 1,000 wait",
        ),
        Row(
            "getDefaultMQProducerImpl getTraceDispatcher initProduceAccumulator "
            "setBackPressureForAsyncSendNumInsideAdjust setBackPressureForAsyncSendSizeInsideAdjust "
            "acquireBackPressureForAsyncSendNumLock releaseBackPressureForAsyncSendNumLock "
            "acquireBackPressureForAsyncSendSizeLock releaseBackPressureForAsyncSendSizeLock",
            "",
            "internals",
        ),
    ),
)

EXCEPTIONS = Table(
    ("exceptions",),
    (
        Row(
            "MQClientException",
            "`ConfigError`, `RouteNotFound`, `ConsumerClosed`, `SendError`",
            "an argument; no such topic; not running; every attempt to send failed",
        ),
        Row(
            "MQBrokerException",
            "`BrokerError`, `PermissionDenied`, `FlowControl`",
            "`code` and `remark` are the broker's; from a send it is `SendError`, which has the text of every attempt",
        ),
        Row("RemotingException", "`RocketError`", "the base of all of them"),
        Row("RemotingConnectException", "`ConnectError`"),
        Row("RemotingSendRequestException", "`ConnectionLost`"),
        Row("RemotingTimeoutException", "`RequestTimeout`", "from a send these two are `SendError`, too"),
        Row("RemotingTooMuchRequestException", "`SendError`", "no room within the timeout"),
        Row("RequestTimeoutException", "", "of `request`, which is not there"),
    ),
)

TABLES = {
    "client": CLIENT, "consumer": CONSUMER, "listener": LISTENER, "producer": PRODUCER, "exceptions": EXCEPTIONS,
}  # fmt: skip

ONLY_HERE = (
    "allowed_addresses", "connect_timeout_s", "max_frame_bytes", "max_body_bytes", "rebalance_interval_s",
    "start_wait_s", "pull_hold_s", "offset_store_dir", "durability", "on_unreadable_store", "remote_reset",
    "reset_record_interval_s", "server_messages", "order_by",
)  # fmt: skip
"""Options that no setter of Java's is for."""
