import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;

/** How these programs speak with the tests: query strings come in, one JSON object a line goes out. */
final class Wire {
    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    private static final BufferedReader IN =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

    private Wire() {
    }

    /** The next command as name -> value, null when the tests are done with us. */
    static Map<String, String> command() throws IOException {
        String line = IN.readLine();
        return line == null ? null : parse(line);
    }

    static Map<String, String> parse(String query) {
        Map<String, String> values = new LinkedHashMap<>();
        for (String pair : query.split("&")) {
            int at = pair.indexOf('=');
            if (at > 0) {
                values.put(decode(pair.substring(0, at)), decode(pair.substring(at + 1)));
            }
        }
        return values;
    }

    private static String decode(String text) {
        return URLDecoder.decode(text, StandardCharsets.UTF_8);
    }

    /** Prints {"event":…, name: value, …}. */
    static void print(String event, Object... namesAndValues) {
        StringBuilder text = new StringBuilder("{\"event\":");
        append(text, event);
        for (int i = 0; i < namesAndValues.length; i += 2) {
            text.append(',');
            append(text, namesAndValues[i]);
            text.append(':');
            append(text, namesAndValues[i + 1]);
        }
        synchronized (OUT) {
            OUT.println(text.append('}'));
        }
    }

    private static void append(StringBuilder text, Object value) {
        if (value == null || value instanceof Number || value instanceof Boolean) {
            text.append(value);
        } else if (value instanceof Iterable) {
            text.append('[');
            String comma = "";
            for (Object each : (Iterable<?>) value) {
                text.append(comma);
                append(text, each);
                comma = ",";
            }
            text.append(']');
        } else if (value instanceof Map) {
            text.append('{');
            String comma = "";
            for (Map.Entry<?, ?> each : ((Map<?, ?>) value).entrySet()) {
                text.append(comma);
                append(text, String.valueOf(each.getKey()));
                text.append(':');
                append(text, each.getValue());
                comma = ",";
            }
            text.append('}');
        } else {
            text.append('"');
            for (char c : value.toString().toCharArray()) {
                if (c == '"' || c == '\\') {
                    text.append('\\').append(c);
                } else if (c < ' ') {
                    text.append(String.format("\\u%04x", (int) c));
                } else {
                    text.append(c);
                }
            }
            text.append('"');
        }
    }
}
