package proxy

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/koldproxy/koldproxy/rewrite"
)

// DemandNames may be implemented by a [Fulfiller]. DemandNames lists the views, functions and tables of a database whose use
// may raise a demand although the text of the statement does not call the functions that do. Statements with one of these
// names are then treated as those that call them. It may be called concurrently.
type DemandNames interface {
	DemandNames(ctx context.Context, database string) ([]string, error)
}

const (
	namesAge      = 10 * time.Second // how old the names of a database may become before they are asked for again
	namesTimeout  = 2 * time.Second  // how long a session waits for the first ones
	namesPatience = 30 * time.Second // how long they may take when nobody waits
	namesPause    = time.Second      // how long the catalog is left alone however much is created
	newsAge       = time.Minute      // how long a name that was just created counts without the catalog's word
	maxLearned    = 1000             // such names of a database, and those that a session has created
)

// asking knows the names of each database. Its zero value is ready.
type asking struct {
	mu sync.Mutex
	of map[string]*databaseNames
}

type databaseNames struct {
	mu       sync.Mutex
	set      nameSet // what the catalog has named, and the news; immutable once in use
	found    []string
	news     []newName   // what sessions have created, and the catalog may not have been asked for since
	others   definitions // what they have created of which nothing is known
	asked    time.Time
	outdated bool // somebody has created something since
	inFlight bool
}

type newName struct {
	name string
	at   time.Time
}

func (a *asking) database(name string) *databaseNames {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil {
		a.of = map[string]*databaseNames{}
	}
	d := a.of[name]
	if d == nil {
		d = &databaseNames{}
		a.of[name] = d
	}
	return d
}

// current returns the names. stale says that the caller is the one to renew them.
func (d *databaseNames) current(now time.Time) (set nameSet, stale bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	age := now.Sub(d.asked)
	stale = !d.inFlight && (age > namesAge || d.outdated && age > namesPause)
	d.inFlight = d.inFlight || stale
	return d.set, stale
}

// renew asks for the names. Names stay as they are when nobody knows.
func (d *databaseNames) renew(ctx context.Context, source DemandNames, database string) error {
	d.mu.Lock()
	d.outdated = false
	d.mu.Unlock()
	found, err := source.DemandNames(ctx, database)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inFlight, d.asked = false, time.Now()
	if err != nil {
		return err
	}
	d.found = found
	d.collect()
	return nil
}

// collect makes the set anew, without old news, and with what leads to the new ones.
func (d *databaseNames) collect() {
	now := time.Now()
	d.news = slices.DeleteFunc(d.news, func(n newName) bool { return n.at.Before(now.Add(-newsAge)) })
	var set nameSet
	for _, n := range d.found {
		set.add(n)
	}
	for _, n := range d.news {
		set.add(n.name)
	}
	d.note(d.others.leading(&set), now)
	d.set = set
}

// note adds to the news what outlives its session. Who may not create anything cannot draw the attention of others.
func (d *databaseNames) note(list []rewrite.Creation, now time.Time) (noted bool) {
	for _, c := range list {
		if !c.Temporary && len(d.news) < maxLearned {
			d.news, noted = append(d.news, newName{c.Name, now}), true
		}
	}
	return noted
}

// created has the names asked for again soon. Until then all sessions know what can be used by them.
func (d *databaseNames) created(list []rewrite.Creation) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.outdated = true
	if d.note(list, time.Now()) {
		d.collect()
	}
}

// defined keeps what was created in case that a name in it turns out to lead to a demand.
func (d *databaseNames) defined(x definition) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if x.creations = slices.DeleteFunc(slices.Clone(x.creations), func(c rewrite.Creation) bool { return c.Temporary }); len(x.creations) == 0 {
		return
	}
	d.others.add(x)
	if x.leads(&d.set) { // since the text was looked at
		d.outdated = true
		d.collect()
	}
}

// nameSet finds names in a text. Its zero value has none. Those of catalogs are immutable once in use.
type nameSet struct {
	beginning map[byte][]nameOf // by their first byte
	foreign   bool              // one has characters that another encoding spells otherwise
}

// nameOf is a name as a text spells it. One that is a keyword counts only where it must be a name: in quotes, or
// behind a dot. Who creates something called "select" is not to slow down every query.
type nameOf struct {
	name    string
	keyword bool
}

func (s *nameSet) add(name string) {
	if name == "" {
		return
	}
	if s.beginning == nil {
		s.beginning = map[byte][]nameOf{}
	}
	first, spelled := lowerASCII(name[0]), strings.ReplaceAll(name, `"`, `""`)
	s.beginning[first] = append(s.beginning[first], nameOf{spelled, rewrite.IsKeyword(strings.ToLower(name))})
	s.foreign = s.foreign || strings.IndexFunc(name, func(r rune) bool { return r >= 0x80 }) >= 0
}

// in says whether one of the names stands in a text, whatever its case and whatever it means there: taking a literal for a
// name costs a little time. Where characters are spelled otherwise than in UTF-8, those that are not ASCII may be a name.
func (s *nameSet) in(text []byte, encoding string) bool {
	if len(s.beginning) == 0 {
		return false
	}
	var first [256]bool
	for c := range s.beginning {
		first[c] = true
		if c >= 'a' && c <= 'z' {
			first[c-'a'+'A'] = true
		}
	}
	unsure := s.foreign && encoding != "" && encoding != "UTF8" && encoding != "UNICODE"
	for i, c := range text {
		if unsure && c >= 0x80 {
			return true
		}
		if !first[c] || i > 0 && isNameByte(text[i-1]) {
			continue
		}
		c = lowerASCII(c)
		for _, n := range s.beginning[c] {
			end := i + len(n.name)
			if end <= len(text) && (end == len(text) || !isNameByte(text[end])) && strings.EqualFold(string(text[i:end]), n.name) &&
				(!n.keyword || isNamePlace(text[:i])) {
				return true
			}
		}
	}
	return false
}

func lowerASCII(c byte) byte {
	if c >= 'A' && c <= 'Z' {
		c |= 0x20
	}
	return c
}

// isNamePlace says whether what follows a text cannot be a keyword.
func isNamePlace(before []byte) bool {
	before = bytes.TrimRight(before, " \t\r\n\f\v")
	return len(before) > 0 && (before[len(before)-1] == '"' || before[len(before)-1] == '.')
}

func isNameByte(c byte) bool {
	return c == '_' || c == '$' || c >= 0x80 || c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z'
}

// demandNames are the names of a database; nil when there is nobody who knows any. A session asks once, since it needs them
// for every statement.
func (s *Server) demandNames(database string) *databaseNames {
	if _, ok := s.deps.Fulfiller.(DemandNames); !ok {
		return nil
	}
	return s.asking.database(database)
}

// prime sees to it that the names are known when the session begins.
func (s *session) prime(ctx context.Context) {
	s.mu.Lock()
	s.tracker.watchful = s.intercept && s.server.deps.Fulfiller != nil
	s.mu.Unlock()
	d := s.names
	if d == nil {
		return
	}
	s.mu.Lock()
	s.tracker.onCreate, s.tracker.onDefine = d.created, d.defined
	s.mu.Unlock()
	if _, stale := d.current(time.Now()); stale {
		ctx, stop := context.WithTimeout(ctx, namesTimeout)
		defer stop()
		s.renewNames(ctx, d)
	}
}

func (s *session) renewNames(ctx context.Context, d *databaseNames) {
	if err := d.renew(ctx, s.server.deps.Fulfiller.(DemandNames), s.database); err != nil {
		s.log().Debug().Err(err).Msg("cannot ask for the names that may demand")
	}
}

// asks says whether a text may raise a demand because of a name in it. The catalog is asked again in the background.
func (s *session) asks(sql []byte) bool {
	d := s.names
	if d == nil {
		return false
	}
	s.mu.Lock()
	encoding := s.tracker.clientEncoding
	own := s.tracker.created.in(sql, encoding)
	s.mu.Unlock()
	set, stale := d.current(time.Now())
	if stale {
		s.renewing.Go(func() {
			defer s.server.recovered()
			ctx, stop := context.WithTimeout(s.life, namesPatience)
			defer stop()
			s.renewNames(ctx, d)
		})
	}
	return own || set.in(sql, encoding)
}
