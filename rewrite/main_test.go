package rewrite

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestMain(m *testing.M) { localpg.Main(m) }

// called are the functions of the catalog that rewritten queries call, and those that these call, as the migrations define them.
var called = sync.OnceValues(func() (functions string, err error) {
	const file = "../migrations/sql/003_commands.sql"
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	for _, f := range []struct{ head, tail string }{
		{"CREATE FUNCTION koldstore.key_may_be_null", "END $$;"},
		{"CREATE FUNCTION koldstore.base_type", "END;"},
		{"CREATE FUNCTION koldstore.key_operators", "END;"},
		{"CREATE FUNCTION koldstore.compares_keys", "END $$;"},
	} {
		_, body, found := strings.Cut(string(text), f.head)
		if !found {
			return "", errors.New(file + " has no " + f.head)
		}
		body, _, _ = strings.Cut(body, f.tail)
		functions += f.head + body + f.tail
	}
	return functions, nil
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
	functions, err := called()
	if err != nil {
		t.Fatal(err)
	}
	exec(t, conn, "CREATE SCHEMA koldstore")
	exec(t, conn, functions)
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
