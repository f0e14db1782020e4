package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestVerifiersNeedARight(t *testing.T) {
	t.Parallel()
	i := install(t)
	admin := connectTo(t, i.dsn)
	role := "reader_" + i.database
	do(t, admin, fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD 'geheim'", role))
	t.Cleanup(func() { // while the database is still there
		conn, err := pgx.Connect(context.Background(), i.dsn)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(context.Background())
		if _, err := conn.Exec(context.Background(), fmt.Sprintf("DROP OWNED BY %s; DROP ROLE %[1]s", role)); err != nil {
			t.Error(err)
		}
	})
	c := defaultConfig()
	c.Postgres.DSN = localpg.TestCluster(t).DSN(i.database, role, "geheim")
	c.Postgres.Databases = []string{i.database}
	v, err := openVerifiers(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer v.close()
	if err := v.check(t.Context()); err == nil || !strings.Contains(err.Error(), "proxy.auth") || !strings.Contains(err.Error(), verifierRemedy(i.database)) {
		t.Fatalf("without the right: %v", err)
	}
	if f := checkVerifiers(t.Context(), connectTo(t, c.Postgres.DSN), i.database); f.Result == resultOK {
		t.Errorf("the check says %+v", f)
	}
	do(t, admin, "GRANT SELECT (rolname, rolpassword) ON pg_catalog.pg_authid TO "+role)
	if err := v.check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if f := checkVerifiers(t.Context(), connectTo(t, c.Postgres.DSN), i.database); f.Result != resultOK {
		t.Errorf("the check says %+v", f)
	}
	for user, want := range map[string]string{role: "SCRAM-SHA-256$4096:", "no such role": "", "pg_monitor": ""} {
		got, err := v.Verifier(t.Context(), user)
		if err != nil || !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, %v", user, got, err)
		}
	}
}

func TestServeEndsSCRAM(t *testing.T) {
	t.Parallel()
	i := install(t)
	text, err := os.ReadFile(i.config)
	if err != nil {
		t.Fatal(err)
	}
	i.config = writeConfig(t, strings.Replace(string(text), "[proxy]\n", "[proxy]\nauth = \"scram\"\n", 1))
	if _, out := i.koldproxy("check"); !strings.Contains(out, "password verifiers") {
		t.Errorf("check does not look at verifiers:\n%s", out)
	}
	p, dsn := i.serve()
	if got := ask1[string](t, connectTo(t, dsn), "SELECT current_database()"); got != i.database {
		t.Errorf("connected to %s", got)
	}
	if _, err := pgx.Connect(t.Context(), dsn+" password=wrong"); err == nil || !strings.Contains(err.Error(), "28P01") {
		t.Errorf("with a wrong password: %v", err)
	}
	p.stop(syscall.SIGTERM)
}
