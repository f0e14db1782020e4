package changefeed_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// The last stream of a table goes in one transaction while another one comes in a second: the table is captured from the second's commit on,
// whichever comes first.
func TestStreamsThatComeAndGoTogether(t *testing.T) {
	t.Parallel()
	const drop, create, manage = `CALL koldstore.drop_stream(NULL, 'a')`, `CALL koldstore.create_stream(NULL, 'b', NULL, 't', 'true')`, `SELECT koldstore.manage_table('t')`
	for _, order := range [][]string{{drop, create}, {create, drop}, {drop, manage}, {manage, drop}} {
		t.Run(order[0]+" "+order[1], func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
			h.stream("a", "t", "true")
			h.fence()
			var sessions [2]*pgx.Conn
			for i := range sessions {
				conn, err := pgx.Connect(t.Context(), h.app.Config().ConnString())
				must(t, err)
				defer conn.Close(context.Background())
				sessions[i] = conn
			}
			_, err := sessions[0].Exec(t.Context(), "BEGIN; "+order[0])
			must(t, err)
			second := make(chan error, 1)
			go func() {
				_, err := sessions[1].Exec(t.Context(), order[1])
				second <- err
			}()
			h.eventually("the second one waits", func() bool {
				return h.rows(`SELECT count(*) FROM pg_locks WHERE pid = $1 AND NOT granted`, sessions[1].PgConn().PID())[0] == "1"
			})
			_, err = sessions[0].Exec(t.Context(), "COMMIT")
			must(t, err)
			must(t, <-second)
			h.exec(`INSERT INTO t VALUES (1)`, `DELETE FROM t WHERE id = 1`)
			h.fence()
			if strings.Contains(order[0]+order[1], create) {
				h.events("b", "put 1", "delete 1")
				h.expect(`SELECT name, state, gaps FROM koldstore.stream`, "b active 0")
			} else {
				h.expect(`SELECT id, op FROM koldstore.t__cl`, "1 3")
			}
		})
	}
}
