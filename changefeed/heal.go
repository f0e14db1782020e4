package changefeed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/koldproxy/koldproxy"
)

// healing is where the comparison of a feed with its table stands (koldstore.managed_table). It is made after changes may have
// been missed, in three steps, each in pages that a restart does not repeat:
//
//	mirror   each row of the mirror, in the order of seq: is the table's row with this key the same?
//	cold     each row in cold storage that the mirror does not have: the same. Those that are right go to a scratch table
//	table    each row of the table, as a seed does: is it in the mirror or in the scratch table?
//
// What differs is written as a new change, and so is what is below the floor, where the cursor of a reader who begins anew would be
// refused. A page shows the table as it is now, which may be ahead of the log; the changes that are still to come bring the mirror to the
// same rows. For that every change behind the beginning of the healing has to be in the log, so it begins at a place of the log: that
// of a new slot, or of a marker.
//
// Rows move from the mirror to cold storage meanwhile, never back, so going from one to the other none is missed.
type healing struct {
	step       string
	seq        int64 // the last seq that has been looked at in this step
	through    int64 // the last one that is looked at: what is above was written after the beginning, and is right
	floor      int64
	generation int64
}

// seqs says whether a step goes through seqs, not through the table.
func (h *healing) seqs() bool { return h.step == "mirror" || h.step == "cold" }

// beginHeal carries out a marker: from here on the feed of a table is compared with it.
func (t *Target) beginHeal(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, c *koldproxy.Change, oid uint32) error {
	var details struct {
		Reason *string `json:"reason"`
		Job    *string `json:"job"`
	}
	if err := json.Unmarshal([]byte(markerField(c, "details")), &details); err != nil {
		return fmt.Errorf("read a marker: %w", err)
	}
	_, err := tx.Exec(ctx, `SELECT koldstore.heal_here($1, $2, $3::text::uuid, $4, $5::text::pg_lsn)`,
		oid, details.Reason, details.Job, int64(seqs.Watermark()), c.CommitLSN.String())
	if err != nil {
		return fmt.Errorf("begin to heal the feed of table %d: %w", oid, err)
	}
	t.forget()
	delete(t.naps, worker{table: oid})
	return nil
}

// candidate is a row that a feed has, to be compared with the table.
type candidate struct {
	seq   int64
	op    koldproxy.Op
	key   string  // a literal of the mirror's row type
	image *string // nil for a tombstone
	right bool    // the table says the same
}

// healPage does one page of the steps that go through seqs.
func (t *Target) healPage(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, tab *table, h *healing, last bool) error {
	limit := min(t.cfg.SeedRows, evalRows)
	read := t.readMirror
	if h.step == "cold" {
		read = t.readCold
	}
	rows, through, done, err := read(ctx, tx, tab, h, limit)
	if err != nil {
		return err
	}
	written, err := t.compare(ctx, tx, seqs, tab, rows, h.floor, last)
	if err != nil {
		return err
	}
	if h.step == "cold" {
		if err := t.remember(ctx, tx, tab, rows); err != nil {
			return err
		}
	}
	if err := t.checkStillTrue(ctx, tx, tab); err != nil {
		return err
	}
	t.done.healedRows += written
	next := h.step
	if done {
		through = 0
		next = map[string]string{"mirror": "cold", "cold": "table"}[h.step]
	}
	_, err = tx.Exec(ctx, `WITH noted AS (
			UPDATE koldstore.managed_table SET heal_step = $6, heal_seq = $2, reason = NULL WHERE mirror_oid = $1 RETURNING seed_job)`+jobSQL,
		tab.mirror.oid, through, false, written, len(rows), next)
	return err
}

// readMirror reads rows of the mirror. through is the last seq that the page covers.
func (t *Target) readMirror(ctx context.Context, tx pgx.Tx, tab *table, h *healing, limit int) (page []candidate, through int64, done bool, err error) {
	m := tab.mirror
	rows, err := tx.Query(ctx, fmt.Sprintf(`SELECT m.seq, m.op, pg_catalog.format('%%s', %s), m.row_image::pg_catalog.text FROM %s m
		WHERE m.seq > $1 AND m.seq <= $2 ORDER BY m.seq LIMIT %d`,
		m.record(func(i int) string { return "m." + m.keys[i] }), m.name, limit), h.seq, h.through)
	if err != nil {
		return nil, 0, false, err
	}
	through = h.seq
	var c candidate
	_, err = pgx.ForEachRow(rows, []any{&c.seq, &c.op, &c.key, &c.image}, func() error {
		page, through = append(page, c), c.seq
		return nil
	})
	return page, through, len(page) < limit, err
}

// readCold reads cold rows that the mirror does not have. The page was asked for before; as the feed's generation, which nobody can
// change now, is the same, it is what would be read now.
func (t *Target) readCold(ctx context.Context, tx pgx.Tx, tab *table, h *healing, limit int) (page []candidate, through int64, done bool, err error) {
	segments, err := coldSegments(ctx, tx, tab, h.seq)
	if err != nil || len(segments) == 0 {
		return nil, h.seq, true, err
	}
	if t.cfg.Cold == nil {
		return nil, 0, false, errors.New("the table has cold segments and no cold storage is configured")
	}
	cold, err := t.cold.page(PageRequest{ //nolint:contextcheck // the read goes on after this call
		Database: t.cfg.Database, Table: tab.oid, Generation: h.generation, Segments: segments, Mode: PageForward, After: koldproxy.Seq(h.seq), Limit: limit,
	})
	if err != nil {
		return nil, 0, false, fmt.Errorf("read cold rows: %w", err)
	}
	keys, images := make([]json.RawMessage, len(cold.Rows)), make([]*string, len(cold.Rows))
	for i, r := range cold.Rows {
		keys[i] = r.PK
		if r.Op != koldproxy.OpDelete {
			image := string(r.Image)
			images[i] = &image
		}
	}
	m := tab.mirror
	column := func(of string) func(int) string { return func(i int) string { return of + m.keys[i] } }
	rows, err := tx.Query(ctx, fmt.Sprintf(`SELECT u.n - 1, pg_catalog.format('%%s', %s), u.image::pg_catalog.jsonb::pg_catalog.text
		FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS u(pk, image, n)
		CROSS JOIN LATERAL pg_catalog.jsonb_populate_record(NULL::%s, u.pk::pg_catalog.jsonb) AS k
		WHERE NOT EXISTS (SELECT FROM %s m WHERE %s)`,
		m.record(column("k.")), m.name, m.name, tab.keyIs(column("m."), column("k."))), textArray(keys), images)
	if err != nil {
		return nil, 0, false, err
	}
	var n int
	var c candidate
	_, err = pgx.ForEachRow(rows, []any{&n, &c.key, &c.image}, func() error {
		c.seq, c.op = int64(cold.Rows[n].Seq), cold.Rows[n].Op
		page = append(page, c)
		return nil
	})
	through = h.seq
	if n := len(cold.Rows); n > 0 {
		through = int64(cold.Rows[n-1].Seq)
	}
	return page, through, cold.Complete || len(cold.Rows) == 0, err
}

// coldSegments are the segments of a table with rows above a seq, in their order.
func coldSegments(ctx context.Context, tx pgx.Tx, tab *table, above int64) ([]uuid.UUID, error) {
	rows, err := tx.Query(ctx, `SELECT s.segment_id::text FROM koldstore.segment s
		WHERE s.table_oid = $1 AND s.state = 'active' AND s.max_seq > $2 ORDER BY s.max_seq`, tab.oid, above)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (id uuid.UUID, err error) {
		var text string
		if err := row.Scan(&text); err != nil {
			return id, err
		}
		return uuid.Parse(text)
	})
}

// compare looks the rows of a page up in the table and writes to the mirror what is different there, or below the floor.
func (t *Target) compare(ctx context.Context, tx pgx.Tx, seqs *koldproxy.Sequence, tab *table, page []candidate, floor int64, last bool) (written int64, err error) {
	found, err := t.lookUpRows(ctx, tx, tab, page)
	if err != nil {
		return 0, err
	}
	answers := make([]judged, len(page))
	var questions []question
	for i := range page {
		if found[i] != nil {
			questions = append(questions, question{literal: *found[i], answer: &answers[i], asks: make([]bool, len(tab.streams))})
		}
	}
	j := t.newJudge(idle(tx), tab, last)
	if err := j.ask(ctx, questions); err != nil {
		return 0, err
	}
	if j.ruined != "" {
		return 0, &foreignCodeError{j.ruined}
	}
	same, err := sameImages(ctx, tx, page, answers)
	if err != nil {
		return 0, err
	}
	first := seqs.Reserve(int64(len(page)), t.cfg.Now())
	var keys []string
	var numbers []int64
	var ops []int16
	var images []*string
	for i := range page {
		c, seq := &page[i], first+koldproxy.Seq(i)
		op := koldproxy.OpUpdate
		switch {
		case found[i] == nil && c.op == koldproxy.OpDelete && c.seq >= floor:
			c.right = true
			continue
		case found[i] == nil:
			op = koldproxy.OpDelete
		case answers[i].failed != nil:
			if err := t.quarantineSeed(ctx, tx, tab, seq, *found[i], answers[i].failed); err != nil {
				return 0, err
			}
			continue
		case c.op == koldproxy.OpDelete:
			op = koldproxy.OpInsert
		case same[i] && c.seq >= floor:
			c.right = true
			continue
		}
		keys, numbers, ops, images = append(keys, c.key), append(numbers, int64(seq)), append(ops, int16(op)), append(images, answers[i].image)
	}
	if len(keys) == 0 {
		return 0, nil
	}
	_, err = tx.Exec(ctx, anyMirrorSQL(tab), keys, numbers, ops, images)
	return int64(len(keys)), err
}

// sameImages says which images of a page are those of the table's rows, to the last digit.
func sameImages(ctx context.Context, tx pgx.Tx, page []candidate, answers []judged) (map[int]bool, error) {
	theirs, ours := make([]*string, len(page)), make([]*string, len(page))
	for i := range page {
		theirs[i], ours[i] = page[i].image, answers[i].image
	}
	rows, err := tx.Query(ctx, `SELECT u.n - 1 FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS u(a, b, n)
		WHERE u.a::pg_catalog.jsonb::pg_catalog.text = u.b::pg_catalog.jsonb::pg_catalog.text`, theirs, ours)
	if err != nil {
		return nil, err
	}
	same := make(map[int]bool, len(page))
	var i int
	_, err = pgx.ForEachRow(rows, []any{&i}, func() error { same[i] = true; return nil })
	return same, err
}

// lookUpRows finds the table's rows with the keys of a page, as literals; nil where there is none.
func (t *Target) lookUpRows(ctx context.Context, tx pgx.Tx, tab *table, page []candidate) ([]*string, error) {
	found := make([]*string, len(page))
	if len(page) == 0 {
		return found, nil
	}
	m, keys := tab.mirror, make([]string, len(page))
	for i := range page {
		keys[i] = page[i].key
	}
	sql := fmt.Sprintf(`SELECT k.n - 1, pg_catalog.format('%%s', _ks_row)
		FROM (SELECT u.n, u.key::%s AS row FROM unnest($1::text[]) WITH ORDINALITY AS u(key, n) OFFSET 0) k
		JOIN %s _ks_row ON %s`, m.name, tab.from(),
		tab.keyIs(func(i int) string { return "_ks_row." + ident(tab.column(tab.key[i]).name) }, func(i int) string { return "(k.row)." + m.keys[i] }))
	err := readTable(ctx, tx, tab, func() error {
		rows, err := tx.Query(ctx, sql, keys)
		if err != nil {
			return err
		}
		var n int
		var row string
		_, err = pgx.ForEachRow(rows, []any{&n, &row}, func() error {
			literal := row
			found[n] = &literal
			return nil
		})
		return err
	})
	return found, err
}

// scratch is the table of cold keys that a healing has found right. It is not logged: after a crash of the server some rows are
// written once more than need be.
func (m *mirror) scratch() string { return fmt.Sprintf("koldstore.heal_%d", m.oid) }

// remember puts the keys that are right, of cold rows, into the scratch table.
func (t *Target) remember(ctx context.Context, tx pgx.Tx, tab *table, page []candidate) error {
	m := tab.mirror
	var keys []string
	for _, c := range page {
		if c.right && c.op != koldproxy.OpDelete {
			keys = append(keys, c.key)
		}
	}
	if err := t.makeScratch(ctx, tx, m); err != nil || len(keys) == 0 {
		return err
	}
	_, err := tx.Exec(ctx, fmt.Sprintf(`INSERT INTO %s SELECT %s FROM (SELECT u.key::%s AS row FROM unnest($1::text[]) AS u(key) OFFSET 0) d ON CONFLICT DO NOTHING`,
		m.scratch(), list(len(m.keys), func(i int) string { return "(d.row)." + m.keys[i] }), m.name), keys)
	return err
}

func (t *Target) makeScratch(ctx context.Context, tx pgx.Tx, m *mirror) error {
	var exists bool
	if err := tx.QueryRow(ctx, `SELECT pg_catalog.to_regclass($1) IS NOT NULL`, m.scratch()).Scan(&exists); err != nil || exists {
		return err
	}
	keys := strings.Join(m.keys, ", ")
	_, err := tx.Exec(ctx, fmt.Sprintf(`CREATE UNLOGGED TABLE %[1]s AS SELECT %[2]s FROM %[3]s WITH NO DATA; ALTER TABLE %[1]s ADD PRIMARY KEY (%[2]s)`, m.scratch(), keys, m.name))
	return err
}

// leaveMissing takes out of a page what the feed has already.
func (t *Target) leaveMissing(ctx context.Context, tx pgx.Tx, tab *table, page *seedPage) error {
	m := tab.mirror
	if err := t.makeScratch(ctx, tx, m); err != nil || len(page.keys) == 0 {
		return err
	}
	column := func(of string) func(int) string { return func(i int) string { return of + m.keys[i] } }
	rows, err := tx.Query(ctx, fmt.Sprintf(`SELECT k.n - 1 FROM (SELECT u.n, u.key::%[1]s AS row FROM unnest($1::text[]) WITH ORDINALITY AS u(key, n) OFFSET 0) k
		WHERE NOT EXISTS (SELECT FROM %[1]s m WHERE %[2]s) AND NOT EXISTS (SELECT FROM %[3]s m WHERE %[2]s) ORDER BY k.n`,
		m.name, tab.keyIs(column("m."), column("(k.row).")), m.scratch()), page.keys)
	if err != nil {
		return err
	}
	missing, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		return err
	}
	for to, from := range missing {
		page.rows[to], page.keys[to] = page.rows[from], page.keys[from]
	}
	page.rows, page.keys = page.rows[:len(missing)], page.keys[:len(missing)]
	return nil
}
