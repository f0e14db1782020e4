package integration_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// A file of testdata/wire holds conversations, each of which is had with PostgreSQL and, with what the client sends cut into
// pieces of several sizes, with koldproxy. All answers have to be the same. Lines:
//
//	# comment
//	case NAME
//	> TYPE {JSON}      a message of the client, by its name in pgproto3 and its fields
//	> raw "BYTES"      bytes in Go's notation
//	> copy "BYTES"     a CopyData with such bytes
//	wait TYPE          send, then read until a message of this type, or the end of the connection; TYPE*3: until the third
type trace struct {
	name  string
	steps []traceStep
}

type traceStep struct {
	send  []byte
	until string
	times int
}

// clientMessages are those that a trace can name.
var clientMessages = func() map[string]reflect.Type {
	types := map[string]reflect.Type{}
	for _, m := range []pgproto3.FrontendMessage{
		&pgproto3.Query{}, &pgproto3.Parse{}, &pgproto3.Bind{}, &pgproto3.Describe{}, &pgproto3.Execute{}, &pgproto3.Close{}, &pgproto3.Sync{},
		&pgproto3.Flush{}, &pgproto3.FunctionCall{}, &pgproto3.CopyDone{}, &pgproto3.CopyFail{}, &pgproto3.Terminate{},
	} {
		t := reflect.TypeOf(m).Elem()
		types[t.Name()] = t
	}
	return types
}()

func readTraces(t *testing.T, path string) (traces []*trace) {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var send []byte
	for i, line := range strings.Split(string(content), "\n") {
		word, rest, _ := strings.Cut(line, " ")
		switch word {
		case "", "#":
		case "case":
			traces = append(traces, &trace{name: rest})
		case ">":
			b, err := clientBytes(rest)
			if err != nil {
				t.Fatalf("%s, line %d: %v", path, i+1, err)
			}
			send = append(send, b...)
		case "wait":
			step := traceStep{send: send, times: 1}
			name, times, found := strings.Cut(rest, "*")
			if step.until = name; found {
				if _, err := fmt.Sscan(times, &step.times); err != nil {
					t.Fatalf("%s, line %d: %v", path, i+1, err)
				}
			}
			last := traces[len(traces)-1]
			last.steps, send = append(last.steps, step), nil
		default:
			t.Fatalf("%s, line %d: %q", path, i+1, line)
		}
	}
	return traces
}

// clientBytes are what a line of a trace sends.
func clientBytes(line string) ([]byte, error) {
	name, fields, _ := strings.Cut(line, " ")
	if name == "raw" || name == "copy" {
		s, err := strconv.Unquote(fields)
		if err != nil || name == "raw" {
			return []byte(s), err
		}
		return (&pgproto3.CopyData{Data: []byte(s)}).Encode(nil)
	}
	typ, ok := clientMessages[name]
	if !ok {
		return nil, fmt.Errorf("no message is called %q", name)
	}
	m := reflect.New(typ).Interface().(pgproto3.FrontendMessage)
	if fields != "" {
		if err := json.Unmarshal([]byte(fields), m); err != nil {
			return nil, err
		}
	}
	return m.Encode(nil)
}

// play has the conversation in a session of its own and returns the answers, one a line.
func (tr *trace) play(t *testing.T, dsn string, piece int) string {
	t.Helper()
	conn, err := pgconn.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	hijacked, err := conn.Hijack()
	if err != nil {
		t.Fatal(err)
	}
	defer hijacked.Conn.Close()
	deadline, _ := t.Deadline()
	_ = hijacked.Conn.SetDeadline(deadline)
	var out strings.Builder
	for _, step := range tr.steps {
		sent := make(chan error, 1)
		go func() { sent <- sendPieces(hijacked.Conn, step.send, piece) }()
		ended := readAnswers(&out, hijacked.Frontend, step)
		if err := <-sent; err != nil && !ended {
			t.Errorf("%s: send: %v", tr.name, err)
		}
	}
	return out.String()
}

func sendPieces(conn net.Conn, b []byte, piece int) error {
	for len(b) > 0 {
		n := min(piece, len(b))
		if _, err := conn.Write(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// readAnswers writes down what the server says. It is true when the connection has ended.
func readAnswers(out *strings.Builder, from *pgproto3.Frontend, step traceStep) bool {
	for left := step.times; left > 0; {
		m, err := from.Receive()
		if err != nil {
			if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || strings.Contains(err.Error(), "reset by peer") {
				err = errors.New("the end")
			}
			fmt.Fprintln(out, err)
			return true
		}
		name := reflect.TypeOf(m).Elem().Name()
		normalise(m)
		fields, err := json.Marshal(m)
		if err != nil {
			fields = []byte(err.Error())
		}
		fmt.Fprintln(out, name, string(fields))
		if name == step.until {
			left--
		}
	}
	return false
}

// normalise takes away what differs between two sessions.
func normalise(m pgproto3.BackendMessage) {
	switch m := m.(type) {
	case *pgproto3.NotificationResponse:
		m.PID = 1
	case *pgproto3.ErrorResponse:
		if strings.HasPrefix(m.SchemaName, "pg_temp_") {
			m.SchemaName = "pg_temp"
		}
	case *pgproto3.RowDescription:
		for i := range m.Fields {
			m.Fields[i].TableOID = min(m.Fields[i].TableOID, 1)
		}
	}
}

// TestTraces plays the conversations of testdata/wire directly and through a running koldproxy.
func TestTraces(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob("testdata/wire/*.txt")
	if err != nil || len(paths) == 0 {
		t.Fatal("no conversations", err)
	}
	inst := shared(t)
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			t.Parallel()
			for _, tr := range readTraces(t, path) {
				const whole = 1 << 30
				want := tr.play(t, inst.directDSN("demo", nil), whole)
				for _, piece := range []int{1, 3, 4096, whole} {
					if got := tr.play(t, inst.dsn("demo", nil), piece); got != want {
						t.Errorf("%s, in pieces of %d bytes: koldproxy says\n%s\nPostgreSQL says\n%s", tr.name, piece, got, want)
					}
				}
			}
		})
	}
}
