package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// script runs the statements of a block one by one, as psql does, and returns what psql would print.
func (t *tour) script(ctx context.Context, text string) (string, error) {
	var out strings.Builder
	for _, statement := range splitStatements(text) {
		sql, gset := strings.CutSuffix(statement, `\gset`)
		results, err := t.conn.Exec(ctx, t.interpolate(sql)).ReadAll()
		for _, r := range results {
			if gset {
				if len(r.Rows) != 1 {
					return "", fmt.Errorf(`\gset needs one row, there are %d`, len(r.Rows))
				}
				for i, f := range r.FieldDescriptions {
					t.vars[f.Name] = string(r.Rows[0][i])
				}
			} else if r.Err == nil {
				out.WriteString(psqlResult(r))
			}
		}
		var pgErr *pgconn.PgError
		switch {
		case errors.As(err, &pgErr):
			out.WriteString(psqlError(pgErr))
		case err != nil:
			return "", err
		}
	}
	return out.String(), nil
}

// splitStatements cuts a block behind each semicolon or \gset that ends a line.
func splitStatements(text string) []string {
	var statements []string
	var current strings.Builder
	for line := range strings.Lines(text) {
		current.WriteString(line)
		trimmed := strings.TrimSpace(line)
		if strings.HasSuffix(trimmed, ";") || strings.HasSuffix(trimmed, `\gset`) {
			statements = append(statements, strings.TrimSpace(current.String()))
			current.Reset()
		}
	}
	if rest := strings.TrimSpace(current.String()); rest != "" {
		statements = append(statements, rest)
	}
	return statements
}

var variable = regexp.MustCompile(`:('?)([a-z_]+)('?)`)

// interpolate replaces :name and :'name' by what \gset has set; everything else with a colon, as in ::text, stays.
func (t *tour) interpolate(sql string) string {
	return variable.ReplaceAllStringFunc(sql, func(match string) string {
		parts := variable.FindStringSubmatch(match)
		value, ok := t.vars[parts[2]]
		switch {
		case !ok || parts[1] != parts[3]:
			return match
		case parts[1] == "'":
			return "'" + strings.ReplaceAll(value, "'", "''") + "'"
		default:
			return value
		}
	})
}

func psqlError(e *pgconn.PgError) string {
	text := e.Severity + ":  " + e.Message + "\n"
	if e.Detail != "" {
		text += "DETAIL:  " + e.Detail + "\n"
	}
	if e.Hint != "" {
		text += "HINT:  " + e.Hint + "\n"
	}
	if e.Where != "" {
		text += "CONTEXT:  " + e.Where + "\n"
	}
	return text
}

// psqlResult prints a result in psql's aligned format: the table, or the command tag where there are no columns.
func psqlResult(r *pgconn.Result) string {
	if len(r.FieldDescriptions) == 0 {
		return r.CommandTag.String() + "\n"
	}
	widths := make([]int, len(r.FieldDescriptions))
	for i, f := range r.FieldDescriptions {
		widths[i] = utf8.RuneCountInString(f.Name)
		for _, row := range r.Rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(string(row[i])))
		}
	}
	var out strings.Builder
	for i, f := range r.FieldDescriptions {
		left := (widths[i] - utf8.RuneCountInString(f.Name)) / 2
		cell(&out, i, strings.Repeat(" ", left)+f.Name, widths[i], false)
	}
	out.WriteString("\n")
	for i, w := range widths {
		if i > 0 {
			out.WriteString("+")
		}
		out.WriteString(strings.Repeat("-", w+2))
	}
	out.WriteString("\n")
	for _, row := range r.Rows {
		for i, f := range r.FieldDescriptions {
			cell(&out, i, string(row[i]), widths[i], isNumber(f.DataTypeOID))
		}
		out.WriteString("\n")
	}
	plural := "s"
	if len(r.Rows) == 1 {
		plural = ""
	}
	fmt.Fprintf(&out, "(%d row%s)\n\n", len(r.Rows), plural)
	return out.String()
}

func cell(out *strings.Builder, column int, text string, width int, right bool) {
	if column > 0 {
		out.WriteString("|")
	}
	pad := strings.Repeat(" ", width-utf8.RuneCountInString(text))
	if right {
		text = pad + text
	} else {
		text += pad
	}
	out.WriteString(" " + text + " ")
}

// isNumber says whether psql aligns the type to the right.
func isNumber(oid uint32) bool {
	switch oid {
	case pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID, pgtype.NumericOID, pgtype.Float4OID, pgtype.Float8OID, pgtype.OIDOID:
		return true
	}
	return false
}
