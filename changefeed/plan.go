package changefeed

import (
	"slices"
	"strconv"
	"time"

	"github.com/koldproxy/koldproxy"
)

// event is what one change did to one key.
type event struct {
	seq koldproxy.Seq
	op  koldproxy.Op
	lsn koldproxy.LSN
	at  time.Time // commit time
	// key are the values of the primary key as text, in its order; keyText is them as one string that is equal for equal
	// texts.
	key     []string
	keyText string
	// keyBefore is set on the insert that an update of the key becomes: the key that the row had.
	keyBefore []string
	// old and new are the rows in the order of the table's columns; nil where there is none.
	old, new []koldproxy.Datum
	// problem is why the event cannot be written, if that is known beforehand.
	problem string

	oldText, newText     *string // the rows as literals, once asked for
	oldJudged, newJudged *judged // what the eval session says about them, once asked
}

// tableEvents are the events of one table, in order.
type tableEvents struct {
	table  *table
	events []event
}

// plan is what a run of row changes means.
type plan struct {
	tables []*tableEvents
	count  int64 // events in all
	// unresolved are events with a toasted value that neither the log nor an earlier event of the plan carries.
	unresolved []*tableEvents
}

// makePlan turns row changes into events with seqs from first on: offset 0 for the first event, and so on. Tables that nothing
// is to be written for are left out. origin says where the values of today's columns are in a change's rows.
func makePlan(cat *catalog, changes []koldproxy.Change, origin func(*koldproxy.Change, *table) []int) plan {
	var p plan
	byTable := make(map[uint32]*tableEvents)
	for i := range changes {
		c := &changes[i]
		tab := cat.tables[c.Relation.OID]
		if tab == nil || tab.mirror == nil && len(tab.streams) == 0 {
			continue
		}
		te := byTable[tab.oid]
		if te == nil {
			te = &tableEvents{table: tab, events: make([]event, 0, len(changes)-i)}
			byTable[tab.oid] = te
			p.tables = append(p.tables, te)
		}
		from := origin(c, tab)
		old, now := tab.values(c.Old, from), tab.values(c.New, from)
		resolved := te.fillUnchanged(old, now)
		before := len(te.events)
		te.events = split(te.events, tab, c.Op, old, now)
		for k := before; k < len(te.events); k++ {
			e := &te.events[k]
			e.seq, e.lsn, e.at = koldproxy.Seq(p.count), c.CommitLSN, c.CommitTime
			p.count++
		}
		if !resolved && !slices.Contains(p.unresolved, te) {
			p.unresolved = append(p.unresolved, te)
		}
	}
	return p
}

// number turns the offsets that makePlan gave into positions.
func (p *plan) number(first koldproxy.Seq) {
	for _, te := range p.tables {
		for i := range te.events {
			te.events[i].seq += first
		}
	}
}

// split appends the events of one change: two if an update changes the key.
func split(dst []event, tab *table, op koldproxy.Op, old, now []koldproxy.Datum) []event {
	e := event{op: op, old: old, new: now}
	switch op {
	case koldproxy.OpInsert:
		e.old = nil
		e.setKey(tab, now)
	case koldproxy.OpDelete:
		e.new = nil
		e.setKey(tab, old)
	default:
		e.setKey(tab, now)
		if old == nil || e.problem != "" {
			break
		}
		if before := (event{op: koldproxy.OpDelete, old: old}); before.setKey(tab, old) && before.keyText != e.keyText {
			return append(dst, before, event{op: koldproxy.OpInsert, new: now, key: e.key, keyText: e.keyText, keyBefore: before.key})
		}
	}
	return append(dst, e)
}

// setKey takes the key from a row; it says false, and notes a problem, if the row does not carry it.
func (e *event) setKey(tab *table, row []koldproxy.Datum) bool {
	e.key = make([]string, len(tab.key))
	var b []byte
	for i, k := range tab.key {
		if k < 0 || k >= len(row) || row[k].Kind != koldproxy.DatumText {
			e.problem = "the change does not carry the primary key"
			return false
		}
		e.key[i] = row[k].Text
		if len(tab.key) > 1 {
			b = append(append(strconv.AppendInt(b, int64(len(row[k].Text)), 10), ':'), row[k].Text...)
		}
	}
	if e.keyText = string(b); len(tab.key) == 1 {
		e.keyText = e.key[0]
	}
	return true
}

// fillUnchanged replaces unchanged toasted values of a new row by what they are: from the old row, which carries them since
// the table's identity is FULL, else from the last earlier event of the same key. It says false if one is left.
func (te *tableEvents) fillUnchanged(old, now []koldproxy.Datum) bool {
	resolved := true
	var before []koldproxy.Datum
	for i := range now {
		if now[i].Kind != koldproxy.DatumUnchanged {
			continue
		}
		if known(old, i) {
			now[i] = old[i]
			continue
		}
		if before == nil {
			before = te.rowBefore(old, now)
		}
		if known(before, i) {
			now[i] = before[i]
		} else {
			resolved = false
		}
	}
	return resolved
}

// known says whether a row carries a column's value.
func known(row []koldproxy.Datum, i int) bool {
	return i < len(row) && (row[i].Kind == koldproxy.DatumText || row[i].Kind == koldproxy.DatumNull)
}

// rowBefore is the newest row of a key among the events so far, or nil. The key is that of the old row if there is one.
func (te *tableEvents) rowBefore(old, now []koldproxy.Datum) []koldproxy.Datum {
	var e event
	if !e.setKey(te.table, old) && !e.setKey(te.table, now) {
		return nil
	}
	for i := len(te.events) - 1; i >= 0; i-- {
		if te.events[i].keyText == e.keyText {
			return te.events[i].new
		}
	}
	return nil
}

// oldLiteral and newLiteral are the rows as literals of the table's row type, nil where there is none.
func (e *event) oldLiteral() *string { return literalOnce(&e.oldText, e.old) }
func (e *event) newLiteral() *string { return literalOnce(&e.newText, e.new) }

// dropLarge forgets the literals of large rows, which are not needed once they are judged, unless something is wrong with them.
func (e *event) dropLarge() {
	for _, text := range []**string{&e.oldText, &e.newText} {
		if *text != nil && len(**text) > evalBytes {
			*text = nil
		}
	}
}

func literalOnce(text **string, row []koldproxy.Datum) *string {
	if *text == nil && row != nil {
		s := rowLiteral(row)
		*text = &s
	}
	return *text
}
