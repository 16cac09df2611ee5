import java.io.IOException;
import java.util.Arrays;

/** Runs a main class for as long as whoever started it lives: standard input ends with the parent, however that dies. */
public final class WithParent {
    public static void main(String[] arguments) throws Throwable {
        Thread watch = new Thread(WithParent::haltAtEndOfInput, "with-parent");
        watch.setDaemon(true);
        watch.start();
        String[] rest = Arrays.copyOfRange(arguments, 1, arguments.length);
        try {
            Class.forName(arguments[0]).getMethod("main", String[].class).invoke(null, (Object) rest);
        } catch (java.lang.reflect.InvocationTargetException error) {
            throw error.getCause();
        }
    }

    private static void haltAtEndOfInput() {
        try {
            while (System.in.read() >= 0) {
                // whatever is written to us has no meaning
            }
        } catch (IOException ended) {
            // the same as its end
        }
        Runtime.getRuntime().halt(9);
    }
}
