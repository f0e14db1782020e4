package proxy

import (
	"slices"

	"github.com/koldproxy/koldproxy/rewrite"
)

// definition is a text that creates or changes something, and has no name in it of which it is known that it leads to a demand. One
// may turn out to later: functions are often created before what they call.
type definition struct {
	creations     []rewrite.Creation
	sql, encoding string
}

const (
	maxDefinitions     = 1000
	maxDefinitionBytes = 256 << 10 // of their texts
)

// definitions are the latest ones. Its zero value is ready.
type definitions struct {
	list  []definition
	bytes int
}

// add keeps one more and forgets the oldest if they are too many.
func (d *definitions) add(x definition) {
	d.list = append(d.list, x)
	d.bytes += len(x.sql)
	old := 0
	for ; len(d.list)-old > maxDefinitions || d.bytes > maxDefinitionBytes; old++ {
		d.bytes -= len(d.list[old].sql)
	}
	d.list = slices.Delete(d.list, 0, old)
}

// leads says whether a name of set stands in the text.
func (x *definition) leads(set *nameSet) bool { return set.in([]byte(x.sql), x.encoding) }

// leading takes out those with a name of set in them and adds what they create to it, until none is left. It returns what that is.
func (d *definitions) leading(set *nameSet) (all []rewrite.Creation) {
	for before := -1; before != len(all); {
		before = len(all)
		d.list = slices.DeleteFunc(d.list, func(x definition) bool {
			if !x.leads(set) {
				return false
			}
			d.bytes -= len(x.sql)
			all = append(all, x.creations...)
			for _, c := range x.creations {
				set.add(c.Name)
			}
			return true
		})
	}
	return all
}

// defining notes a text that is about to be sent and creates something that is not known to lead to a demand.
func (s *session) defining(sql string, options rewrite.Options) {
	outline, _ := rewrite.OutlineOf(sql, options)
	if len(outline.Creations) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tracker.announced.add(definition{outline.Creations, sql, options.ClientEncoding})
}

// define counts what was announced as created: a statement has ended that creates something. Which one is not known, nor has to be,
// since the names mean something only once others do.
func (t *tracker) define() {
	announced := t.announced
	t.announced = definitions{}
	leads := false
	for _, x := range announced.list {
		t.others.add(x)
		leads = leads || x.leads(&t.created)
		if t.onDefine != nil {
			t.onDefine(x)
		}
	}
	if leads { // by something that was created since the text was looked at
		t.lead()
	}
}

// learn adds what was created to the names of the session, for its statements that come before the catalog is asked again.
func (t *tracker) learn(list []rewrite.Creation) {
	for _, c := range list {
		if t.learned++; t.learned <= maxLearned {
			t.created.add(c.Name)
		}
	}
	t.lead()
	if t.onCreate != nil {
		t.onCreate(list)
	}
}

// lead adds to the names of the session what leads to them.
func (t *tracker) lead() {
	if t.learned <= maxLearned {
		t.learned += len(t.others.leading(&t.created))
	}
}
