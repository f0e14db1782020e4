package walapply_test

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// checkHistory compares the tables recorded and audit.
func checkHistory(d *database) {
	d.t.Helper()
	type row struct {
		lsn, xid int64
		line     string
	}
	rows, _ := d.sql.Query(context.Background(), `SELECT coalesce(commit_lsn, 0), xid, line FROM recorded ORDER BY seq`)
	recorded, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (v row, err error) { return v, r.Scan(&v.lsn, &v.xid, &v.line) })
	if err != nil {
		d.t.Fatal(err)
	}
	rows, _ = d.sql.Query(context.Background(), `SELECT 0::bigint, xid, line FROM audit ORDER BY n`)
	audit, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (v row, err error) { return v, r.Scan(&v.lsn, &v.xid, &v.line) })
	if err != nil {
		d.t.Fatal(err)
	}
	// Whole transactions, each once, in commit order.
	lastXID, lastLSN, transactions := int64(-1), int64(-1), 0
	seen := map[int64]bool{}
	byXID := map[int64][]string{}
	perKey := map[string][]string{}
	for i, r := range recorded {
		if r.xid != lastXID {
			if seen[r.xid] {
				d.t.Fatalf("change %d: transaction %d comes a second time", i, r.xid)
			}
			if r.lsn <= lastLSN {
				d.t.Fatalf("change %d: transaction %d at %v comes after %v", i, r.xid, koldproxy.LSN(r.lsn), koldproxy.LSN(lastLSN))
			}
			seen[r.xid], lastXID, lastLSN = true, r.xid, r.lsn
			transactions++
		}
		byXID[r.xid] = append(byXID[r.xid], r.line)
		perKey[key(r.line)] = append(perKey[key(r.line)], r.line)
	}
	wantByXID := map[int64][]string{}
	wantPerKey := map[string][]string{}
	for _, r := range audit {
		wantByXID[r.xid] = append(wantByXID[r.xid], r.line)
		wantPerKey[key(r.line)] = append(wantPerKey[key(r.line)], r.line)
	}
	d.t.Logf("%d transactions, %d changes", transactions, len(recorded))
	if len(audit) < historyTransactions {
		d.t.Errorf("the history is too short to mean anything: %d changes", len(audit))
	}
	for xid, want := range wantByXID {
		if len(byXID[xid]) != len(want) {
			d.t.Fatalf("transaction %d: %d changes recorded, %d made", xid, len(byXID[xid]), len(want))
		}
		d.equal(byXID[xid], want)
	}
	if len(byXID) != len(wantByXID) {
		d.t.Fatalf("%d transactions recorded, %d made", len(byXID), len(wantByXID))
	}
	// Row locks make the order of statements on one key the order of commits.
	for k, want := range wantPerKey {
		d.equal(perKey[k], want)
	}
	if !query[bool](d, `SELECT rows_applied = (SELECT count(*) FROM audit WHERE line NOT LIKE 'TRUNCATE%') AND watermark >= (SELECT max(seq) FROM recorded)
		FROM koldstore.checkpoint`) {
		d.t.Error("rows_applied or watermark of the checkpoint are wrong")
	}
}

// key is the table and the key after the change: "a 5" of "UPDATE a 5 77 p".
func key(line string) string {
	parts := strings.SplitN(line, " ", 4)
	return strings.Join(parts[1:min(3, len(parts))], " ")
}
