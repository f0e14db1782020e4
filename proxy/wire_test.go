package proxy

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

var update = flag.Bool("update", false, "rewrite the expected answers in testdata/wire from what PostgreSQL says")

// Files in testdata/wire hold conversations. Lines:
//
//	# comment
//	case name [proxy]     a conversation in a database of its own; "proxy" means that PostgreSQL alone cannot have it;
//	                      [proxy, before 18] that PostgreSQL itself answers otherwise from that version on
//	setup SQL             run directly beforehand
//	> message             sent with the next wait
//	wait Z                send, then read until a message of that type; Z*3: until the third
//	< answer              what was read since the last wait; written by -update
//
// Messages are in the notation of parseMessage, answers in that of showMessage. Each case runs against PostgreSQL and
// through the proxy, with what is sent cut into pieces of several sizes, and has to give the same answers.
type wireCase struct {
	name   string
	proxy  bool
	before int // major version of PostgreSQL from which on it is not held; 0 for never
	setup  []string
	steps  []wireStep
	line   int
}

type wireStep struct {
	send  []byte
	wait  byte
	times int
	want  []string
	raw   []string // the lines of the step in the file, up to the wait
}

type wireFile struct {
	head  []string
	cases []*wireCase
}

func readWireFile(t *testing.T, path string) *wireFile {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	file := &wireFile{}
	var c *wireCase
	var pending wireStep
	for i, line := range strings.Split(strings.TrimRight(string(content), "\n"), "\n") {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "case":
			c = parseCase(t, rest)
			c.line = i + 1
			file.cases = append(file.cases, c)
		case "<":
			last := &c.steps[len(c.steps)-1]
			last.want = append(last.want, rest)
			continue
		case ">":
			pending.send = append(pending.send, parseMessage(t, rest)...)
		case "setup":
			c.setup = append(c.setup, rest)
		case "wait":
			typ, times, found := strings.Cut(rest, "*")
			pending.wait, pending.times = typ[0], 1
			if found {
				pending.times, _ = strconv.Atoi(times)
			}
			pending.raw = append(pending.raw, line)
			c.steps = append(c.steps, pending)
			pending = wireStep{}
			continue
		}
		if c == nil {
			file.head = append(file.head, line)
		} else {
			pending.raw = append(pending.raw, line)
		}
	}
	return file
}

// parseCase reads "name [proxy, before 18]".
func parseCase(t *testing.T, s string) *wireCase {
	t.Helper()
	name, flags, _ := strings.Cut(s, " [")
	c := &wireCase{name: name}
	if flags == "" {
		return c
	}
	for _, flag := range strings.Split(strings.TrimSuffix(flags, "]"), ", ") {
		version, ok := strings.CutPrefix(flag, "before ")
		switch {
		case flag == "proxy":
			c.proxy = true
		case ok:
			var err error
			if c.before, err = strconv.Atoi(version); err != nil {
				t.Fatalf("%s: %v", s, err)
			}
		default:
			t.Fatalf("%s: what is %q?", s, flag)
		}
	}
	return c
}

func (f *wireFile) write(t *testing.T, path string) {
	t.Helper()
	lines := f.head
	for _, c := range f.cases {
		for _, s := range c.steps {
			lines = append(lines, s.raw...)
			for _, w := range s.want {
				lines = append(lines, "< "+w)
			}
		}
	}
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// parseMessage reads a frontend message: its letter and its fields, strings in Go's quotes.
//
//	Q "sql"   P "name" "sql" [oid…]   B "portal" "statement" [arg|NULL…] [/ result format…]   D S|P "name"
//	E "portal" rows   C S|P "name"   S   H   X   F oid   d "data"   c   f "reason"   raw "bytes"
func parseMessage(t *testing.T, s string) []byte {
	t.Helper()
	words := splitWords(t, s)
	kind, args := words[0], words[1:]
	var body []byte
	str := func(s string) { body = append(append(body, s...), 0) }
	short := func(n int) { body = binary.BigEndian.AppendUint16(body, uint16(n)) }
	long := func(s string) {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatalf("%s: %v", s, err)
		}
		body = binary.BigEndian.AppendUint32(body, uint32(n))
	}
	switch kind {
	case "Q", "f":
		str(args[0])
	case "P":
		str(args[0])
		str(args[1])
		short(len(args) - 2)
		for _, oid := range args[2:] {
			long(oid)
		}
	case "B":
		str(args[0])
		str(args[1])
		var values, formats []string
		values = args[2:]
		for i, a := range values {
			if a == "/" {
				values, formats = values[:i], values[i+1:]
				break
			}
		}
		short(0)
		short(len(values))
		for _, v := range values {
			if v == "NULL" {
				body = append(body, 0xff, 0xff, 0xff, 0xff)
				continue
			}
			body = append(binary.BigEndian.AppendUint32(body, uint32(len(v))), v...)
		}
		short(len(formats))
		for _, f := range formats {
			n, _ := strconv.Atoi(f)
			short(n)
		}
	case "D", "C":
		body = append(body, args[0][0])
		str(args[1])
	case "E":
		str(args[0])
		long(args[1])
	case "F":
		long(args[0])
		short(0)
		short(0)
		short(0)
	case "d":
		body = []byte(args[0])
	case "S", "H", "X", "c":
	case "raw":
		return []byte(args[0])
	default:
		t.Fatalf("unknown message %q", s)
	}
	return appendMessage(nil, kind[0], body)
}

func splitWords(t *testing.T, s string) []string {
	t.Helper()
	var words []string
	for s = strings.TrimSpace(s); s != ""; s = strings.TrimSpace(s) {
		if s[0] == '"' {
			q, err := strconv.QuotedPrefix(s)
			if err != nil {
				t.Fatalf("%s: %v", s, err)
			}
			word, _ := strconv.Unquote(q)
			words, s = append(words, word), s[len(q):]
			continue
		}
		word, rest, _ := strings.Cut(s, " ")
		words, s = append(words, word), rest
	}
	return words
}

// showMessage writes a backend message so that two servers can be compared.
func showMessage(message []byte) string {
	typ, body := message[0], message[headerLen:]
	switch typ {
	case 'E', 'N':
		fs, _ := parseFields(body)
		var b strings.Builder
		b.WriteByte(typ)
		for _, f := range fs {
			if strings.IndexByte("FLR", f.code) < 0 { // where in PostgreSQL's source
				fmt.Fprintf(&b, " %c=%q", f.code, f.value)
			}
		}
		return b.String()
	case 'A':
		return fmt.Sprintf("A %q", body[4:])
	case 'C', 'S', 'd', 'v':
		return fmt.Sprintf("%c %q", typ, bytes.TrimRight(body, "\x00"))
	case 'Z':
		return "Z " + string(body)
	case 'D':
		var b strings.Builder
		b.WriteByte('D')
		for rest := body[2:]; len(rest) > 0; {
			n := int32(binary.BigEndian.Uint32(rest))
			rest = rest[4:]
			if n < 0 {
				b.WriteString(" NULL")
				continue
			}
			fmt.Fprintf(&b, " %q", rest[:n])
			rest = rest[n:]
		}
		return b.String()
	case 'T':
		var b strings.Builder
		b.WriteByte('T')
		for rest := body[2:]; len(rest) > 0; {
			name, r, _ := cString(rest)
			fmt.Fprintf(&b, " %q:%d:%d", name, binary.BigEndian.Uint32(r[6:]), binary.BigEndian.Uint16(r[16:]))
			rest = r[18:]
		}
		return b.String()
	case 't':
		var b strings.Builder
		b.WriteByte('t')
		for rest := body[2:]; len(rest) > 0; rest = rest[4:] {
			fmt.Fprintf(&b, " %d", binary.BigEndian.Uint32(rest))
		}
		return b.String()
	}
	if len(body) > 0 {
		return fmt.Sprintf("%c %x", typ, body)
	}
	return string(typ)
}

// wire is a client that speaks bytes.
type wire struct {
	conn net.Conn
	in   *stream
}

// send writes b in pieces; zero means whole.
func (w *wire) send(t testing.TB, b []byte, piece int) {
	t.Helper()
	if piece == 0 {
		piece = max(1, len(b))
	}
	for len(b) > 0 {
		n := min(piece, len(b))
		if _, err := w.conn.Write(b[:n]); err != nil {
			t.Errorf("send: %v", err)
			return
		}
		b = b[n:]
	}
}

// read returns the next message; "EOF" or the error at the end.
func (w *wire) read() ([]byte, error) {
	message, err := next(w.in, 64<<20, w.in.more(64<<20))
	if err != nil {
		return nil, err
	}
	w.in.r += len(message)
	return message, nil
}

// until reads up to the n-th message of a type, or to the end.
func (w *wire) until(typ byte, n int) []string {
	var got []string
	for n > 0 {
		message, err := w.read()
		if err != nil {
			if isEOF(err) || isReset(err) {
				return append(got, "EOF")
			}
			return append(got, err.Error())
		}
		got = append(got, showMessage(message))
		if message[0] == typ {
			n--
		}
	}
	return got
}

func TestWire(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/wire/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no conversations", err)
	}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			t.Parallel()
			p := startProxy(t, func(_ *Config, d *Deps) { d.Fulfiller = &fakeFulfiller{} })
			p.chunkedUpstream(t)
			file := readWireFile(t, path)
			shared := p.cluster.TestDatabase(t)
			major := p.cluster.Major
			for _, c := range file.cases {
				if c.before > 0 && major >= c.before {
					continue
				}
				t.Run(c.name, func(t *testing.T) { c.run(t, p, shared) })
			}
			if *update {
				file.write(t, path)
			}
		})
	}
}

func (c *wireCase) run(t *testing.T, p *proxied, dsn string) {
	if !c.proxy {
		c.play(t, "direct", dsn, dsn, 0)
	}
	for _, piece := range []int{0, 1, 3, 4096} {
		c.play(t, fmt.Sprintf("through the proxy in pieces of %d", piece), p.dsn(t, dsn), dsn, piece)
	}
}

// reset brings a database back to where it was before a play with setup.
const reset = "DROP SCHEMA IF EXISTS koldstore CASCADE; DROP SCHEMA public CASCADE; CREATE SCHEMA public"

// play has the conversation once. With -update the first play decides what is right.
func (c *wireCase) play(t *testing.T, how, dsn, direct string, piece int) {
	t.Helper()
	if len(c.setup) > 0 {
		conn, err := pgconn.Connect(within(t), direct)
		if err != nil {
			t.Fatal(err)
		}
		for _, sql := range append([]string{reset}, c.setup...) {
			if sql == "koldstore" {
				sql = standIn
			}
			if _, err := conn.Exec(within(t), sql).ReadAll(); err != nil {
				t.Fatalf("%s: %v", sql, err)
			}
		}
		_ = conn.Close(context.Background())
	}
	w := dialWire(t, dsn)
	defer w.conn.Close()
	for i := range c.steps {
		step := &c.steps[i]
		w.send(t, step.send, piece)
		got := w.until(step.wait, step.times)
		if *update && (how == "direct" || c.proxy && piece == 0) {
			step.want = got
		}
		if a, b := strings.Join(got, "\n"), strings.Join(step.want, "\n"); a != b {
			t.Errorf("line %d, %s, wait %d:\ngot:\n%s\nwant:\n%s", c.line, how, i+1, indent(a), indent(b))
			return
		}
	}
}

func indent(s string) string { return "    " + strings.ReplaceAll(s, "\n", "\n    ") }
