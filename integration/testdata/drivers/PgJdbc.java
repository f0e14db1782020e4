// What an application does through JDBC. Usage and output as of psycopg2_driver.py.

import java.io.StringReader;
import java.io.StringWriter;
import java.sql.*;
import java.util.*;
import java.util.stream.*;
import org.postgresql.PGConnection;
import org.postgresql.PGStatement;
import org.postgresql.copy.CopyManager;

public class PgJdbc {
    static final int PAGE = 7;
    static final String FEED =
            "SELECT seq, op, pk, deleted, row_image, source FROM koldstore.changes_since(?::text::regclass, since_seq => ?, limit_rows => ?)";

    interface Call {
        void run() throws Exception;
    }

    static void show(String name, Object... values) {
        System.out.println(name + " " + Arrays.stream(values).map(v -> v == null ? "NULL" : v.toString()).collect(Collectors.joining("|")));
    }

    static String sqlstate(Call call) throws Exception {
        try {
            call.run();
        } catch (SQLException e) {
            return e.getSQLState();
        }
        return "none";
    }

    static Connection connect(String more) throws Exception {
        Map<String, String> env = System.getenv();
        Properties p = new Properties();
        p.put("user", env.get("PGUSER"));
        p.put("password", env.get("PGPASSWORD"));
        p.put("options", env.getOrDefault("PGOPTIONS", ""));
        return DriverManager.getConnection("jdbc:postgresql://" + env.get("PGHOST") + ":" + env.get("PGPORT") + "/" + env.get("PGDATABASE") + more, p);
    }

    static Object value(Connection db, String sql) throws Exception {
        try (Statement s = db.createStatement(); ResultSet r = s.executeQuery(sql)) {
            r.next();
            return r.getObject(1);
        }
    }

    static void plain() throws Exception {
        Connection db = connect("");
        try (PreparedStatement s = db.prepareStatement("SELECT ?::int + 1, ?::text, ?::numeric, NULL::text")) {
            s.setInt(1, 41);
            s.setString(2, "größe");
            s.setBigDecimal(3, new java.math.BigDecimal("1.50"));
            ResultSet r = s.executeQuery();
            r.next();
            show("bound", r.getObject(1), r.getObject(2), r.getObject(3), r.getObject(4));
        }
        try (PreparedStatement s = db.prepareStatement("SELECT ?::int * 2")) {
            s.unwrap(PGStatement.class).setPrepareThreshold(1); // a named statement, and binary results, from the first run on
            List<Object> doubled = new ArrayList<>();
            for (int i = 1; i <= 3; i++) {
                s.setInt(1, i);
                ResultSet r = s.executeQuery();
                r.next();
                doubled.add(r.getInt(1));
            }
            show("prepared", doubled.toArray());
        }
        try (PreparedStatement s = db.prepareStatement("SELECT ?::bytea")) {
            s.setBytes(1, new byte[] {0, (byte) 0xff, 0x5c, 0x27});
            ResultSet r = s.executeQuery();
            r.next();
            show("bytes", HexFormat.of().formatHex(r.getBytes(1)));
        }
        show("error", sqlstate(() -> value(db, "SELECT 1 / 0")));
        show("syntax", sqlstate(() -> value(db, "SELEC 1")));
        Statement s = db.createStatement();
        db.setAutoCommit(false);
        s.execute("CREATE TEMP TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'a')");
        Savepoint a = db.setSavepoint("a");
        List<Object> states = new ArrayList<>();
        states.add(sqlstate(() -> s.execute("INSERT INTO t VALUES (1, 'b')")));
        states.add(sqlstate(() -> value(db, "SELECT 1")));
        db.rollback(a);
        try (PreparedStatement insert = db.prepareStatement("INSERT INTO t VALUES (?, ?)")) {
            insert.setInt(1, 2);
            insert.setString(2, "b");
            insert.addBatch();
            insert.executeBatch();
        }
        db.commit();
        states.add(value(db, "SELECT count(*) FROM t"));
        show("savepoint", states.toArray());
        s.execute("DELETE FROM t");
        db.rollback();
        show("rollback", value(db, "SELECT count(*) FROM t"));
        CopyManager copy = db.unwrap(PGConnection.class).getCopyAPI();
        copy.copyIn("COPY t FROM STDIN", new StringReader("3\tc\n4\t\\N\n"));
        StringWriter out = new StringWriter();
        copy.copyOut("COPY (SELECT * FROM t ORDER BY id) TO STDOUT (FORMAT csv)", out);
        show("copy", (Object[]) out.toString().split("\n"));
        db.commit();
        try (Statement large = db.createStatement()) {
            large.setFetchSize(1000); // a portal that is executed page by page
            ResultSet r = large.executeQuery("SELECT i FROM generate_series(1, 20000) i");
            long n = 0, sum = 0;
            while (r.next()) {
                n++;
                sum += r.getInt(1);
            }
            show("large", n, sum);
        }
        db.commit();
        db.setAutoCommit(true);
        s.execute("LISTEN news");
        s.execute("NOTIFY news, 'payload'");
        var heard = db.unwrap(PGConnection.class).getNotifications(60000)[0];
        show("notify", heard.getName(), heard.getParameter());
        s.clearWarnings();
        s.execute("DO $$ BEGIN RAISE NOTICE 'hello'; END $$");
        show("notice", s.getWarnings().getMessage());
        Thread stop = new Thread(() -> {
            try {
                Thread.sleep(300);
                s.cancel();
            } catch (Exception e) {
                throw new IllegalStateException(e);
            }
        });
        stop.start();
        show("cancel", sqlstate(() -> s.execute("SELECT pg_sleep(60)")));
        stop.join();
        show("after cancel", value(db, "SELECT 1"));
        db.close();
    }

    static String json(String text) {
        if (text == null) {
            return "null";
        }
        StringBuilder b = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            b.append(c == '"' || c == '\\' ? "\\" + c : c < ' ' ? String.format("\\u%04x", (int) c) : String.valueOf(c));
        }
        return b.append('"').toString();
    }

    static String json(Collection<String> raw) {
        return raw.stream().collect(Collectors.joining(",", "[", "]"));
    }

    static String drain(PreparedStatement feed, String table) throws Exception {
        List<String> rows = new ArrayList<>();
        for (long cursor = 0;;) {
            feed.setString(1, table);
            feed.setLong(2, cursor);
            feed.setInt(3, PAGE);
            int n = 0;
            try (ResultSet r = feed.executeQuery()) {
                for (; r.next(); n++) {
                    cursor = r.getLong(1);
                    rows.add(json(List.of(json(r.getString(1)), r.getString(2), json(r.getString(3)), String.valueOf(r.getBoolean(4)), json(r.getString(5)), json(r.getString(6)))));
                }
            }
            if (n < PAGE) {
                return json(rows);
            }
        }
    }

    static void feed(String table, String stream) throws Exception {
        Map<String, String> out = new LinkedHashMap<>();
        for (String mode : List.of("extended", "simple", "extendedForPrepared", "extendedCacheEverything")) {
            try (Connection db = connect("?preferQueryMode=" + mode)) {
                PreparedStatement feed = db.prepareStatement(FEED);
                feed.unwrap(PGStatement.class).setPrepareThreshold(3); // the first pages without a name, the others with one
                out.put(mode, drain(feed, table));
                db.setAutoCommit(false);
                out.put(mode + " in a transaction", drain(feed, table));
                db.setSavepoint();
                feed.setFetchSize(2);
                out.put(mode + " behind a savepoint, with a fetch size", drain(feed, table));
                db.commit();
            }
        }
        try (Connection db = connect("?autosave=always")) { // a savepoint of the driver's in front of each statement
            db.setAutoCommit(false);
            out.put("autosave", drain(db.prepareStatement(FEED), table));
            db.commit();
        }
        Connection db = connect("");
        Statement s = db.createStatement();
        String name = stream + "_jdbc", bare = table.substring(table.indexOf('.') + 1);
        s.execute("CREATE STREAM " + name + " ON " + bare + " WHEN (id % 2 = 0) WITH (start = 'earliest')");
        s.execute("CREATE STREAM IF NOT EXISTS " + name + " ON " + bare + " WHEN (id > 0)");
        List<String> columns = new ArrayList<>(), shown = new ArrayList<>();
        try (ResultSet r = s.executeQuery("SHOW STREAMS")) {
            for (int i = 1; i <= r.getMetaData().getColumnCount(); i++) {
                columns.add(json(r.getMetaData().getColumnLabel(i)));
            }
            while (r.next()) {
                if (r.getString(1).equals(name)) {
                    shown.add(json(r.getString(3)));
                }
            }
        }
        out.put("columns", json(columns));
        out.put("shown", json(shown));
        String first = value(db, "SELECT id FROM _stream_" + name + " ORDER BY id LIMIT 1").toString();
        out.put("events", value(db, "SELECT count(*) FROM _stream_" + name).toString());
        try (PreparedStatement after = db.prepareStatement("SELECT id, k FROM _stream_" + name + " ORDER BY id LIMIT ? AFTER (?)")) {
            after.setInt(1, 1000);
            after.setString(2, first);
            int n = 0;
            for (ResultSet r = after.executeQuery(); r.next();) {
                n++;
            }
            out.put("after", String.valueOf(n));
        }
        db.setAutoCommit(false);
        s.execute("DROP STREAM " + name);
        db.rollback();
        db.setAutoCommit(true);
        s.execute("DROP STREAM " + name);
        out.put("refused", json(sqlstate(() -> {
            PreparedStatement feed = db.prepareStatement(FEED);
            feed.setString(1, table);
            feed.setLong(2, -1);
            feed.setInt(3, PAGE);
            feed.executeQuery();
        })));
        db.close();
        System.out.println(out.entrySet().stream().map(e -> json(e.getKey()) + ":" + e.getValue()).collect(Collectors.joining(",", "{", "}")));
    }

    public static void main(String[] args) throws Exception {
        System.setOut(new java.io.PrintStream(System.out, true, "UTF-8"));
        if (args[0].equals("plain")) {
            plain();
        } else {
            feed(args[2], args[3]);
        }
    }
}
