package rewrite

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestMain(m *testing.M) { localpg.Main(m) }

// keyMayBeNull is the one function of the catalog that rewritten queries call, as the migrations define it.
var keyMayBeNull = sync.OnceValues(func() (string, error) {
	const head, tail = "CREATE FUNCTION koldstore.key_may_be_null", "END $$;"
	files, err := filepath.Glob("../migrations/sql/*.sql")
	if err != nil {
		return "", err
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		if _, body, ok := strings.Cut(string(text), head); ok {
			body, _, _ = strings.Cut(body, tail)
			return head + body + tail, nil
		}
	}
	return "", errors.New("the migrations have no koldstore.key_may_be_null")
})

// conforming are the options of an ordinary session.
var conforming = Options{ConformingStrings: true, ClientEncoding: "UTF8"}

// connect opens a session in a fresh database with what rewritten queries need.
func connect(t testing.TB) *pgx.Conn {
	t.Helper()
	dsn := localpg.TestCluster(t).TestDatabase(t)
	conn, err := pgx.Connect(context.Background(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	function, err := keyMayBeNull()
	if err != nil {
		t.Fatal(err)
	}
	exec(t, conn, "CREATE SCHEMA koldstore")
	exec(t, conn, function)
	return conn
}

func exec(t testing.TB, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.PgConn().Exec(context.Background(), sql).ReadAll(); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// mustRewrite rewrites a text that has to change.
func mustRewrite(t testing.TB, sql string) string {
	t.Helper()
	r := Rewrite(sql, conforming)
	if r.Refusal != nil {
		t.Fatalf("%s: refused: %v", sql, r.Refusal)
	}
	if !r.Changed {
		t.Fatalf("%s: unchanged", sql)
	}
	return r.SQL
}
