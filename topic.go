package koldproxy

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// TopicRoot is the first level of every topic that events are published to. Subscriptions that begin with a wildcard do
// not match it, as with $SYS.
const TopicRoot = "$stream"

// StreamTopic is the topic on which the events of a stream are published: $stream/<database>/<name>, or
// $stream/<database>/<schema>.<name> for a stream outside schema public. Characters that mean something in a topic, in a
// filter or in this notation (/ + # % . and control characters; the dot not in a database's name) are written as %XX, byte
// by byte, so that different streams always have different topics.
func StreamTopic(database, schema, name string) string {
	var b strings.Builder
	b.Grow(len(TopicRoot) + len(database) + len(schema) + len(name) + 3)
	b.WriteString(TopicRoot)
	b.WriteByte('/')
	escapeTopic(&b, database, false)
	b.WriteByte('/')
	if schema != "public" {
		escapeTopic(&b, schema, true)
		b.WriteByte('.')
	}
	escapeTopic(&b, name, true)
	return b.String()
}

// ParseStreamTopic is the inverse of [StreamTopic]. It accepts exactly what StreamTopic makes: no other spelling, no wildcard.
func ParseStreamTopic(topic string) (database, schema, name string, ok bool) {
	rest, found := strings.CutPrefix(topic, TopicRoot+"/")
	if !found {
		return "", "", "", false
	}
	first, second, found := strings.Cut(rest, "/")
	if !found {
		return "", "", "", false
	}
	schema = "public"
	if before, after, dotted := strings.Cut(second, "."); dotted {
		schema, second = unescapeTopic(before), after
	}
	database, name = unescapeTopic(first), unescapeTopic(second)
	if database == "" || schema == "" || name == "" || StreamTopic(database, schema, name) != topic {
		return "", "", "", false
	}
	return database, schema, name, true
}

const hexDigits = "0123456789ABCDEF"

func escapeTopic(b *strings.Builder, s string, dot bool) {
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		special := r == '/' || r == '+' || r == '#' || r == '%' || (dot && r == '.') || unicode.IsControl(r) ||
			(r == utf8.RuneError && size == 1)
		for _, c := range []byte(s[i : i+size]) {
			if special {
				b.WriteByte('%')
				b.WriteByte(hexDigits[c>>4])
				b.WriteByte(hexDigits[c&15])
			} else {
				b.WriteByte(c)
			}
		}
		i += size
	}
}

// unescapeTopic undoes escapeTopic; what is no escape stays as it is, for the caller compares the round trip.
func unescapeTopic(s string) string {
	if !strings.Contains(s, "%") {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			high, low := strings.IndexByte(hexDigits, s[i+1]), strings.IndexByte(hexDigits, s[i+2])
			if high >= 0 && low >= 0 {
				b = append(b, byte(high<<4|low))
				i += 2
				continue
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}
