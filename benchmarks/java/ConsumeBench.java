import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Instant;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.atomic.LongAdder;
import java.util.stream.IntStream;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * The Java side of benchmarks/consume.py: it measures one push consumer, and prints one JSON object.
 * Arguments are name=value; measure is backlog, latency or idle; see consume_side.py for their meaning.
 */
public final class ConsumeBench {
    private static final Map<String, String> OPTIONS = new HashMap<>();
    private static final LongAdder COUNT = new LongAdder();
    private static final LongAdder TOUCHED = new LongAdder();
    private static final com.sun.management.OperatingSystemMXBean SYSTEM =
        (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

    /** A sample of the counters: the number of messages, the time, and the CPU time of the process until then. */
    private record Look(long count, long nanos, long cpuNanos) {
        static Look now() {
            return new Look(COUNT.sum(), System.nanoTime(), SYSTEM.getProcessCpuTime());
        }
    }

    public static void main(String[] arguments) throws Exception {
        for (String argument : arguments) {
            int at = argument.indexOf('=');
            OPTIONS.put(argument.substring(0, at), argument.substring(at + 1));
        }
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(OPTIONS.get("group"));
        consumer.setNamesrvAddr(OPTIONS.get("name_server"));
        consumer.setConsumeFromWhere(OPTIONS.get("consume_from").equals("first")
            ? ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET : ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        consumer.setConsumeThreadMin(number("threads"));
        consumer.setConsumeThreadMax(number("threads"));
        consumer.setPullBatchSize(number("pull_batch"));
        consumer.setConsumeMessageBatchMaxSize(number("listener_batch"));
        consumer.setPullThresholdForQueue(number("max_cached"));
        consumer.setConsumeConcurrentlyMaxSpan(number("max_span"));
        consumer.subscribe(OPTIONS.get("topic"), "*");
        String measure = OPTIONS.get("measure");
        Latencies latencies = new Latencies(measure.equals("latency") ? 1 << 20 : 0);
        MessageListenerConcurrently listener = listener(measure.equals("latency") ? "latency" : OPTIONS.get("listener"), latencies);
        if (Boolean.parseBoolean(OPTIONS.get("orderly"))) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                listener.consumeMessage(messages, null);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else {
            consumer.registerMessageListener(listener);
        }
        long startedAt = System.nanoTime();
        consumer.start();
        String result;
        switch (measure) {
            case "backlog":
                result = backlog(Long.parseLong(OPTIONS.get("total")), startedAt);
                break;
            case "latency":
                result = latency(latencies);
                break;
            case "idle":
                result = idle();
                break;
            default:
                throw new IllegalArgumentException(measure);
        }
        System.out.println("{" + result + ", \"rss_mb\": " + memory("VmRSS") + ", \"rss_peak_mb\": " + memory("VmHWM") + "}");
        System.out.flush();
        if (Boolean.parseBoolean(OPTIONS.get("shut_down"))) {
            consumer.shutdown();
        }
        Runtime.getRuntime().halt(0);
    }

    private static int number(String name) {
        return Integer.parseInt(OPTIONS.get(name));
    }

    private static double real(String name) {
        return Double.parseDouble(OPTIONS.get(name));
    }

    private static void sleep(double seconds) throws InterruptedException {
        Thread.sleep((long) (1000 * seconds));
    }

    private static MessageListenerConcurrently listener(String kind, Latencies latencies) {
        switch (kind) {
            case "no-op":
                return (messages, context) -> {
                    COUNT.add(messages.size());
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                };
            case "touch":
                return (messages, context) -> {
                    for (MessageExt message : messages) {
                        TOUCHED.add(message.getBody().length + message.getProperties().size());
                    }
                    COUNT.add(messages.size());
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                };
            case "sleep":
                return (messages, context) -> {
                    try {
                        Thread.sleep(1);
                    } catch (InterruptedException error) {
                        Thread.currentThread().interrupt();
                    }
                    COUNT.add(messages.size());
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                };
            case "latency":
                return (messages, context) -> {
                    long now = Latencies.now();
                    for (MessageExt message : messages) {
                        latencies.add(ByteBuffer.wrap(message.getBody()).getLong(), now);
                    }
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                };
            default:
                throw new IllegalArgumentException(kind);
        }
    }

    /** Takes a sample every 20 ms until all messages are consumed; the result is the part between two fractions. */
    private static String backlog(long total, long startedAt) throws InterruptedException {
        double from = real("from_share");
        double to = real("to_share");
        long deadline = System.nanoTime() + (long) (1e9 * real("timeout_s"));
        List<Look> looks = new ArrayList<>();
        double firstS = -1;
        while (true) {
            Look look = Look.now();
            if (firstS < 0 && look.count > 0) {
                firstS = (look.nanos - startedAt) / 1e9;
            }
            looks.add(look);
            if (look.count >= total) {
                break;
            }
            if (look.nanos > deadline) {
                throw new IllegalStateException("only " + look.count + " of " + total + " messages came");
            }
            Thread.sleep(20);
        }
        Look first = looks.stream().filter(look -> look.count >= from * total).findFirst().orElseThrow();
        Look last = looks.stream().filter(look -> look.count <= to * total).reduce((a, b) -> b).orElseThrow();
        long count = last.count - first.count;
        return String.format(Locale.ROOT, "\"messages\": %d, \"seconds\": %.6f, \"cpu_s\": %.6f, \"first_message_s\": %.3f",
            count, (last.nanos - first.nanos) / 1e9, (last.cpuNanos - first.cpuNanos) / 1e9, firstS);
    }

    private static String latency(Latencies latencies) throws InterruptedException {
        latencies.awaitFirst(real("timeout_s"));
        sleep(real("settle_s"));
        long begin = Latencies.now();
        sleep(real("seconds"));
        long end = Latencies.now();
        sleep(1);
        return latencies.between(begin, end);
    }

    private static String idle() throws InterruptedException {
        sleep(real("settle_s"));
        Look before = Look.now();
        sleep(real("seconds"));
        Look after = Look.now();
        return String.format(Locale.ROOT, "\"seconds\": %.6f, \"cpu_s\": %.6f",
            (after.nanos - before.nanos) / 1e9, (after.cpuNanos - before.cpuNanos) / 1e9);
    }

    private static double memory(String what) throws Exception {
        for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
            if (line.startsWith(what + ":")) {
                return Long.parseLong(line.replaceAll("[^0-9]", "")) / 1024.0;
            }
        }
        return 0;
    }

    /** The send times of messages and the times of their listener calls, in nanoseconds since the epoch. */
    private static final class Latencies {
        private final long[] sent;
        private final long[] called;
        private int count;

        Latencies(int capacity) {
            sent = new long[capacity];
            called = new long[capacity];
        }

        static long now() {
            Instant now = Instant.now();
            return now.getEpochSecond() * 1_000_000_000L + now.getNano();
        }

        synchronized void add(long sentAt, long calledAt) {
            if (count < sent.length) {
                sent[count] = sentAt;
                called[count++] = calledAt;
            }
            notifyAll();
        }

        synchronized void awaitFirst(double timeoutS) throws InterruptedException {
            long deadline = System.nanoTime() + (long) (1e9 * timeoutS);
            while (count == 0) {
                long left = (deadline - System.nanoTime()) / 1_000_000;
                if (left <= 0) {
                    throw new IllegalStateException("no message came");
                }
                wait(left);
            }
        }

        synchronized String between(long begin, long end) {
            long[] taken = IntStream.range(0, count).filter(i -> sent[i] >= begin && sent[i] < end)
                .mapToLong(i -> called[i] - sent[i]).sorted().toArray();
            StringBuilder text = new StringBuilder("\"messages\": " + taken.length);
            for (int percent : new int[] {50, 99}) {
                text.append(String.format(Locale.ROOT, ", \"p%d_ms\": %.4f",
                    percent, taken[(int) (taken.length * (percent / 100.0))] / 1e6));
            }
            return text.toString();
        }
    }
}
