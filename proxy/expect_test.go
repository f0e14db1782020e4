package proxy

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// script feeds a tracker: ">x" is a client message, "<x" one of the server. Names follow in brackets: >P[s] >B[p,s] >E[p]
// >C[S,s]; an upper-case M behind a Parse marks it as interesting. <Z takes a status: <ZT.
func script(t *testing.T, tr *tracker, words string) []string {
	t.Helper()
	var origins []string
	for _, w := range strings.Fields(words) {
		kind := w[1]
		args := strings.Split(strings.Trim(w[2:], "[]"), ",")
		arg := func(i int) string {
			if i < len(args) {
				return args[i]
			}
			return ""
		}
		if w[0] == '>' {
			d := &detail{}
			switch kind {
			case msgParse, msgQuery:
				d.name = arg(0)
				if name, ok := strings.CutSuffix(d.name, "M"); ok {
					d.name, d.text = name, &text{mayDemand: true}
				}
			case msgBind:
				d.name, d.source = arg(0), arg(1)
			case msgExecute:
				d.name = arg(0)
			case msgClose, msgDescribe:
				d.target, d.name = 'S', arg(0)
			}
			tr.sent(kind, d)
			continue
		}
		var body []byte
		switch kind {
		case msgReady:
			body = []byte(w[2:])
		case msgComplete:
			body = zeroTerminated(strings.ReplaceAll(w[2:], "_", " "))
		}
		if o := tr.received(kind, body); o.text != nil {
			origins = append(origins, fmt.Sprintf("%c%d", kind, o.ordinal))
		}
	}
	return origins
}

func TestTracker(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		words   string
		origins string // answers that belong to interesting texts
		settled bool
	}{
		{"a batch", ">P[M] >B[,] >E[] >S <1 <2 <CCALL <ZI", "12C", true},
		{"nothing comes back for Flush", ">P[] >H <1 >H", "", true},
		{"an error voids up to Sync", ">P[] >B[,] >E[] >Q[M] >S >Q[M] <1 <E <ZI <C <ZI", "C", true},
		{"an error of a Query does not", ">Q[] >Q[M] <E <ZI <C <ZI", "C", true},
		{"what comes after an error is void", ">P[] <E >Q[M] >S <ZI >Q[M] <C <ZI", "C", true},
		{"ordinals", ">Q[M] <C <C <I <T <D <C <ZI", "CCITC", true},
		{"COPY ignores Sync", ">P[] >B[,] >E[] >S >d >c >S >Q[M] <1 <2 <G <C <ZI <C <ZI", "C", true},
		{"COPY ignores Sync that comes later", ">P[] >B[,] >E[] <1 <2 <G >S >H >d >c >S >Q[M] <C <ZI <C <ZI", "C", true},
		{"a COPY that fails ahead of its data", ">P[] >B[,] >E[] >S >d >c >S >Q[M] <1 <2 <E <ZI <ZI <C <ZI", "C", true},
		{"a COPY whose Sync is in doubt", ">P[] >B[,] >E[] >S <1 <2 <G <E <ZI >d >c >S <ZI >Q[M] <C <ZI", "C", true},
		{"two COPYs in one Query", ">Q[] <G >d >c <C <G >d >c <C <ZI >Q[M] <C <ZI", "C", true},
		{"an error at Sync", ">P[] >B[,] >E[] >S >Q[M] <1 <2 <C <E <ZI <C <ZI", "C", true},
		{"function calls", ">F >F >Q[M] <V <ZI <E <ZI <C <ZI", "C", true},
		{"names replaced", ">P[aM] >P[b] >B[,a] >E[] >S <1 <1 <2 <C <ZI >C[a] >P[a] >B[,a] >E[] >S <3 <1 <2 <C <ZI", "12C", true},
		{"a failed Parse changes nothing", ">P[aM] >S <1 <ZI >P[a] >S <E <ZI >B[,a] >E[] >S <2 <C <ZI", "12C", true},
		{"a Query destroys the unnamed", ">P[M] >S <1 <ZI >Q[] <C <ZI >B[,] >S <E <ZI", "1", true},
		{"DEALLOCATE ALL", ">P[aM] >S <1 <ZI >Q[] <CDEALLOCATE_ALL <ZI >B[,a] >S <E <ZI", "1", true},
		{"portals end with their transaction", ">P[aM] >B[p,a] >S <1 <2 <ZI >E[p] >S <E <ZI", "12", true},
		{"and not before", ">P[aM] >B[p,a] >S <1 <2 <ZT >E[p] >S <C <ZT", "12C", true},
		{"row limits", ">P[aM] >B[p,a] >E[p] >E[p] >S <1 <2 <s <C <ZI", "12sC", true},
		{"unexpected answers do no harm", "<1 <2 <C <ZI >Q[M] <ZI <C <ZI", "C", true},
		{"asynchronous messages", ">P[M] <A <S <N <1 <N >S <ZI", "N1", true},
	} {
		tr := newTracker()
		got := script(t, tr, c.words)
		letters := ""
		for _, o := range got {
			letters += o[:1]
		}
		if letters != c.origins || tr.settled() != c.settled {
			t.Errorf("%s: answers %q, settled %t", c.name, got, tr.settled())
		}
	}
	tr := newTracker()
	if got := script(t, tr, ">Q[M] <C <C <I <C"); !slices.Equal(got, []string{"C0", "C1", "I2", "C3"}) {
		t.Errorf("ordinals %q", got)
	}
}

// TestTrackerFollowsAServer drives a tracker and a model of the server with random batches, and lets the answers lag
// behind. Each answer must be attributed to the message that caused it.
func TestTrackerFollowsAServer(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tr := newTracker()
		type answer struct {
			typ  byte
			text *text
		}
		var owed []answer // what the server is going to say
		skipping := false // the server's state
		receive := func() {
			a := owed[0]
			owed = owed[1:]
			var body []byte
			if a.typ == msgReady {
				body = []byte("I")
			}
			if o := tr.received(a.typ, body); a.typ != msgReady && o.text != a.text {
				t.Fatalf("answer %c is attributed wrongly", a.typ)
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "messages") {
			for len(owed) > 0 && rapid.Bool().Draw(t, "receive") {
				receive()
			}
			kind := rapid.SampledFrom([]byte{msgQuery, msgParse, msgSync, msgSync, msgFlush, msgFunction}).Draw(t, "kind")
			fails := rapid.IntRange(0, 3).Draw(t, "fails") == 0
			d := &detail{name: "s"}
			if kind == msgQuery || kind == msgParse {
				d.text = &text{}
			}
			tr.sent(kind, d)
			if skipping && kind != msgSync {
				continue
			}
			switch kind {
			case msgQuery:
				n := rapid.IntRange(0, 3).Draw(t, "statements")
				for range n {
					owed = append(owed, answer{msgComplete, d.text})
				}
				if fails {
					owed = append(owed, answer{msgError, d.text})
				} else if n == 0 {
					owed = append(owed, answer{msgEmpty, d.text})
				}
				owed = append(owed, answer{msgReady, nil})
			case msgParse:
				if fails {
					skipping = true
					owed = append(owed, answer{msgError, d.text})
				} else {
					owed = append(owed, answer{msgParsed, d.text})
				}
			case msgFunction:
				typ := byte(msgFunctionResult)
				if fails {
					typ = msgError
				}
				owed = append(owed, answer{typ, nil}, answer{msgReady, nil})
			case msgSync:
				skipping = false
				owed = append(owed, answer{msgReady, nil})
			}
		}
		for len(owed) > 0 {
			receive()
		}
		if !tr.settled() || tr.skipping != skipping {
			t.Fatalf("settled %t, skipping %t, the server %t", tr.settled(), tr.skipping, skipping)
		}
	})
}

// FuzzTracker feeds arbitrary messages in both directions: it must neither panic nor remember more than was sent.
func FuzzTracker(f *testing.F) {
	f.Add([]byte("PBES\x80\x81\x82Z"))
	f.Add([]byte("QG\x00cSHc"))
	f.Fuzz(func(t *testing.T, data []byte) {
		tr := newTracker()
		kinds := "QPBDEHSCFcfdXp"
		answers := "123TtnDCIsEZVGWHdcANS"
		for i, b := range data {
			if b < 0x80 {
				var d *detail
				if i%3 > 0 {
					d = &detail{name: string('a' + rune(i%3)), source: "b", target: "SP"[i%2]}
					if i%5 == 0 {
						d.text = &text{mayDemand: i%2 == 0}
					}
				}
				tr.sent(kinds[int(b)%len(kinds)], d)
			} else {
				typ := answers[int(b)%len(answers)]
				var body []byte
				if tr.needsBody(typ, 5) {
					body = []byte{"ITE"[i%3]}
				}
				tr.received(typ, body)
			}
			if tr.queue.len() > i+1 {
				t.Fatal("the queue grows by itself")
			}
			tr.idle()
			tr.mightDemand("a")
		}
	})
}

// An implicit transaction is open until its Sync, however much of it has been answered.
func TestIdleBatches(t *testing.T) {
	t.Parallel()
	tr := newTracker()
	say := func(want bool, sent, received string) {
		t.Helper()
		for _, kind := range []byte(sent) {
			tr.sent(kind, nil)
		}
		for _, typ := range []byte(received) {
			var body []byte
			if typ == msgReady {
				body = []byte("I")
			}
			tr.received(typ, body)
		}
		if tr.idle() != want {
			t.Errorf("behind %s and %s: idle is %t", sent, received, !want)
		}
	}
	say(true, "Q", "CZ")
	say(false, "P", "")
	say(false, "BEH", "12C")
	say(false, "BE", "2C")
	say(false, "S", "")
	say(true, "", "Z")
	say(false, "PBES", "12C")
	say(false, "P", "Z")
	say(false, "H", "1")
	say(true, "S", "Z")
	say(false, "PBESdcS", "12G") // a COPY, as libpq has it
	say(true, "", "CZ")
	say(false, "PBES", "12G") // the Sync comes to nothing
	say(false, "dc", "C")
	say(true, "S", "Z")
	say(false, "PB", "E")
	say(true, "S", "Z")
}
