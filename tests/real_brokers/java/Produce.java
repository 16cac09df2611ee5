import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends what commands say:
 * topic, body (base64), count, batch, tags, keys, delayLevel, deliverMs, shardingKey, brokerName + queueId, property.NAME.
 */
public final class Produce implements Client {
    private static final String COMPRESS_TYPE = "rocketmq.message.compressType";

    private final String name;
    private final DefaultMQProducer producer;

    /** The option `client` is the name it gives in its events. */
    Produce(Map<String, String> options) {
        name = options.get("client");
        AclClientRPCHook hook = options.containsKey("accessKey")
            ? new AclClientRPCHook(new SessionCredentials(options.get("accessKey"), options.get("secretKey"))) : null;
        synchronized (Produce.class) {  // a producer reads its kind of compression, a setting of the machine, when it is made
            System.setProperty(COMPRESS_TYPE, options.getOrDefault("compression", "ZLIB"));
            producer = new DefaultMQProducer(options.get("group"), hook);
        }
        producer.setNamesrvAddr(options.get("nameServer"));
        producer.setSendMsgTimeout(10_000);
        if (options.containsKey("instanceName")) {
            producer.setInstanceName(options.get("instanceName"));
        }
        if (options.containsKey("compressAbove")) {
            producer.setCompressMsgBodyOverHowmuch(Integer.parseInt(options.get("compressAbove")));
        }
    }

    @Override
    public void start() throws Exception {
        producer.start();
        Wire.print("started", "client", name);
    }

    @Override
    public void close() {
        producer.shutdown();
        Wire.print("closed", "client", name);
    }

    void send(Map<String, String> command) throws Exception {
        int count = Integer.parseInt(command.getOrDefault("count", "1"));
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            messages.add(message(command));
        }
        List<Object> sent = new ArrayList<>();
        if (Boolean.parseBoolean(command.get("batch"))) {
            sent.add(told(producer.send(messages)));
        } else {
            for (Message message : messages) {
                sent.add(told(send(message, command)));
            }
        }
        Wire.print("sent", "client", name, "messages", sent);
    }

    private SendResult send(Message message, Map<String, String> command) throws Exception {
        if (command.containsKey("shardingKey")) {
            return producer.send(message, new SelectMessageQueueByHash(), command.get("shardingKey"));
        }
        if (command.containsKey("queueId")) {
            return producer.send(message, new MessageQueue(
                command.get("topic"), command.get("brokerName"), Integer.parseInt(command.get("queueId"))));
        }
        return producer.send(message);
    }

    private static Message message(Map<String, String> command) {
        byte[] body = Base64.getDecoder().decode(command.getOrDefault("body", ""));
        Message message = new Message(command.get("topic"), command.get("tags"), command.get("keys"), body);
        if (command.containsKey("delayLevel")) {
            message.setDelayTimeLevel(Integer.parseInt(command.get("delayLevel")));
        }
        if (command.containsKey("deliverMs")) {  // 4.9 has neither the method nor the property
            MessageAccessor.putProperty(message, "TIMER_DELIVER_MS", command.get("deliverMs"));
        }
        command.forEach((name, value) -> {
            if (name.startsWith("property.")) {
                message.putUserProperty(name.substring("property.".length()), value);
            }
        });
        return message;
    }

    private static Map<String, Object> told(SendResult result) {
        MessageQueue queue = result.getMessageQueue();
        return Map.of(
            "status", result.getSendStatus(), "messageId", result.getMsgId(), "offsetMessageId", result.getOffsetMsgId(),
            "brokerName", queue.getBrokerName(), "queueId", queue.getQueueId(), "queueOffset", result.getQueueOffset());
    }
}
