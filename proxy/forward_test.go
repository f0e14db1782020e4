package proxy

import (
	"strings"
	"testing"
)

func TestPgxWorksThroughTheProxy(t *testing.T) {
	t.Parallel()
	p := startProxy(t)
	ctx := within(t)
	conn := connect(t, p.dsn(t, p.cluster.TestDatabase(t)))
	if _, err := conn.Exec(ctx, "CREATE TABLE t (id int PRIMARY KEY, v text)"); err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		if _, err := conn.Exec(ctx, "INSERT INTO t VALUES ($1, $2)", i, strings.Repeat("x", i*10_000)); err != nil {
			t.Fatal(err)
		}
	}
	var sum int
	if err := conn.QueryRow(ctx, "SELECT sum(length(v)) FROM t WHERE id >= $1", 0).Scan(&sum); err != nil {
		t.Fatal(err)
	}
	if sum != 450_000 {
		t.Errorf("sum of lengths is %d", sum)
	}
}
