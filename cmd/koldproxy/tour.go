package main

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// tourText is the chapter "Tour" of README.md, word by word; a test compares the two.
//
//go:embed tour.md
var tourText string

// tourStep is one block of the tour together with the answer that follows it.
type tourStep struct {
	heading string // of the chapter that it opens, if any
	kind    string // the language of the block: sql, sh or json
	text    string
	want    string // what a sql block prints; empty when the text does not say
}

// parseTour reads the blocks of the tour. A block in the language text belongs to the sql block above it.
func parseTour(markdown string) ([]tourStep, error) {
	var steps []tourStep
	heading, kind := "", ""
	var block strings.Builder
	for n, line := range strings.Split(markdown, "\n") {
		switch {
		case kind == "" && strings.HasPrefix(line, "### "):
			heading = strings.TrimPrefix(line, "### ")
		case kind == "" && strings.HasPrefix(line, "```"):
			kind = strings.TrimPrefix(line, "```")
			block.Reset()
		case kind != "" && line == "```":
			switch kind {
			case "sql", "sh", "json":
				steps = append(steps, tourStep{heading: heading, kind: kind, text: block.String()})
				heading = ""
			case "text":
				if len(steps) == 0 || steps[len(steps)-1].kind != "sql" || steps[len(steps)-1].want != "" {
					return nil, fmt.Errorf("line %d of the tour: an answer without a question", n+1)
				}
				steps[len(steps)-1].want = block.String()
			default:
				return nil, fmt.Errorf("line %d of the tour: a block in the language %q", n+1, kind)
			}
			kind = ""
		case kind != "":
			block.WriteString(line + "\n")
		}
	}
	if kind != "" || len(steps) == 0 {
		return nil, fmt.Errorf("the tour ends within a block, or has none")
	}
	return steps, nil
}

// tour runs the tour through the proxy and the broker of a running koldproxy.
type tour struct {
	dsn    string // as the role demo, through the proxy
	broker string // host:port
	out    io.Writer

	conn   *pgconn.PgConn
	events *mqttSubscriber
	vars   map[string]string // set by \gset
	wrong  int
}

// tourStepTimeout bounds one block; a push that does not come in this time does not come.
const tourStepTimeout = 30 * time.Second

// run returns nil if every answer was the expected one.
func (t *tour) run(ctx context.Context, markdown string) error {
	steps, err := parseTour(markdown)
	if err != nil {
		return err
	}
	if t.conn, err = pgconn.Connect(ctx, t.dsn); err != nil {
		return fmt.Errorf("the tour connects through the proxy: %w", err)
	}
	defer t.conn.Close(context.WithoutCancel(ctx))
	defer func() {
		if t.events != nil {
			t.events.close()
		}
	}()
	t.vars = map[string]string{}
	for _, step := range steps {
		if err := t.step(ctx, step); err != nil {
			return err
		}
	}
	if t.wrong > 0 {
		return fmt.Errorf("%d of %d steps of the tour went wrong", t.wrong, len(steps))
	}
	_, err = fmt.Fprintf(t.out, "tour: all %d steps are right\n", len(steps))
	return err
}

func (t *tour) step(ctx context.Context, step tourStep) error {
	ctx, cancel := context.WithTimeout(ctx, tourStepTimeout)
	defer cancel()
	if step.heading != "" {
		if _, err := fmt.Fprintf(t.out, "# %s\n\n", step.heading); err != nil {
			return err
		}
	}
	shown, got, want := step.text, "", step.want
	var err error
	switch step.kind {
	case "sql":
		got, err = t.script(ctx, step.text)
	case "sh":
		err = t.subscribe(ctx, step.text)
	case "json":
		shown, want = "", step.text
		got, err = t.events.receive(ctx, strings.Count(step.text, "\n"))
	}
	if err != nil {
		return fmt.Errorf("%w, in this step of the tour:\n%s", err, step.text)
	}
	verdict := "right"
	switch {
	case step.kind == "sql" && want == "" && strings.Contains(got, "ERROR:"), want != "" && !matchLines(want, got):
		t.wrong++
		verdict = "WRONG, this was expected:\n" + want
	}
	_, err = fmt.Fprintf(t.out, "%s%s-- %s\n\n", shown, got, verdict)
	return err
}

// matchLines compares line by line, without trailing blanks; … in want stands for any text within a line.
func matchLines(want, got string) bool {
	wantLines, gotLines := lines(want), lines(got)
	if len(wantLines) != len(gotLines) {
		return false
	}
	for i, w := range wantLines {
		if !matchLine(w, gotLines[i]) {
			return false
		}
	}
	return true
}

func lines(text string) []string {
	all := strings.Split(strings.TrimRight(text, " \n"), "\n")
	for i := range all {
		all[i] = strings.TrimRight(all[i], " ")
	}
	return all
}

func matchLine(want, got string) bool {
	parts := strings.Split(want, "…")
	if len(parts) == 1 {
		return want == got
	}
	rest, ok := strings.CutPrefix(got, parts[0])
	if !ok {
		return false
	}
	for _, part := range parts[1 : len(parts)-1] {
		i := strings.Index(rest, part)
		if i < 0 {
			return false
		}
		rest = rest[i+len(part):]
	}
	return strings.HasSuffix(rest, parts[len(parts)-1])
}
