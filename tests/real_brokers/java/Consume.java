import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * A push consumer that tells of every message it consumes and of every change of its queues.
 * A message whose reconsumeTimes are below the option `fail` is asked for again, after `delayLevel` if that is given.
 */
public final class Consume implements Client {
    private final String name;
    private final int fail;
    private final long pauseMs;
    private final int delayLevel;
    private final DefaultMQPushConsumer consumer;
    private volatile boolean closed;

    /** The option `client` is the name it gives in its events. */
    Consume(Map<String, String> options) throws Exception {
        name = options.get("client");
        fail = Integer.parseInt(options.getOrDefault("fail", "0"));
        pauseMs = Long.parseLong(options.getOrDefault("pauseMs", "0"));
        delayLevel = Integer.parseInt(options.getOrDefault("delayLevel", "0"));
        AclClientRPCHook hook = options.containsKey("accessKey")
            ? new AclClientRPCHook(new SessionCredentials(options.get("accessKey"), options.get("secretKey"))) : null;
        consumer =
            new DefaultMQPushConsumer(options.get("group"), hook, strategy(options.getOrDefault("strategy", "AVG")));
        consumer.setNamesrvAddr(options.get("nameServer"));
        // The enumeration's package differs between 4 and 5; reached through the getter, both compile.
        consumer.setMessageModel(consumer.getMessageModel().valueOf(options.getOrDefault("model", "CLUSTERING")));
        consumer.setConsumeFromWhere(
            ConsumeFromWhere.valueOf(options.getOrDefault("consumeFrom", "CONSUME_FROM_FIRST_OFFSET")));
        number(options, "pullBatchSize", consumer::setPullBatchSize);
        number(options, "consumeBatchSize", consumer::setConsumeMessageBatchMaxSize);
        number(options, "maxReconsumeTimes", consumer::setMaxReconsumeTimes);
        number(options, "persistIntervalMs", consumer::setPersistConsumerOffsetInterval);
        number(options, "heartbeatIntervalMs", consumer::setHeartbeatBrokerInterval);
        number(options, "routeIntervalMs", consumer::setPollNameServerInterval);
        number(options, "threads", threads -> {
            consumer.setConsumeThreadMin(threads);
            consumer.setConsumeThreadMax(threads);
        });
        if (options.containsKey("instanceName")) {
            consumer.setInstanceName(options.get("instanceName"));
        }
        if (options.containsKey("clientIp")) {
            consumer.setClientIP(options.get("clientIp"));
        }
        for (String topic : options.get("topic").split(",")) {
            if (options.containsKey("sql")) {
                consumer.subscribe(topic, MessageSelector.bySql(options.get("sql")));
            } else {
                consumer.subscribe(topic, options.getOrDefault("selector", "*"));
            }
        }
        if (Boolean.parseBoolean(options.get("orderly"))) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) ->
                consume(messages, context.getMessageQueue())
                    ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                context.setDelayLevelWhenNextConsume(delayLevel);
                return consume(messages, context.getMessageQueue())
                    ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
        }
    }

    @Override
    public void start() throws Exception {
        consumer.start();
        Wire.print("started", "client", name, "clientId", consumer.buildMQClientId());
        Thread watch = new Thread(this::watchQueues, "watch-queues");
        watch.setDaemon(true);
        watch.start();
    }

    @Override
    public void close() {
        closed = true;
        consumer.shutdown();
        Wire.print("closed", "client", name);
    }

    private static AllocateMessageQueueStrategy strategy(String name) {
        switch (name) {
            case "AVG":
                return new AllocateMessageQueueAveragely();
            case "AVG_BY_CIRCLE":
                return new AllocateMessageQueueAveragelyByCircle();
            case "CONSISTENT_HASH":
                return new AllocateMessageQueueConsistentHash();
            default:
                throw new IllegalArgumentException(name);
        }
    }

    private static void number(Map<String, String> options, String name, java.util.function.IntConsumer set) {
        if (options.containsKey(name)) {
            set.accept(Integer.parseInt(options.get(name)));
        }
    }

    private boolean consume(List<MessageExt> messages, MessageQueue queue) {
        boolean success = true;
        for (MessageExt message : messages) {
            boolean consumed = message.getReconsumeTimes() >= fail;
            success &= consumed;
            Wire.print("message", "client", name,
                "topic", message.getTopic(), "brokerName", queue.getBrokerName(), "queueId", message.getQueueId(),
                "queueOffset", message.getQueueOffset(), "messageId", message.getMsgId(), "tags", message.getTags(),
                "keys", message.getKeys(), "reconsumeTimes", message.getReconsumeTimes(), "consumed", consumed,
                "flag", message.getFlag(), "sysFlag", message.getSysFlag(),
                "body", Base64.getEncoder().encodeToString(message.getBody()), "properties", message.getProperties());
        }
        if (pauseMs > 0) {
            try {
                Thread.sleep(pauseMs);
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
            }
        }
        return success;
    }

    private void watchQueues() {
        TreeSet<MessageQueue> told = null;
        while (!closed) {
            TreeSet<MessageQueue> held = new TreeSet<>(
                consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet());
            if (!held.equals(told)) {
                List<Object> queues = new ArrayList<>();
                for (MessageQueue queue : held) {
                    queues.add(List.of(queue.getTopic(), queue.getBrokerName(), queue.getQueueId()));
                }
                Wire.print("queues", "client", name, "queues", queues);
                told = held;
            }
            try {
                Thread.sleep(50);
            } catch (InterruptedException error) {
                return;
            }
        }
    }
}
