/** What runs from its start until it is closed, several of them in one machine where a test wants that. */
interface Client {
    void start() throws Exception;

    void close();
}
