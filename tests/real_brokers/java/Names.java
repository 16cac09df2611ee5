import java.beans.Introspector;
import java.lang.reflect.Constructor;
import java.lang.reflect.Executable;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/** What users of the Java client write: public names of its classes, with the defaults of what can be set. */
public final class Names {
    private static final String CLIENT = "org.apache.rocketmq.client.";
    private static final List<String> CLASSES = List.of(
        CLIENT + "ClientConfig",
        CLIENT + "consumer.DefaultMQPushConsumer",
        CLIENT + "producer.DefaultMQProducer",
        CLIENT + "producer.TransactionMQProducer",
        CLIENT + "consumer.listener.ConsumeConcurrentlyContext",
        CLIENT + "consumer.listener.ConsumeOrderlyContext");
    private static final List<String> ENUMS = List.of(
        CLIENT + "consumer.listener.ConsumeConcurrentlyStatus",
        CLIENT + "consumer.listener.ConsumeOrderlyStatus",
        CLIENT + "producer.LocalTransactionState",
        CLIENT + "producer.SendStatus",
        "org.apache.rocketmq.common.consumer.ConsumeFromWhere",
        "org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel");
    private static final String EXCEPTIONS = "org.apache.rocketmq.remoting.exception.Remoting";
    private static final List<String> SUBCLASSES = List.of("Connect", "SendRequest", "Timeout", "TooMuchRequest");

    public static void main(String[] arguments) throws Exception {
        Map<String, Map<String, Object>> names = new LinkedHashMap<>();
        Map<String, Object> exceptions = new TreeMap<>();
        for (String name : CLASSES) {
            Class<?> type = Class.forName(name);
            names.put(type.getSimpleName(), methods(type));
            for (Constructor<?> constructor : type.getConstructors()) {
                addThings(constructor, names.get(type.getSimpleName()));
            }
            for (Method method : type.getMethods()) {
                addThrown(method, exceptions);
            }
            for (Constructor<?> constructor : type.getConstructors()) {
                addThrown(constructor, exceptions);
            }
        }
        for (String name : SUBCLASSES) {
            exceptions.put(Class.forName(EXCEPTIONS + name + "Exception").getSimpleName(), null);
        }
        for (String name : ENUMS) {
            Map<String, Object> constants = new LinkedHashMap<>();
            Class<?> type = Class.forName(name);
            for (Object each : type.getEnumConstants()) {
                constants.put(((Enum<?>) each).name(), null);
            }
            names.put(type.getSimpleName(), constants);
        }
        names.put("exceptions", exceptions);
        Wire.print("names", "of", names);
        System.exit(0);
    }

    /** The classes of its own that a constructor takes, for what only a constructor can be given. */
    private static void addThings(Constructor<?> constructor, Map<String, Object> names) {
        for (Class<?> type : constructor.getParameterTypes()) {
            String name = type.getSimpleName();
            boolean known = names.containsKey("set" + name) || names.containsKey("get" + name);
            if (type.getName().startsWith("org.apache.rocketmq.") && !known) {
                names.put(name, null);
            }
        }
    }

    private static void addThrown(Executable method, Map<String, Object> exceptions) {
        for (Class<?> type : method.getExceptionTypes()) {
            if (type.getName().startsWith("org.apache.rocketmq.")) {
                exceptions.put(type.getSimpleName(), null);
            }
        }
    }

    /** Methods by name, with the default of what they set; without those of parents, and what only reads that. */
    private static Map<String, Object> methods(Class<?> type) throws ReflectiveOperationException {
        Object instance = Arrays.stream(type.getConstructors()).anyMatch(each -> each.getParameterCount() == 0)
            ? type.getConstructor().newInstance() : null;
        Map<String, Object> found = new TreeMap<>();
        Map<String, Method> readers = new TreeMap<>();
        for (Method method : type.getDeclaredMethods()) {
            if (Modifier.isPublic(method.getModifiers()) && !isOfParent(type, method) && !method.isSynthetic()) {
                String property = property(method);
                if (property == null) {
                    found.put(method.getName(), null);
                } else {
                    readers.put(property, method);
                }
            }
        }
        for (Map.Entry<String, Method> reader : readers.entrySet()) {
            String setter = "set" + reader.getKey();
            String other = Introspector.decapitalize(reader.getKey());
            String name = found.containsKey(setter) ? setter : found.containsKey(other) ? other : null;
            if (name == null) {
                found.put(reader.getValue().getName(), null);
            } else if (instance != null) {
                found.put(name, text(reader.getValue().invoke(instance)));
            }
        }
        return found;
    }

    private static boolean isOfParent(Class<?> type, Method method) {
        return method.getDeclaringClass() == Object.class
            || List.of("toString", "equals", "hashCode").contains(method.getName())
            || Arrays.stream(type.getSuperclass().getMethods()).anyMatch(each -> each.getName().equals(method.getName()));
    }

    /** What a method reads, null if it does something else. */
    private static String property(Method method) {
        String name = method.getName();
        int prefix = name.startsWith("get") ? 3 : name.startsWith("is") ? 2 : 0;
        return prefix > 0 && method.getParameterCount() == 0 ? name.substring(prefix) : null;
    }

    private static String text(Object value) {
        if (value instanceof long[]) {
            return Arrays.toString((long[]) value);
        }
        boolean plain = value == null || value instanceof String || value instanceof Number || value instanceof Boolean
            || value instanceof Enum || value instanceof Iterable || value instanceof Map;
        return plain ? String.valueOf(value) : value.getClass().getSimpleName();
    }
}
