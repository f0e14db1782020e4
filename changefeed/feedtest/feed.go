package feedtest

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// FeedRow is a row of koldstore.changes_since; PK and Image are the text of the jsonb, Image empty for NULL.
type FeedRow struct {
	Seq     int64
	Op      int16
	PK      string
	Deleted bool
	Image   string
	Source  string
}

// Page calls koldstore.changes_since once. table is its name as SQL.
func Page(ctx context.Context, q Querier, table string, since int64, limit int) ([]FeedRow, error) {
	rows, err := q.Query(ctx, `SELECT seq, op, pk::text, deleted, coalesce(row_image::text, ''), source
		FROM koldstore.changes_since($1::text::regclass, since_seq => $2, limit_rows => $3)`, table, since, limit)
	if err != nil {
		return nil, fmt.Errorf("changes of %s since %d: %w", table, since, err)
	}
	page, err := pgx.CollectRows(rows, pgx.RowToStructByPos[FeedRow])
	if err != nil {
		return nil, fmt.Errorf("changes of %s since %d: %w", table, since, err)
	}
	return page, nil
}

// DrainFeed reads a feed from the retained beginning to its end in pages of limit rows. It is an error if a seq does not
// ascend, a key comes twice, a row contradicts itself, or a page is short with another one behind it.
func DrainFeed(ctx context.Context, q Querier, table string, limit int) ([]FeedRow, error) {
	var all []FeedRow
	var errs []error
	seen := make(map[string]int64)
	cursor := int64(0)
	short := false
	for {
		page, err := Page(ctx, q, table, cursor, limit)
		if err != nil {
			return all, err
		}
		if len(page) > limit {
			errs = append(errs, fmt.Errorf("a page of %d rows has %d", limit, len(page)))
		}
		if short && len(page) > 0 {
			errs = append(errs, fmt.Errorf("a page was short and %d rows follow seq %d", len(page), cursor))
		}
		short = len(page) < limit
		for _, r := range page {
			if r.Seq <= cursor {
				errs = append(errs, fmt.Errorf("seq %d follows %d", r.Seq, cursor))
			}
			cursor = r.Seq
			if other, twice := seen[r.PK]; twice {
				errs = append(errs, fmt.Errorf("key %s comes twice, with seq %d and %d", r.PK, other, r.Seq))
			}
			seen[r.PK] = r.Seq
			if r.Op < 1 || r.Op > 3 || r.Deleted != (r.Op == 3) || r.Deleted != (r.Image == "") {
				errs = append(errs, fmt.Errorf("seq %d contradicts itself: op %d, deleted %v, image %q", r.Seq, r.Op, r.Deleted, shorten(r.Image)))
			}
		}
		all = append(all, page...)
		if len(page) == 0 {
			return all, errors.Join(errs...)
		}
	}
}

// CheckFeed drains a feed and compares it with the table: the live rows are the table's, and a tombstone's key is not in it.
// ever are the keys that the table has ever had while it was managed (pk as jsonb text); each that is gone must have a
// tombstone. Nil leaves that out. key is the SQL of pk for a row t of the table, as jsonb_build_object('id', t.id).
func CheckFeed(ctx context.Context, q Querier, table, key string, limit int, ever []string) error {
	feed, drained := DrainFeed(ctx, q, table, limit)
	rows, err := q.Query(ctx, fmt.Sprintf(`SELECT (%s)::text, to_jsonb(t.*)::text FROM %s t`, key, table))
	if err != nil {
		return errors.Join(drained, fmt.Errorf("read table %s: %w", table, err))
	}
	want, err := collectPairs(rows)
	if err != nil {
		return errors.Join(drained, fmt.Errorf("read table %s: %w", table, err))
	}
	live, tombs := make(map[string]string), make(map[string]bool)
	for _, r := range feed {
		if r.Deleted {
			tombs[r.PK] = true
		} else {
			live[r.PK] = r.Image
		}
	}
	errs := []error{drained, compare("feed of "+table, live, want)}
	for _, k := range ever {
		if _, there := want[k]; !there && !tombs[k] {
			errs = append(errs, fmt.Errorf("feed of %s: key %s was deleted and has no tombstone", table, k))
		}
	}
	return errors.Join(errs...)
}
