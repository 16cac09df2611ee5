import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CyclicBarrier;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.store.LocalFileOffsetStore;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * The Java side of benchmarks/offset_persist.py: the client's own LocalFileOffsetStore, controlled by lines on standard input.
 * "open Q T" fills a store of Q queues and starts T threads; "one N" lets each thread update and persist N times, "all N" the first
 * of them the whole table N times. Each is answered by the nanoseconds it took, and those of each operation of "one".
 */
public final class OffsetPersistBench {
    private static LocalFileOffsetStore store;
    private static MessageQueue[] queues;
    private static Set<MessageQueue> everything;
    private static int threads;
    private static volatile int operations;
    private static long[][] each;
    private static CyclicBarrier start;
    private static CyclicBarrier end;

    public static void main(String[] arguments) throws Exception {
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        int stores = 0;
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            String[] words = line.split(" ");
            long began = System.nanoTime();
            each = new long[0][];
            switch (words[0]) {
                case "open":
                    open("bench" + stores++, Integer.parseInt(words[1]), Integer.parseInt(words[2]));
                    break;
                case "one":
                    operations = Integer.parseInt(words[1]);
                    each = new long[threads][operations];
                    began = System.nanoTime();
                    if (threads == 1) {
                        persist(0, operations);
                    } else {
                        start.await();
                        end.await();
                    }
                    break;
                case "all":
                    for (int n = Integer.parseInt(words[1]); n > 0; n--) {
                        for (MessageQueue queue : queues) {
                            store.updateOffset(queue, next(), false);
                        }
                        store.persistAll(everything);
                    }
                    break;
                default:
                    throw new IllegalArgumentException(line);
            }
            StringBuilder answer = new StringBuilder().append(System.nanoTime() - began);
            for (long[] ofThread : each) {
                for (long nanoseconds : ofThread) {
                    answer.append(' ').append(nanoseconds);
                }
            }
            System.out.println(answer);
        }
        Runtime.getRuntime().halt(0);
    }

    private static void open(String instance, int count, int threadCount) throws Exception {
        ClientConfig config = new ClientConfig();
        config.setClientIP("127.0.0.1");
        config.setInstanceName(instance);
        config.setNamesrvAddr("127.0.0.1:1");
        MQClientInstance client = MQClientManager.getInstance().getOrCreateMQClientInstance(config);
        store = new LocalFileOffsetStore(client, "bench");
        store.load();
        queues = new MessageQueue[count];
        everything = new HashSet<>();
        for (int n = 0; n < count; n++) {
            queues[n] = new MessageQueue("topic-" + n / 64, "broker-a", n % 64);
            store.updateOffset(queues[n], next(), false);
            everything.add(queues[n]);
        }
        store.persistAll(everything);
        threads = threadCount;
        if (threads == 1) {
            return;
        }
        start = new CyclicBarrier(threads + 1);
        end = new CyclicBarrier(threads + 1);
        CyclicBarrier ownStart = start;
        CyclicBarrier ownEnd = end;
        for (int t = 0; t < threads; t++) {
            int number = t;
            Thread thread = new Thread(() -> {
                try {
                    while (true) {
                        ownStart.await();
                        persist(number, operations);
                        ownEnd.await();
                    }
                } catch (Exception error) {
                    throw new IllegalStateException(error);
                }
            });
            thread.setDaemon(true);
            thread.start();
        }
    }

    private static final Map<Integer, Integer> PLACES = new HashMap<>();
    private static long value = 1_000_000_000L;

    private static synchronized long next() {
        return ++value;
    }

    /** The queues are dealt to the threads in turn, as on the Python side. */
    private static void persist(int number, int count) {
        int place;
        synchronized (PLACES) {
            place = PLACES.getOrDefault(number, number);
        }
        for (int n = 0; n < count; n++) {
            MessageQueue queue = queues[place % queues.length];
            long began = System.nanoTime();
            store.updateOffset(queue, next(), false);
            store.persist(queue);
            each[number][n] = System.nanoTime() - began;
            place += threads;
        }
        synchronized (PLACES) {
            PLACES.put(number, place);
        }
    }
}
