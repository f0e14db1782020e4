package changefeed_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/koldproxy/koldproxy/walapply"
)

// What happens while the applier is stopped, and the rows that come of it. The table is (id int, v int, pad int), with the row
// (1, 1, 1) from before, after a column had been added and dropped. Rows are inserted with ids from 10.
var behind = []struct {
	what       string
	statements []string
	want       []string // documents of rows from 10
}{
	{"dropped, and another added", []string{
		`INSERT INTO t (id, v, pad) VALUES (13, 1, 8)`, `ALTER TABLE t DROP pad`, `ALTER TABLE t ADD other int`,
	}, []string{`{"v": 1, "id": 13, "other": null}`}},
	{"added, another dropped, and added under its name with another type", []string{
		`INSERT INTO t VALUES (10, 1, 8)`, `ALTER TABLE t ADD a2 int DEFAULT 3`, `INSERT INTO t VALUES (11, 1, 9, 4)`, `ALTER TABLE t DROP pad`,
		`INSERT INTO t VALUES (12, 1, 5)`, `ALTER TABLE t ADD pad date`, `INSERT INTO t VALUES (13, 1, 6, '2020-02-02')`,
	}, []string{
		`{"v": 1, "a2": 3, "id": 10, "pad": null}`, `{"v": 1, "a2": 4, "id": 11, "pad": null}`, `{"v": 1, "a2": 5, "id": 12, "pad": null}`,
		`{"v": 1, "a2": 6, "id": 13, "pad": "2020-02-02"}`,
	}},
	{"dropped and added anew under the same name", []string{
		`INSERT INTO t VALUES (10, 1, 8)`, `ALTER TABLE t DROP pad, ADD pad int DEFAULT 77`, `INSERT INTO t VALUES (11, 1, 9)`, `UPDATE t SET v = 2 WHERE id = 10`,
	}, []string{`{"v": 1, "id": 10, "pad": 77}`, `{"v": 1, "id": 11, "pad": 9}`, `{"v": 2, "id": 10, "pad": 77}`}},
	{"names swapped", []string{
		`INSERT INTO t VALUES (10, 1, 8)`, `ALTER TABLE t RENAME v TO x`, `ALTER TABLE t RENAME pad TO v`, `ALTER TABLE t RENAME x TO pad`,
		`INSERT INTO t VALUES (11, 1, 8)`,
	}, []string{`{"v": 8, "id": 10, "pad": 1}`, `{"v": 8, "id": 11, "pad": 1}`}},
	{"in the middle of a transaction, and undone", []string{
		`BEGIN; INSERT INTO t VALUES (10, 1, 8); ALTER TABLE t DROP pad; INSERT INTO t VALUES (11, 2); SAVEPOINT s; ALTER TABLE t ADD pad int; INSERT INTO t VALUES (12, 3, 9);
		 ROLLBACK TO s; ALTER TABLE t ADD w int; INSERT INTO t VALUES (12, 4, 5); ALTER TABLE t RENAME w TO pad; INSERT INTO t VALUES (13, 5, 6); COMMIT`,
		`BEGIN; ALTER TABLE t DROP pad, ADD q int; INSERT INTO t VALUES (14, 1, 1); ROLLBACK`, `INSERT INTO t VALUES (15, 1, 7)`,
	}, []string{
		`{"v": 1, "id": 10, "pad": null}`, `{"v": 2, "id": 11, "pad": null}`, `{"v": 4, "id": 12, "pad": 5}`, `{"v": 5, "id": 13, "pad": 6}`, `{"v": 1, "id": 15, "pad": 7}`,
	}},
	{"renamed by a statement about views", []string{
		`INSERT INTO t VALUES (10, 1, 8)`, `ALTER VIEW t RENAME COLUMN v TO x`, `INSERT INTO t VALUES (11, 1, 8)`, `ALTER VIEW t RENAME COLUMN pad TO v`,
		`ALTER MATERIALIZED VIEW t RENAME COLUMN x TO pad`, `INSERT INTO t VALUES (12, 1, 8)`,
	}, []string{`{"v": 8, "id": 10, "pad": 1}`, `{"v": 8, "id": 11, "pad": 1}`, `{"v": 8, "id": 12, "pad": 1}`}},
	{"dropped with its type", []string{
		`CREATE DOMAIN d AS int`, `ALTER TABLE t ADD n d`, `INSERT INTO t VALUES (10, 1, 8, 9)`, `DROP DOMAIN d CASCADE`, `INSERT INTO t VALUES (11, 1, 8)`, `ALTER TABLE t ADD n int`,
		`INSERT INTO t VALUES (12, 1, 8, 7)`,
	}, []string{`{"n": null, "v": 1, "id": 10, "pad": 8}`, `{"n": null, "v": 1, "id": 11, "pad": 8}`, `{"n": 7, "v": 1, "id": 12, "pad": 8}`}},
}

// newShapeHost makes a host with the table of the cases above.
func newShapeHost(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	h.exec(`CREATE TABLE t (id int PRIMARY KEY, v int, pad int)`)
	h.stream("s", "t", "id > 0")
	h.manage("t")
	h.exec(`INSERT INTO t VALUES (1, 1, 1)`, `ALTER TABLE t ADD n int DEFAULT 5`, `ALTER TABLE t DROP n`)
	h.fence()
	return h
}

func TestColumnsComeAndGoWhileBehind(t *testing.T) {
	t.Parallel()
	for _, c := range behind {
		for _, how := range []string{"stopped", "as superuser", "one row at a time"} {
			t.Run(c.what+", "+how, func(t *testing.T) {
				t.Parallel()
				h := newShapeHost(t)
				h.stopApplier()
				if how == "one row at a time" { // batches end in the middle of transactions
					h.change = func(c *walapply.Config) { c.BatchRows = 1 }
				}
				for _, sql := range c.statements {
					if how == "as superuser" { // who is the service role at the same time
						h.admin(sql)
					} else {
						h.exec(sql)
					}
				}
				h.startApplier()
				h.fence()
				h.expect(`SELECT doc FROM _stream_s WHERE (doc ->> 'id')::int >= 10 ORDER BY id`, c.want...)
				h.expect(`SELECT (SELECT count(*) FROM koldstore.quarantine), (SELECT state FROM koldstore.stream), (SELECT state FROM koldstore.managed_table)`, "0 active active")
				h.expect(`SELECT a.shape = p.shape FROM koldstore.applied_shape a JOIN koldstore.published_table p USING (table_oid)`, "t")
			})
		}
	}
}

// The shape in force is as of the checkpoint: an applier that begins between a marker and the rows behind it knows it.
func TestShapesOutliveTheApplier(t *testing.T) {
	t.Parallel()
	h := newShapeHost(t)
	h.exec(`ALTER TABLE t DROP pad, ADD pad int`)
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO t VALUES (10, 1, 8)`, `ALTER TABLE t DROP pad, ADD pad int`)
	h.startApplier()
	h.fence()
	h.stopApplier()
	h.exec(`INSERT INTO t VALUES (11, 1, 9)`, `ALTER TABLE t DROP pad, ADD other int`)
	h.startApplier()
	h.fence()
	h.expect(`SELECT doc FROM _stream_s ORDER BY id OFFSET 1`, `{"v": 1, "id": 10, "pad": null}`, `{"v": 1, "id": 11, "other": null}`)
}

// An ALTER TABLE whose transaction stays open does not keep the applier from applying the one before.
func TestShapesWaitForNobody(t *testing.T) {
	t.Parallel()
	h := newShapeHost(t)
	h.stopApplier()
	h.exec(`ALTER TABLE t ADD a int`, `BEGIN`, `ALTER TABLE t ADD b int`)
	h.startApplier()
	h.eventually("the shape is applied", func() bool {
		return h.rows(`SELECT shape @> '[{"name": "a"}]' FROM koldstore.applied_shape`)[0] == "t"
	})
	h.exec(`INSERT INTO t VALUES (10, 1, 8, 9)`, `COMMIT`)
	h.fence()
	h.expect(`SELECT doc FROM _stream_s ORDER BY id OFFSET 1`, `{"a": 9, "b": null, "v": 1, "id": 10, "pad": 8}`)
}

// Without event triggers nobody announces shapes. What can be told all the same is told; otherwise the stream breaks.
func TestUnannouncedShapes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what       string
		statements []string
		broken     bool
		want       []string
	}{
		{"dropped, and another added", behind[0].statements, true, nil},
		{"dropped and added anew under the same name", behind[2].statements, true, nil},
		{"names swapped", behind[3].statements, false, behind[3].want},
		{"added", []string{
			`INSERT INTO t VALUES (10, 1, 8)`, `ALTER TABLE t ADD a int DEFAULT 3`, `INSERT INTO t VALUES (11, 1, 8, 4)`, `ALTER TABLE t ADD b int`, `INSERT INTO t VALUES (12, 1, 8, 4, 5)`,
		}, false, []string{
			`{"a": 3, "b": null, "v": 1, "id": 10, "pad": 8}`, `{"a": 4, "b": null, "v": 1, "id": 11, "pad": 8}`, `{"a": 4, "b": 5, "v": 1, "id": 12, "pad": 8}`,
		}},
		{"dropped", []string{`INSERT INTO t VALUES (10, 1, 8)`, `ALTER TABLE t DROP pad`, `INSERT INTO t VALUES (11, 1)`}, false, []string{
			`{"v": 1, "id": 10}`, `{"v": 1, "id": 11}`,
		}},
		{"of another type", []string{`INSERT INTO t VALUES (10, 1, 8)`, `ALTER TABLE t ALTER pad TYPE text`}, true, nil},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			h := newShapeHost(t)
			h.admin(`DROP EVENT TRIGGER koldproxy_ddl; DROP EVENT TRIGGER koldproxy_drop`)
			// With the applier running all is well.
			h.exec(`INSERT INTO t VALUES (2, 1, 1)`, `ALTER TABLE t DROP pad`, `INSERT INTO t VALUES (3, 1)`)
			h.fence()
			h.exec(`ALTER TABLE t ADD pad int`, `INSERT INTO t VALUES (4, 1, 2)`)
			h.fence()
			h.expect(`SELECT state FROM koldstore.stream`, "active")
			h.stopApplier()
			h.exec(c.statements...)
			h.startApplier()
			h.fence()
			state := "active"
			if c.broken {
				state = "broken"
				h.expect(`SELECT reason ~ 'columns changed while changes were on their way' FROM koldstore.stream`, "t")
			}
			h.expect(`SELECT doc FROM _stream_s WHERE (doc ->> 'id')::int >= 10 ORDER BY id`, c.want...)
			h.expect(`SELECT (SELECT state FROM koldstore.stream), (SELECT state FROM koldstore.managed_table)`, state+" "+state)
		})
	}
}

// TestRandomColumns: columns are added, dropped and renamed at random with rows in between, the applier is stopped, started and
// cut off. Each value says which column, in the sense of pg_attribute, it was written to, so that none can be under another's
// name unnoticed.
func TestRandomColumns(t *testing.T) {
	t.Parallel()
	for round := range 3 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.change = func(c *walapply.Config) { c.BatchRows = 3 }
			r := rand.New(rand.NewPCG(seed(t), uint64(round)))
			h.exec(`CREATE TABLE t (id int PRIMARY KEY)`)
			h.stream("s", "t", "id >= 0", "pre_image", "true")
			h.manage("t")
			columns := []column{}
			next, id := 2, 0
			step := func() string {
				switch op := r.IntN(10); {
				case op < 2 && len(columns) < 8:
					c := column{fmt.Sprintf("%c", 'a'+r.IntN(10)), next, r.IntN(2) == 0}
					for _, other := range columns {
						if other.name == c.name {
							return ""
						}
					}
					next++
					columns = append(columns, c)
					if c.missing {
						return fmt.Sprintf(`ALTER TABLE t ADD %s text DEFAULT '%d'`, c.name, c.number)
					}
					return fmt.Sprintf(`ALTER TABLE t ADD %s text`, c.name)
				case op < 4 && len(columns) > 0:
					i := r.IntN(len(columns))
					name := columns[i].name
					columns = append(columns[:i:i], columns[i+1:]...)
					return fmt.Sprintf(`ALTER TABLE t DROP %s`, name)
				case op < 5 && len(columns) > 1: // swap two names
					i := r.IntN(len(columns) - 1)
					columns = append([]column{}, columns...)
					a, b := &columns[i], &columns[i+1]
					a.name, b.name = b.name, a.name
					return fmt.Sprintf(`ALTER TABLE t RENAME %[1]s TO swap; ALTER TABLE t RENAME %[2]s TO %[1]s; ALTER TABLE t RENAME swap TO %[2]s`, a.name, b.name)
				case op < 6 && id > 0:
					return fmt.Sprintf(`DELETE FROM t WHERE id = %d`, r.IntN(id))
				case op < 8 && id > 0 && len(columns) > 0:
					c := columns[r.IntN(len(columns))]
					return fmt.Sprintf(`UPDATE t SET %s = '%d' WHERE id = %d`, c.name, c.number, r.IntN(id))
				}
				id++
				values := []string{fmt.Sprint(id - 1)}
				for _, c := range columns {
					values = append(values, fmt.Sprintf("'%d'", c.number))
				}
				return fmt.Sprintf(`INSERT INTO t VALUES (%s)`, strings.Join(values, ", "))
			}
			for range 60 {
				h.randomTransaction(r, step, &columns)
				switch r.IntN(12) {
				case 0:
					h.stopApplier()
				case 1:
					h.stopApplier()
					h.startApplier()
				case 2:
					h.admin(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
						AND (backend_type = 'walsender' OR application_name LIKE '%apply%')`)
				}
			}
			h.stopApplier()
			h.startApplier()
			h.fence()
			h.checkColumns()
			// Rows that are written after the last change of the columns are in logs and mirror as they are in the table.
			h.exec(`UPDATE t SET id = id`)
			h.fence()
			h.checkColumns()
			h.expect(`SELECT count(*) FROM t FULL JOIN (SELECT id, row_image FROM koldstore.t__cl WHERE op <> 3) m USING (id) WHERE to_jsonb(t) IS DISTINCT FROM m.row_image`, "0")
			h.expect(`SELECT count(*) FROM t FULL JOIN (SELECT * FROM (SELECT DISTINCT ON (k) * FROM _stream_s ORDER BY k, id DESC) l WHERE op = 'put') f ON f.k = to_jsonb(t.id)
				WHERE to_jsonb(t) IS DISTINCT FROM f.doc`, "0")
		})
	}
}

type column struct {
	name    string
	number  int  // in pg_attribute
	missing bool // rows from before have its number, too
}

// randomTransaction runs some steps, at times in one transaction, which may be undone.
func (h *host) randomTransaction(r *rand.Rand, step func() string, columns *[]column) {
	h.t.Helper()
	if r.IntN(2) == 0 {
		if sql := step(); sql != "" {
			h.exec(sql)
		}
		return
	}
	h.exec(`BEGIN`)
	for range r.IntN(6) {
		if sql := step(); sql != "" {
			h.exec(sql)
		}
	}
	if before := *columns; r.IntN(4) == 0 {
		// A number that was given in vain is given again, so the attempt is one of dropping.
		h.exec(`SAVEPOINT s`)
		for _, c := range before {
			h.exec(fmt.Sprintf(`ALTER TABLE t DROP %s`, c.name))
		}
		h.exec(`INSERT INTO t VALUES (-1)`, `ROLLBACK TO s`)
	}
	h.exec(`COMMIT`)
}

// checkColumns looks for values under names of other columns: each is NULL or the number of the column that has the name now,
// for images written with today's columns.
func (h *host) checkColumns() {
	h.t.Helper()
	h.expect(`SELECT state, reason FROM koldstore.stream UNION ALL SELECT state, reason FROM koldstore.managed_table`, "active NULL", "active NULL")
	h.expect(`SELECT count(*) FROM koldstore.quarantine`, "0")

	h.expect(`WITH names AS (SELECT DISTINCT c ->> 'name' AS name, c ->> 'attnum' AS number FROM koldstore.wal_marker m, jsonb_array_elements(m.details) c WHERE m.kind = 'shape'),
		images AS (SELECT doc AS image FROM _stream_s UNION ALL SELECT old FROM _stream_s UNION ALL SELECT row_image FROM koldstore.t__cl)
		SELECT i.image FROM images i, jsonb_each_text(i.image) f WHERE f.key <> 'id' AND f.value IS NOT NULL
		AND NOT EXISTS (SELECT FROM names n WHERE n.name = f.key AND n.number = f.value)`)
	// Within an image no number is there twice, and the columns are those of one moment.
	h.expect(`WITH images AS (SELECT doc AS image FROM _stream_s UNION ALL SELECT old FROM _stream_s UNION ALL SELECT row_image FROM koldstore.t__cl)
		SELECT i.image FROM images i WHERE i.image IS NOT NULL AND NOT EXISTS (SELECT FROM koldstore.wal_marker m WHERE m.kind = 'shape'
			AND (SELECT bool_and(i.image ? (c ->> 'name') AND (c ->> 'name' = 'id' OR coalesce(i.image ->> (c ->> 'name'), c ->> 'attnum') = c ->> 'attnum')) FROM jsonb_array_elements(m.details) c)
			AND (SELECT count(*) FROM jsonb_object_keys(i.image)) = jsonb_array_length(m.details))`)
}
