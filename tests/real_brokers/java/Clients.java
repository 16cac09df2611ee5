import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Many clients in one virtual machine, for starting a machine takes longer than most tests. Commands on standard input,
 * one a line, say what to `do`, and the name of the `client` it is about, which is in all events of that client:
 * Consume and Produce with the options of these classes, send, close, and mqadmin with its `arguments`, one a line.
 */
public final class Clients {
    private static final Map<String, Client> RUNNING = new ConcurrentHashMap<>();
    private static final AtomicInteger ENDING = new AtomicInteger();

    public static void main(String[] arguments) throws Exception {
        // A 5.x consumer whose first heartbeat comes while another of its own is under way looks for queues 20 s later.
        System.setProperty("rocketmq.client.rebalance.waitInterval", "2000");
        System.setProperty("rocketmq.client.rebalance.minInterval", "100");
        ExecutorService threads = Executors.newCachedThreadPool();
        Thread hurry = new Thread(Clients::hurry, "hurry");
        hurry.setDaemon(true);
        hurry.start();
        Wire.print("started");
        for (Map<String, String> command = Wire.command(); command != null; command = Wire.command()) {
            Map<String, String> told = command;
            threads.execute(() -> {
                int ends = List.of("close", "mqadmin").contains(told.get("do")) ? 1 : 0;
                ENDING.addAndGet(ends);
                try {
                    run(told.get("do"), told.get("client"), told);
                } catch (Throwable error) {
                    Wire.print("failed", "client", told.get("client"), "error", error.toString());
                } finally {
                    ENDING.addAndGet(-ends);
                }
            });
        }
        System.exit(0);
    }

    /** The end of a client waits for a thread that looks every 3 s whether it is to end: interrupted, it looks now. */
    private static void hurry() {
        while (true) {
            if (ENDING.get() > 0) {
                Thread.getAllStackTraces().forEach((thread, stack) -> {
                    if (isIdle(stack)) {
                        thread.interrupt();
                    }
                });
            }
            try {
                Thread.sleep(100);
            } catch (InterruptedException error) {
                return;
            }
        }
    }

    /** Whether this is such a thread, and waits for something to do; a heartbeat of its own is not to be interrupted. */
    private static boolean isIdle(StackTraceElement[] stack) {
        for (int i = 1; i < stack.length; i++) {
            if (stack[i].getClassName().endsWith("NettyEventExecutor")) {
                return stack[i - 1].getMethodName().equals("poll");
            }
        }
        return false;
    }

    private static void run(String what, String name, Map<String, String> command) throws Exception {
        switch (what) {
            case "Consume":
                start(name, new Consume(command));
                break;
            case "Produce":
                start(name, new Produce(command));
                break;
            case "send":
                ((Produce) RUNNING.get(name)).send(command);
                break;
            case "close":
                RUNNING.remove(name).close();
                break;
            case "mqadmin":
                Wire.print("printed", "client", name, "text", mqadmin(command.get("arguments").split("\n")));
                break;
            default:
                throw new IllegalArgumentException(what);
        }
    }

    private static void start(String name, Client client) throws Exception {
        RUNNING.put(name, client);  // before its event, after which it may be given commands
        client.start();
    }

    /** What the command prints, exceptions included. */
    private static synchronized String mqadmin(String[] arguments) throws ReflectiveOperationException {
        for (Field field : MQAdminStartup.class.getDeclaredFields()) {  // commands keep clients that are shut down
            if (field.getType() == List.class) {
                field.setAccessible(true);
                ((List<?>) field.get(null)).clear();
            }
        }
        PrintStream out = System.out;
        PrintStream err = System.err;
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream into = new PrintStream(printed, true, StandardCharsets.UTF_8);
        System.setOut(into);
        System.setErr(into);
        try {
            MQAdminStartup.main0(arguments, null);
        } finally {
            System.setOut(out);
            System.setErr(err);
        }
        return printed.toString(StandardCharsets.UTF_8);
    }
}
