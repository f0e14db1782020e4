package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
)

func main() {
	if len(os.Args) != 4 || (os.Args[1] != "stream" && os.Args[1] != "feed") {
		fmt.Fprintln(os.Stderr, "usage: DATABASE_URL=postgres://… consumer stream|feed TABLE POSITION_FILE")
		os.Exit(2)
	}
	if err := run(context.Background(), os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, kind, table, file string) error {
	position, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for next := string(position); ; {
		if kind == "stream" {
			next, err = streamPage(ctx, conn, table, next)
		} else {
			next, err = feedPage(ctx, conn, table, next)
		}
		if err != nil || next == "" { // failed, or caught up
			return err
		}
		if err := remember(file, next); err != nil {
			return err
		}
	}
}

// streamPage processes the events behind an id and returns the last one's id; empty if there were none.
func streamPage(ctx context.Context, conn *pgx.Conn, log, after string) (last string, err error) {
	query := "SELECT id, op, k::text, doc::text FROM " + pgx.Identifier(strings.Split(log, ".")).Sanitize() + " ORDER BY id LIMIT 500"
	var args []any
	if after != "" {
		query += " AFTER ($1)"
		args = append(args, after)
	}
	rows, err := conn.Query(ctx, query, args...)
	if err != nil {
		return "", err
	}
	var op, key, doc string
	_, err = pgx.ForEachRow(rows, []any{&last, &op, &key, &doc}, func() error {
		_, err := fmt.Fprintln(os.Stdout, last, op, key, doc)
		return err
	})
	return last, err
}

// feedPage processes the changes behind a seq and returns the last one's seq; empty if there were none.
func feedPage(ctx context.Context, conn *pgx.Conn, table, since string) (last string, err error) {
	if since == "" {
		since = "0"
	}
	rows, err := conn.Query(ctx, `SELECT seq::text, op, pk::text, row_image::text, source
		FROM koldstore.changes_since($1, since_seq => $2)`, table, since)
	if err != nil {
		return "", err
	}
	var op int
	var key, source string
	var image *string // nil for a deleted row
	_, err = pgx.ForEachRow(rows, []any{&last, &op, &key, &image, &source}, func() error {
		row := "null"
		if image != nil {
			row = *image
		}
		_, err := fmt.Fprintln(os.Stdout, last, op, key, row, source)
		return err
	})
	return last, err
}

// remember replaces the position file in one step, so that a crash leaves the old position or the new one.
func remember(file, position string) error {
	if err := os.WriteFile(file+".new", []byte(position), 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}
