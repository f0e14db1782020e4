package changefeed

import (
	"strconv"
	"unicode/utf8"
)

// liveEvent is an event as it is published; k, doc and old are JSON texts.
type liveEvent struct {
	id, op, k, doc string
	millis         int64
	old            *string
}

// payload is {"id":…,"op":…,"k":…,"ts":…,"doc":…,"prev":…}, with "old" before prev if the stream has it.
func (e *liveEvent) payload(prev string) []byte {
	b := make([]byte, 0, len(e.id)+len(e.k)+len(e.doc)+len(prev)+128)
	b = append(b, `{"id":"`...)
	b = append(b, e.id...)
	b = append(b, `","op":"`...)
	b = append(b, e.op...)
	b = append(b, `","k":`...)
	b = append(b, e.k...)
	b = append(b, `,"ts":`...)
	b = strconv.AppendInt(b, e.millis, 10)
	b = append(b, `,"doc":`...)
	b = append(b, e.doc...)
	if e.old != nil {
		b = append(b, `,"old":`...)
		b = append(b, *e.old...)
	}
	b = append(b, `,"prev":`...)
	if prev == "" {
		b = append(b, `null}`...)
		return b
	}
	b = append(b, '"')
	b = append(b, prev...)
	return append(b, `"}`...)
}

// channel is the NOTIFY channel of a stream. PostgreSQL cuts longer names after 63 bytes, in LISTEN too.
func channel(name string) string {
	const longest = 63
	c := "koldstore_stream_" + name
	if len(c) <= longest {
		return c
	}
	c = c[:longest]
	for !utf8.ValidString(c) {
		c = c[:len(c)-1]
	}
	return c
}
