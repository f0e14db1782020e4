package main

import (
	"context"

	"github.com/koldproxy/koldproxy/changefeed"
	"github.com/koldproxy/koldproxy/coldstore"
)

// coldPages shows a cold store to the change feed. The two packages do not know each other; their pages have the same shape.
type coldPages struct{ store *coldstore.Store }

// Page implements [changefeed.ColdPages].
func (c coldPages) Page(ctx context.Context, req changefeed.PageRequest) (changefeed.Page, error) {
	mode := coldstore.ModeForward
	if req.Mode == changefeed.PageLast {
		mode = coldstore.ModeLast
	}
	page, err := c.store.Page(ctx, coldstore.PageRequest{
		Table: req.Table, Generation: req.Generation, Segments: req.Segments, Mode: mode, After: req.After, Limit: req.Limit,
	})
	if err != nil {
		return changefeed.Page{}, err
	}
	rows := make([]changefeed.PageRow, len(page.Rows))
	for i, r := range page.Rows {
		rows[i] = changefeed.PageRow{Seq: r.Seq, Op: r.Op, PK: r.PK, Image: r.Image}
	}
	return changefeed.Page{Rows: rows, Through: page.Through, Complete: page.Complete}, nil
}
