package koldproxy

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestStreamTopic(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ database, schema, name, topic string }{
		{"default", "public", "big_orders", "$stream/default/big_orders"},
		{"default", "app", "messages", "$stream/default/app.messages"},
		{"my.db", "public", "a.b", "$stream/my.db/a%2Eb"},
		{"x", "a.b", "c", "$stream/x/a%2Eb.c"},
		{"x", "S.é", `T "q"`, `$stream/x/S%2Eé.T "q"`},
		{"a/b+#", "public", "100%", "$stream/a%2Fb%2B%23/100%25"},
		{"x", "public", "line\nend\u0085", "$stream/x/line%0Aend%C2%85"},
	} {
		if got := StreamTopic(c.database, c.schema, c.name); got != c.topic {
			t.Errorf("StreamTopic(%q, %q, %q) = %q, want %q", c.database, c.schema, c.name, got, c.topic)
		}
		if d, s, n, ok := ParseStreamTopic(c.topic); !ok || d != c.database || s != c.schema || n != c.name {
			t.Errorf("ParseStreamTopic(%q) = %q, %q, %q, %v", c.topic, d, s, n, ok)
		}
	}
}

func TestParseStreamTopicAcceptsOneSpellingOnly(t *testing.T) {
	t.Parallel()
	for _, topic := range []string{
		"", "$stream", "$stream/", "$stream/d", "$stream/d/", "$stream//s", "$stream/d/s/", "$stream/d/s/t", "/$stream/d/s", "$STREAM/d/s",
		"$stream/d/public.s", "$stream/d/.s", "$stream/d/s.", "$stream/d/a.b.c", "$stream/+/s", "$stream/d/#", "$stream/d/+",
		"$stream/d/%73", "$stream/d/a%2eb", "$stream/d/a%", "$stream/d/a%2", "$stream/d/a\x00b", "$stream/d/\xff",
	} {
		if d, s, n, ok := ParseStreamTopic(topic); ok {
			t.Errorf("ParseStreamTopic(%q) = %q, %q, %q: accepted", topic, d, s, n)
		}
	}
}

func TestStreamTopicRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringN(1, 20, 63)
		database, schema, stream := name.Draw(t, "database"), name.Draw(t, "schema"), name.Draw(t, "stream")
		topic := StreamTopic(database, schema, stream)
		if strings.ContainsAny(topic, "+#\x00") || strings.Count(topic, "/") != 2 {
			t.Fatalf("%q is no topic of three levels", topic)
		}
		d, s, n, ok := ParseStreamTopic(topic)
		if !ok || d != database || s != schema || n != stream {
			t.Fatalf("%q came back as %q, %q, %q, %v", topic, d, s, n, ok)
		}
	})
}

func FuzzParseStreamTopic(f *testing.F) {
	f.Add("$stream/default/app.messages")
	f.Add("$stream/%/%2E")
	f.Fuzz(func(t *testing.T, topic string) {
		if d, s, n, ok := ParseStreamTopic(topic); ok && StreamTopic(d, s, n) != topic {
			t.Errorf("%q is accepted but is not what StreamTopic makes", topic)
		}
	})
}
