import java.io.IOException;
import java.net.URI;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.Arrays;
import java.util.stream.Collectors;

/**
 * Reads a stream's log or a table's change feed through koldproxy from where it stopped last time, prints every event and
 * remembers the position in a file. Needs the PostgreSQL JDBC driver on the class path.
 *
 * <pre>DATABASE_URL=postgres://… java -cp … Consumer.java stream|feed TABLE POSITION_FILE</pre>
 */
public class Consumer {
    public static void main(String[] args) throws Exception {
        if (args.length != 3 || !(args[0].equals("stream") || args[0].equals("feed"))) {
            System.err.println("usage: DATABASE_URL=postgres://… Consumer stream|feed TABLE POSITION_FILE");
            System.exit(2);
        }
        Path file = Path.of(args[2]);
        String position = Files.exists(file) ? Files.readString(file) : "";
        try (Connection connection = connect(System.getenv("DATABASE_URL"))) {
            while (true) {
                String last = args[0].equals("stream")
                    ? streamPage(connection, args[1], position) : feedPage(connection, args[1], position);
                if (last == null) {
                    return; // caught up
                }
                remember(file, last);
                position = last;
            }
        } catch (SQLException e) {
            System.err.println(e.getMessage() + " (SQLSTATE " + e.getSQLState() + ")");
            System.exit(1);
        }
    }

    /** JDBC has a spelling of its own for connections. */
    static Connection connect(String url) throws SQLException {
        URI u = URI.create(url);
        String[] user = u.getUserInfo().split(":", 2);
        return DriverManager.getConnection("jdbc:postgresql://" + u.getHost() + ":" + u.getPort() + u.getPath(), user[0], user[1]);
    }

    /** Prints the events behind an id and returns the last one's id; null if there were none. */
    static String streamPage(Connection connection, String log, String after) throws SQLException {
        String name = Arrays.stream(log.split("\\.")).map(p -> '"' + p.replace("\"", "\"\"") + '"').collect(Collectors.joining("."));
        String query = "SELECT id, op, k::text, doc::text FROM " + name + " ORDER BY id LIMIT 500" + (after.isEmpty() ? "" : " AFTER (?)");
        try (PreparedStatement statement = connection.prepareStatement(query)) {
            if (!after.isEmpty()) {
                statement.setString(1, after);
            }
            return print(statement.executeQuery());
        }
    }

    /** Prints the changes behind a seq and returns the last one's seq; null if there were none. */
    static String feedPage(Connection connection, String table, String since) throws SQLException {
        String query = "SELECT seq, op, pk::text, coalesce(row_image::text, 'null'), source"
            + " FROM koldstore.changes_since(CAST(? AS regclass), since_seq => ?)";
        try (PreparedStatement statement = connection.prepareStatement(query)) {
            statement.setString(1, table);
            statement.setLong(2, since.isEmpty() ? 0 : Long.parseLong(since));
            return print(statement.executeQuery());
        }
    }

    static String print(ResultSet rows) throws SQLException {
        java.io.PrintStream out = new java.io.PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), false, java.nio.charset.StandardCharsets.UTF_8);
        String last = null;
        while (rows.next()) {
            StringBuilder line = new StringBuilder(rows.getString(1));
            for (int i = 2; i <= rows.getMetaData().getColumnCount(); i++) {
                line.append(' ').append(rows.getString(i));
            }
            out.println(line);
            last = rows.getString(1);
        }
        out.flush();
        return last;
    }

    /** Replaces the file in one step, so that a crash leaves the old position or the new one. */
    static void remember(Path file, String position) throws IOException {
        Path fresh = Path.of(file + ".new");
        Files.writeString(fresh, position);
        Files.move(fresh, file, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
    }
}
