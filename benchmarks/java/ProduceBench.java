import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * The Java side of benchmarks/produce.py: it measures one producer, and prints one JSON object.
 * Arguments are name=value; see produce_side.py for their meaning.
 */
public final class ProduceBench {
    private static final Map<String, String> OPTIONS = new HashMap<>();
    private static final AtomicReference<Throwable> FAILURE = new AtomicReference<>();
    private static final com.sun.management.OperatingSystemMXBean SYSTEM =
        (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    private static DefaultMQProducer producer;
    private static byte[] body;
    private static int inFlight;

    /** Sends the given number of messages, and returns when each has its result. */
    private interface Sends {
        void send(int count) throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        for (String argument : arguments) {
            int at = argument.indexOf('=');
            OPTIONS.put(argument.substring(0, at), argument.substring(at + 1));
        }
        Thread.setDefaultUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);  // the threads of the client would keep the process alive
        });
        body = "x".repeat(number("body_bytes")).getBytes(StandardCharsets.US_ASCII);
        inFlight = number("in_flight");
        producer = new DefaultMQProducer(OPTIONS.get("group"));
        producer.setNamesrvAddr(OPTIONS.get("name_server"));
        producer.setSendMsgTimeout(1000 * number("timeout_s"));
        producer.start();
        Sends sends = OPTIONS.get("measure").equals("async") ? ProduceBench::asynchronously : ProduceBench::oneByOne;
        sends.send(number("warm"));
        int total = number("total");
        long began = System.nanoTime();
        long cpuBefore = SYSTEM.getProcessCpuTime();
        sends.send(total);
        double seconds = (System.nanoTime() - began) / 1e9;
        double cpuS = (SYSTEM.getProcessCpuTime() - cpuBefore) / 1e9;
        System.out.println(String.format(Locale.ROOT,
            "{\"messages\": %d, \"seconds\": %.6f, \"cpu_s\": %.6f, \"rss_peak_mb\": %.1f}", total, seconds, cpuS, peakMb()));
        System.out.flush();
        producer.shutdown();
        Runtime.getRuntime().halt(0);
    }

    private static int number(String name) {
        return Integer.parseInt(OPTIONS.get(name));
    }

    private static Message message() {
        Message message = new Message(OPTIONS.get("topic"), "paid", "k", body);
        message.putUserProperty("region", "eu");
        return message;
    }

    private static void oneByOne(int count) throws Exception {
        for (int n = 0; n < count; n++) {
            check(producer.send(message()));
        }
    }

    private static void asynchronously(int count) throws Exception {
        Semaphore room = new Semaphore(inFlight);
        SendCallback callback = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                check(result);
                room.release();
            }

            @Override
            public void onException(Throwable error) {
                FAILURE.compareAndSet(null, error);
                room.release();
            }
        };
        for (int n = 0; n < count; n++) {
            room.acquire();
            producer.send(message(), callback);
        }
        room.acquire(inFlight);
        if (FAILURE.get() != null) {
            throw new IllegalStateException("a message was not sent", FAILURE.get());
        }
    }

    private static void check(SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            FAILURE.compareAndSet(null, new IllegalStateException(result.toString()));
        }
    }

    private static double peakMb() throws Exception {
        return Files.readAllLines(Path.of("/proc/self/status")).stream().filter(line -> line.startsWith("VmHWM:"))
            .mapToLong(line -> Long.parseLong(line.replaceAll("[^0-9]", ""))).findFirst().orElse(0) / 1024.0;
    }
}
