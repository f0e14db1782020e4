package main

import (
	"context"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

var updateReference = flag.Bool("update-reference", false, "rewrite reference.toml")

// reference.toml says of each key what the comment of its field says, under the keys' own names, in the order of config.fields.
func TestReferenceConfiguration(t *testing.T) {
	t.Parallel()
	want := renderReference(t)
	if want == reference {
		return
	}
	if *updateReference {
		if err := os.WriteFile("reference.toml", []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Error("reference.toml is not what the fields say; go test ./cmd/koldproxy -run TestReferenceConfiguration -args -update-reference rewrites it")
}

func renderReference(t *testing.T) string {
	t.Helper()
	comments := fieldComments(t)
	c := defaultConfig()
	var b strings.Builder
	b.WriteString(wrapComment("The configuration of koldproxy. Keys that are commented out show their default. Each can also be set in the environment, as " +
		"KOLDPROXY_PROXY_LISTEN, or with a flag, as --set proxy.listen=…; koldproxy config print shows what is in force and where it comes from."))
	section := ""
	for _, f := range c.fields() {
		if f.section != section {
			section = f.section
			fmt.Fprintf(&b, "\n[%s]\n", section)
		}
		if text := comments[f.key]; text != "" {
			b.WriteString("\n" + wrapComment(text))
		}
		fmt.Fprintf(&b, "#%s = %s\n", f.name, f.toml(f.value.Interface()))
	}
	return b.String()
}

// fieldComments reads the comments above the fields, with the names of Go replaced by the keys' names.
func fieldComments(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("config*.go")
	if err != nil {
		t.Fatal(err)
	}
	structs := map[string]*ast.StructType{}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			if spec, ok := n.(*ast.TypeSpec); ok {
				if s, ok := spec.Type.(*ast.StructType); ok {
					structs[spec.Name.Name] = s
				}
			}
			return true
		})
	}
	key := func(f *ast.Field) string {
		if f.Tag == nil {
			return ""
		}
		return strings.Trim(strings.TrimPrefix(f.Tag.Value, "`toml:"), "\"`")
	}
	comments := map[string]string{}
	for _, s := range structs["config"].Fields.List {
		section := key(s)
		if section == "" {
			continue
		}
		body, ok := s.Type.(*ast.StructType)
		if !ok {
			body = structs[s.Type.(*ast.Ident).Name]
		}
		var names []string
		for _, f := range body.Fields.List {
			names = append(names, f.Names[0].Name, key(f))
		}
		for _, f := range body.Fields.List {
			text := strings.Join(strings.Fields(f.Doc.Text()), " ")
			for i := 0; i < len(names); i += 2 {
				text = regexp.MustCompile(`\b`+names[i]+`\b`).ReplaceAllLiteralString(text, names[i+1])
			}
			comments[section+"."+key(f)] = text
		}
	}
	return comments
}

func wrapComment(text string) string {
	const width = 110
	var b strings.Builder
	line := "#"
	for word := range strings.FieldsSeq(text) {
		if len(line)+1+len(word) > width {
			b.WriteString(line + "\n")
			line = "#"
		}
		line += " " + word
	}
	return b.String() + line + "\n"
}

// What init writes is a configuration with the values that were asked for, and all others at their defaults.
func TestInitWritesAConfiguration(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "etc")
	line := []string{
		"init", dir, "--host", "o'db", "--port", "6000", "--role", `k"p`, "--database", "app", "--database", "o'ther",
		"--set", "mqtt.enabled=true", "--set", "apply.linger=7ms",
	}
	run := func(line ...string) (int, string) {
		var out, errOut strings.Builder
		code := execute(t.Context(), line, &out, &errOut)
		return code, out.String() + errOut.String()
	}
	if code, out := run(line...); code != exitFine || !strings.Contains(out, "koldproxy check --config "+dir) {
		t.Fatalf("exit code %d: %s", code, out)
	}
	path := filepath.Join(dir, configFileName)
	c, err := loadConfig(&options{configFile: path}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.validate(); err != nil {
		t.Fatal(err)
	}
	pg, err := c.pgxConfig("")
	if err != nil || pg.Host != "o'db" || pg.Port != 6000 || pg.User != `k"p` || pg.Password == "" || pg.Database != "app" {
		t.Errorf("the service connection is %s@%s:%d/%s, %v", pg.User, pg.Host, pg.Port, pg.Database, err)
	}
	if !slices.Equal(c.Postgres.Databases, []string{"app", "o'ther"}) || !c.MQTT.Enabled {
		t.Errorf("databases %q, mqtt %v", c.Postgres.Databases, c.MQTT.Enabled)
	}
	set := []string{"postgres.dsn", "postgres.password_file", "postgres.databases", "mqtt.enabled", "apply.linger"}
	for key, origin := range c.origins {
		if (origin != "default") != slices.Contains(set, key) {
			t.Errorf("%s comes from %s", key, origin)
		}
	}
	for name, mode := range map[string]os.FileMode{configFileName: 0o644, roleFileName: 0o600, passwordFileName: 0o600} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if code, out := run("init", dir); code != exitUsage || !strings.Contains(out, path) || !strings.Contains(out, "--force") {
		t.Errorf("over files that exist: exit code %d, %s", code, out)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("a refused init has changed the file: %v", err)
	}
	if code, out := run("init", dir, "--force", "--json"); code != exitFine || !strings.Contains(out, `"files"`) {
		t.Errorf("with --force: exit code %d, %s", code, out)
	}
}

// What cannot be meant is refused before anything is written, and nobody's password gets into a file that others may read.
func TestInitRefuses(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "etc")
	for line, want := range map[string]string{
		"--port 0":               "--port 0",
		"--host=":                "--host",
		"--role koldproxy_eval":  "koldproxy_eval",
		"--owner koldproxy_eval": "koldproxy_eval",
		"--role=":                "no name",
		"--set postgres.dsn=postgres://u:geheim@h/app":        "without a password",
		"--set postgres.dsn=postgres://u:ge#heim@h/app":       "without a password",
		"--set postgres.dsn=postgres://h/app?password=geheim": "without a password",
	} {
		var out, errOut strings.Builder
		code := execute(t.Context(), append([]string{"init", dir}, strings.Fields(line)...), &out, &errOut)
		if code != exitUsage || !strings.Contains(errOut.String(), want) || strings.Contains(errOut.String(), "heim") {
			t.Errorf("%s: exit code %d, %s", line, code, errOut.String())
		}
		if _, err := os.Stat(dir); err == nil {
			t.Fatalf("%s has written something", line)
		}
	}
	spaces := filepath.Join(t.TempDir(), "my 'etc'")
	var out, errOut strings.Builder
	if code := execute(t.Context(), []string{"init", spaces, "--set", "mqtt.url=mqtt://relay:geheim@h:1883"}, &out, &errOut); code != exitFine {
		t.Fatal(errOut.String())
	}
	if info, err := os.Stat(filepath.Join(spaces, configFileName)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("a configuration with a password: %v, %v", info, err)
	}
	words, err := exec.Command("sh", "-c", `psql() { for word; do :; done; echo "$word"; }; `+regexp.MustCompile(`(?m)^  psql .*$`).FindString(out.String())).Output()
	if want := filepath.Join(spaces, roleFileName); err != nil || strings.TrimSpace(string(words)) != want {
		t.Errorf("a shell takes %q for the file, want %q (%v)\n%s", words, want, err, out.String())
	}
	if !strings.Contains(out.String(), "psql -v ON_ERROR_STOP=1 ") {
		t.Errorf("psql would go on after an error:\n%s", out.String())
	}
}

// The SQL of init makes neither koldproxy nor code of users a superuser, whatever was there before, and takes nobody's password away.
func TestInitOnAServerInUse(t *testing.T) {
	t.Parallel()
	cluster := localpg.OwnCluster(t, localpg.Config{})
	admin := connectTo(t, cluster.DSN("postgres", "", ""))
	for _, sql := range []string{
		`CREATE ROLE "a$init$b" LOGIN NOINHERIT PASSWORD 'old'`, "CREATE ROLE boss SUPERUSER", "CREATE ROLE shop",
		"CREATE ROLE koldproxy_eval SUPERUSER LOGIN BYPASSRLS", "GRANT boss, shop TO koldproxy_eval", `CREATE DATABASE app OWNER "a$init$b"`, "CREATE DATABASE own OWNER boss",
	} {
		do(t, admin, sql)
	}
	sql := func(args ...string) string {
		t.Helper()
		dir := t.TempDir()
		var out, errOut strings.Builder
		if code := execute(t.Context(), append([]string{"init", dir}, args...), &out, &errOut); code != exitFine {
			t.Fatal(errOut.String())
		}
		before, err := os.ReadFile(filepath.Join(dir, passwordFileName))
		if err != nil {
			t.Fatal(err)
		}
		if code := execute(t.Context(), append([]string{"init", dir, "--force"}, args...), &out, &errOut); code != exitFine {
			t.Fatal(errOut.String())
		}
		if after, err := os.ReadFile(filepath.Join(dir, passwordFileName)); err != nil || string(after) != string(before) {
			t.Errorf("--force has changed the password: %v", err)
		}
		text, err := os.ReadFile(filepath.Join(dir, roleFileName))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for _, text := range []string{
		sql("--role", "a$init$b", "--owner", "a$init$b", "--owner", "boss", "--owner", "shop"),
		sql("--role", "a$init$b", "--database", "app", "--database", "own"),
	} {
		do(t, admin, text)
		do(t, admin, text)
	}
	if got := ask1[string](t, admin, `SELECT concat_ws(' ', rolsuper, rolinherit, rolreplication, pg_has_role('a$init$b', 'shop', 'USAGE'), pg_has_role('a$init$b', 'boss', 'MEMBER'))
		FROM pg_roles WHERE rolname = 'a$init$b'`); got != "f t t t f" {
		t.Errorf("the service role is %s", got)
	}
	if rights, _, err := evalRights(t.Context(), admin); err != nil || rights != "" {
		t.Errorf("code of users %s, %v", rights, err)
	}
	old := connectTo(t, cluster.DSN("app", "a$init$b", "old"))
	if err := old.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := admin.Exec(t.Context(), sql("--role", "boss")); err == nil || !strings.Contains(err.Error(), "is a superuser") {
		t.Errorf("a superuser as the service role: %v", err)
	}
}

// TestInitIsEnough goes the way of the README on a server that exists: init, the SQL as an administrator, check, serve, and then
// what the tour does, as an application whose role owns the database.
func TestInitIsEnough(t *testing.T) {
	t.Parallel()
	cluster := localpg.TestCluster(t)
	dsn := cluster.TestDatabase(t)
	cc, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	admin := connectTo(t, dsn)
	role, owner := "svc_"+cc.Database, "app_"+cc.Database
	do(t, admin, fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD 'app'; ALTER DATABASE %s OWNER TO %[1]s", owner, cc.Database))
	dir := reachableDir(t)
	run := func(line ...string) (int, string) {
		var out, errOut strings.Builder
		code := execute(t.Context(), line, &out, &errOut)
		return code, out.String() + errOut.String()
	}
	i := &installation{
		t: t, dsn: cluster.DSN(cc.Database, owner, "app"), database: cc.Database,
		config: filepath.Join(dir, configFileName), socket: filepath.Join(dir, ".s.PGSQL.6543"),
	}
	code, out := run("init", dir, "--host", cc.Host, "--port", fmt.Sprint(cc.Port), "--role", role, "--database", cc.Database,
		"--set", "proxy.listen=unix:"+i.socket, "--set", "http.listen=", "--set", "cold.url=file://"+filepath.Join(dir, "cold"))
	if code != exitFine {
		t.Fatal(out)
	}
	sql, err := os.ReadFile(filepath.Join(dir, roleFileName))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		do(t, admin, string(sql))
	}
	t.Cleanup(func() { // while the database is still there
		for _, sql := range []string{
			"DROP PUBLICATION IF EXISTS koldproxy; DROP SCHEMA IF EXISTS koldstore CASCADE",
			fmt.Sprintf("REASSIGN OWNED BY %[1]s, %[2]s TO postgres; DROP OWNED BY %[1]s, %[2]s; DROP ROLE %[1]s, %[2]s", role, owner),
		} {
			if _, err := admin.Exec(context.Background(), sql); err != nil {
				t.Error(err)
			}
		}
	})
	if rights := ask1[string](t, admin, `SELECT concat_ws(' ', rolsuper, rolcreaterole, rolcreatedb, rolbypassrls, rolreplication, rolcanlogin)
		FROM pg_roles WHERE rolname = $1`, role); rights != "f f f f t t" {
		t.Errorf("the role is more or less than it should be: %s", rights)
	}
	if code, out := i.koldproxy("check"); code != exitFine || !strings.Contains(out, "koldproxy migrate up") {
		t.Errorf("check of a server that is as it should be: exit code %d\n%s", code, out)
	}
	p, through := i.serve()
	app := connectTo(t, through)
	do(t, app, `CREATE TABLE orders (id bigint PRIMARY KEY, total numeric NOT NULL);
		CREATE STREAM big_orders ON orders WHEN (total > 1000) WITH (retention = '24h')`)
	do(t, app, "INSERT INTO orders VALUES (1, 250), (2, 4800); UPDATE orders SET total = 900 WHERE id = 2")
	do(t, app, "SELECT koldstore.manage_table('orders', min_flush_rows => 1)")
	do(t, app, "SELECT koldstore.wait_for_async_mirror()")
	if got := ask1[string](t, app, "SELECT string_agg(op || ' ' || k, ', ' ORDER BY id) FROM _stream_big_orders"); got != "put 2, exit 2" {
		t.Errorf("the stream has %s", got)
	}
	if got := ask1[string](t, app, "SELECT koldstore.flush_table('orders', wait => true, force => true) ->> 'status'"); got != "completed" {
		t.Errorf("the flush says %s", got)
	}
	if got := ask1[string](t, app, "SELECT string_agg(source || ' ' || (pk ->> 'id'), ', ' ORDER BY seq) FROM koldstore.changes_since('orders')"); got != "cold 1, cold 2" {
		t.Errorf("the feed has %s", got)
	}
	if out := i.must("check"); strings.Contains(out, "PROBLEM") {
		t.Errorf("check finds a problem:\n%s", out)
	}
	do(t, app, "DROP STREAM big_orders")
	do(t, app, "SELECT koldstore.unmanage_table('orders', drop_cold => true)")
	p.stop(syscall.SIGTERM)
}
