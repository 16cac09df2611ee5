import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.store.LocalFileOffsetStore;
import org.apache.rocketmq.client.consumer.store.ReadOffsetType;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.common.message.MessageQueue;

/** The Java client's own LocalFileOffsetStore, operated by commands on standard input: one operation a line, one answer each. */
public final class OffsetFile {
    public static void main(String[] arguments) throws Exception {
        Map<String, String> options = Wire.parse(arguments[0]);
        ClientConfig config = new ClientConfig();
        config.setClientIP(options.get("clientIp"));
        config.setInstanceName(options.get("instanceName"));
        config.setNamesrvAddr("127.0.0.1:1");
        MQClientInstance instance = MQClientManager.getInstance().getOrCreateMQClientInstance(config);
        LocalFileOffsetStore store = new LocalFileOffsetStore(instance, options.get("group"));
        Wire.print("started", "clientId", instance.getClientId());
        for (Map<String, String> command = Wire.command(); command != null; command = Wire.command()) {
            try {
                run(store, command);
            } catch (Throwable error) {
                Wire.print("failed", "error", error.toString());
            }
        }
        System.exit(0);
    }

    private static void run(LocalFileOffsetStore store, Map<String, String> command) throws Exception {
        Set<MessageQueue> queues = queues(command.getOrDefault("queues", ""));
        switch (command.get("do")) {
            case "load":
                store.load();
                break;
            case "update":
                store.updateOffset(queues.iterator().next(), Long.parseLong(command.get("offset")),
                    Boolean.parseBoolean(command.get("increaseOnly")));
                break;
            case "read":
                Wire.print("done", "offset",
                    store.readOffset(queues.iterator().next(), ReadOffsetType.valueOf(command.get("type"))));
                return;
            case "persist":
                store.persist(queues.iterator().next());
                break;
            case "persistAll":
                store.persistAll(queues);
                break;
            case "remove":
                store.removeOffset(queues.iterator().next());
                break;
            case "table":
                List<Object> table = new ArrayList<>();
                store.cloneOffsetTable(command.get("topic")).forEach((queue, offset) -> table.add(
                    List.of(queue.getTopic(), queue.getBrokerName(), queue.getQueueId(), ((Number) offset).longValue())));
                Wire.print("done", "table", table);
                return;
            default:
                throw new IllegalArgumentException(command.get("do"));
        }
        Wire.print("done");
    }

    /** Queues are written topic,broker,id and joined by spaces. */
    private static Set<MessageQueue> queues(String text) {
        Set<MessageQueue> queues = new HashSet<>();
        for (String each : text.split(" ")) {
            String[] parts = each.split(",");
            if (parts.length == 3) {
                queues.add(new MessageQueue(parts[0], parts[1], Integer.parseInt(parts[2])));
            }
        }
        return queues;
    }
}
