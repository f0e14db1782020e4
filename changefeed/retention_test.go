package changefeed_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/changefeed"
)

// The sweep removes what has been invisible since it expired, in pages, and raises the floor with it.
func TestSweep(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
	h.stream("s", "t", "true", "retention", "90m")
	h.stream("forever", "t", "true")
	h.exec(`INSERT INTO t SELECT generate_series(1, 12000)`, `INSERT INTO t SELECT generate_series(12001, 12010)`)
	h.fence()
	for _, log := range []string{"_stream_s", "_stream_forever"} {
		h.admin(fmt.Sprintf(`UPDATE %s SET ts = ts - interval '91 m' WHERE k <= '12000'`, log))
	}
	var visible int
	must(t, h.app.QueryRow(t.Context(), `SELECT count(*) FROM _stream_s`).Scan(&visible))
	if visible != 10 {
		t.Errorf("%d events are visible", visible)
	}
	last := h.rows(`SELECT max(id) FROM _stream_s WHERE k <= '12000'`)[0]
	sweeper := changefeed.NewSweeper(time.Hour, h.pool, zerolog.Nop(), nil)
	for i, want := range []int64{12000, 0} {
		removed, err := sweeper.Sweep(t.Context())
		must(t, err)
		if removed != want {
			t.Errorf("sweep %d removed %d events, want %d", i+1, removed, want)
		}
		h.expect(`SELECT name, floor FROM koldstore.stream ORDER BY name`, "forever NULL", "s "+last)
	}
	h.expect(`SELECT (SELECT count(*) FROM _stream_s), (SELECT count(*) FROM _stream_forever)`, "10 12010")

	// Events that expire behind one that stays wait for it, for ever so short a time; the floor never falls.
	h.admin(`UPDATE _stream_s SET ts = ts - interval '91 m' WHERE k IN ('12002', '12004')`)
	removed, err := sweeper.Sweep(t.Context())
	must(t, err)
	if removed != 2 {
		t.Errorf("removed %d events, want 2", removed)
	}
	h.expect(`SELECT count(*), (SELECT floor FROM koldstore.stream WHERE name = 's') > '`+last+`' FROM _stream_s`, "8 t")
}
