package proxy

import (
	"context"
	"regexp"
	"strings"
	"sync"
	"time"
)

// DemandNames may be implemented by a [Fulfiller]. DemandNames lists the views, functions and tables of a database whose use
// may raise a demand although the text of the statement does not call the functions that do. Statements with one of these
// names are then treated as those that call them. It may be called concurrently.
type DemandNames interface {
	DemandNames(ctx context.Context, database string) ([]string, error)
}

const (
	namesAge     = 10 * time.Second // how old the names of a database may become before they are asked for again
	namesTimeout = 2 * time.Second  // how long a session waits for the first ones
	learnedAge   = time.Hour        // how long a name is remembered that the catalog does not have
	maxLearned   = 1000
)

// asking knows the names of each database. Its zero value is ready.
type asking struct {
	mu sync.Mutex
	of map[string]*databaseNames
}

type databaseNames struct {
	mu       sync.Mutex
	set      nameSet
	catalog  []string
	learned  map[string]time.Time // by text that went by
	asked    time.Time
	inFlight bool
}

func (a *asking) database(name string) *databaseNames {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil {
		a.of = map[string]*databaseNames{}
	}
	d := a.of[name]
	if d == nil {
		d = &databaseNames{learned: map[string]time.Time{}}
		a.of[name] = d
	}
	return d
}

// current returns the names. stale says that the caller is the one to renew them.
func (d *databaseNames) current(now time.Time) (set nameSet, stale bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	stale = !d.inFlight && now.Sub(d.asked) > namesAge
	d.inFlight = d.inFlight || stale
	return d.set, stale
}

// renew asks for the names. Names stay as they are when nobody knows.
func (d *databaseNames) renew(ctx context.Context, source DemandNames, database string) error {
	found, err := source.DemandNames(ctx, database)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.inFlight, d.asked = false, time.Now()
	if err != nil {
		return err
	}
	d.catalog = found
	for name, at := range d.learned {
		if time.Since(at) > learnedAge {
			delete(d.learned, name)
		}
	}
	d.build()
	return nil
}

// learn adds a name at once, for the statements that come before the catalog is asked again.
func (d *databaseNames) learn(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.learned) >= maxLearned {
		clear(d.learned)
	}
	d.learned[strings.ToLower(name)] = time.Now()
	d.asked = time.Time{}
	d.build()
}

func (d *databaseNames) build() {
	set := nameSet{}
	for _, n := range d.catalog {
		set.add(strings.ToLower(n))
	}
	for n := range d.learned {
		set.add(n)
	}
	d.set = set
}

// nameSet finds names in a text; nil has none. It is immutable once in use.
type nameSet map[byte][]string

func (s nameSet) add(name string) {
	if name != "" {
		s[name[0]] = append(s[name[0]], name)
	}
}

// in says whether one of the names stands in a text, whatever its case and whatever it means there: taking a literal for a
// name costs a little time.
func (s nameSet) in(text []byte) bool {
	if len(s) == 0 {
		return false
	}
	var first [256]bool
	for c := range s {
		first[c] = true
		if c >= 'a' && c <= 'z' {
			first[c-'a'+'A'] = true
		}
	}
	for i, c := range text {
		if !first[c] || i > 0 && isNameByte(text[i-1]) {
			continue
		}
		if c >= 'A' && c <= 'Z' {
			c |= 0x20
		}
		for _, name := range s[c] {
			end := i + len(name)
			if end <= len(text) && (end == len(text) || !isNameByte(text[end])) && strings.EqualFold(string(text[i:end]), name) {
				return true
			}
		}
	}
	return false
}

func isNameByte(c byte) bool {
	return c == '_' || c == '$' || c >= 0x80 || c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z'
}

// created finds the names of what a text creates that may hide a call.
var created = regexp.MustCompile(`(?is)\bcreate` + gap + `+(?:or` + gap + `+replace` + gap + `+)?(?:(?:temp|temporary|recursive|materialized)` + gap + `+)*` +
	`(?:view|function|procedure|(?:constraint` + gap + `+)?trigger\b[^;]*?\bon)` + gap + `+(?:if` + gap + `+not` + gap + `+exists` + gap + `+)?` +
	`(?:` + namePattern + gap + `*\.` + gap + `*)?(` + namePattern + `)`)

const namePattern = `(?:"(?:[^"]|"")+"|[\w$\x{80}-\x{10ffff}]+)`

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
	if _, stale := d.current(time.Now()); stale {
		ctx, stop := context.WithTimeout(ctx, namesTimeout)
		defer stop()
		s.renewNames(ctx, d)
	}
}

func (s *session) renewNames(ctx context.Context, d *databaseNames) {
	if err := d.renew(ctx, s.server.deps.Fulfiller.(DemandNames), s.database); err != nil {
		s.log.Debug().Err(err).Msg("cannot ask for the names that may demand")
	}
}

// asks says whether a text may raise a demand because of a name in it. The catalog is asked again in the background.
func (s *session) asks(sql []byte) bool {
	d := s.names
	if d == nil {
		return false
	}
	set, stale := d.current(time.Now())
	if stale {
		s.renewing.Go(func() {
			defer s.server.recovered()
			ctx, stop := context.WithTimeout(context.Background(), namesTimeout)
			defer stop()
			s.renewNames(ctx, d)
		})
	}
	return set.in(sql)
}

// learn notes what a text creates that mentions a demand.
func (s *session) learn(sql string) {
	d := s.names
	if d == nil {
		return
	}
	for _, m := range created.FindAllStringSubmatch(sql, -1) {
		name := m[1]
		if name[0] == '"' {
			name = strings.ReplaceAll(name[1:len(name)-1], `""`, `"`)
		}
		d.learn(name)
	}
}
