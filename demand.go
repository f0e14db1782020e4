package koldproxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"slices"
)

// The kinds of a demand.
const (
	DemandColdPage = "cold_page" // rows from segments
	DemandFlush    = "flush"     // that a flush is carried out, and what came of it
)

// The modes of a cold page.
const (
	PageForward = "forward" // upward from a position
	PageLast    = "last"    // the newest rows
)

// Bounds of what a demand may ask for.
const (
	maxDemandBytes  = 8 << 20
	maxDemandRows   = 1 << 24 // a page's limit grows while rows of it are superseded
	maxDemandPieces = 100_000
)

// Demand is what an SQL function needs from koldproxy before it can answer (docs/architecture.md). It is only ever made by
// [ParseDemand], whose judgement holds: a value that was read from one text is judged, answered and sealed, so that no two
// readers of a text can take it for different demands. A demand is a value and must not be changed.
type Demand struct {
	Kind  string
	Table uint32 // OID

	// Of a cold page. Mode forward begins behind After.
	Generation int64
	Segments   []string // uuids in lower case, none twice
	Mode       string
	After      Seq
	Limit      int

	// Of a flush.
	Force bool
}

// wireDemand is a demand as JSON; nil is a field that is absent.
type wireDemand struct {
	Kind       *string   `json:"kind"`
	Table      *int64    `json:"table"`
	Generation *int64    `json:"generation,omitempty"`
	Segments   *[]string `json:"segments,omitempty"`
	Mode       *string   `json:"mode,omitempty"`
	After      *int64    `json:"after,omitempty"`
	Limit      *int64    `json:"limit,omitempty"`
	Force      *bool     `json:"force,omitempty"`
}

// ParseDemand reads a demand. The text is untrusted: anybody can raise one. Keys count as they are spelled, each once, and there
// are no others than those of the kind. The error is an [Error] with code 08P01.
func ParseDemand(text []byte) (Demand, error) {
	bad := func(why string) (Demand, error) {
		return Demand{}, Errorf(CodeProtocolViolation, "invalid demand: %s", why).
			WithHint("Demands are raised by koldstore's functions and by nobody else.")
	}
	if len(text) > maxDemandBytes {
		return bad("it is too long")
	}
	w, err := decodeDemand(text)
	if err != nil {
		return bad(err.Error())
	}
	if w.Kind == nil || w.Table == nil || *w.Table < 1 || *w.Table > math.MaxUint32 {
		return bad("it has a kind, and an OID for its table")
	}
	d := Demand{Kind: *w.Kind, Table: uint32(*w.Table)}
	page := w.Generation != nil || w.Segments != nil || w.Mode != nil || w.After != nil || w.Limit != nil
	switch d.Kind {
	case DemandFlush:
		if w.Force == nil || page {
			return bad("a flush has the fields table and force")
		}
		d.Force = *w.Force
		return d, nil
	case DemandColdPage:
	default:
		return bad("unknown kind")
	}
	switch {
	case w.Force != nil || w.Generation == nil || *w.Generation < 0:
		return bad("a page has a generation")
	case w.Segments == nil || len(*w.Segments) > maxDemandPieces || !areUUIDs(*w.Segments):
		return bad("a page has a bounded list of segments, none twice")
	case w.Limit == nil || *w.Limit < 1 || *w.Limit > maxDemandRows:
		return bad("a page has a limit of 1 to 16777216")
	case w.Mode == nil || *w.Mode != PageForward && *w.Mode != PageLast:
		return bad("unknown mode")
	case *w.Mode == PageForward && (w.After == nil || *w.After < 0):
		return bad("a forward page begins after a seq")
	case *w.Mode == PageLast && w.After != nil:
		return bad("a last page begins at the end")
	}
	d.Generation, d.Segments, d.Mode, d.Limit = *w.Generation, *w.Segments, *w.Mode, int(*w.Limit)
	if w.After != nil {
		d.After = Seq(*w.After)
	}
	return d, nil
}

// decodeDemand reads the fields of an object. encoding/json alone would take keys in any case, and the last of several.
func decodeDemand(text []byte) (w wireDemand, err error) {
	fields := map[string]any{
		"kind": &w.Kind, "table": &w.Table, "generation": &w.Generation, "segments": &w.Segments, "mode": &w.Mode,
		"after": &w.After, "limit": &w.Limit, "force": &w.Force,
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return w, errors.New("it is no object")
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return w, errors.New("it is not JSON")
		}
		name, _ := key.(string)
		field, ok := fields[name]
		if !ok {
			return w, errors.New("it has an unknown field, or one twice")
		}
		delete(fields, name)
		if err := dec.Decode(field); err != nil {
			return w, errors.New("a field has a value of another type")
		}
	}
	if _, err := dec.Token(); err != nil {
		return w, errors.New("it is not JSON")
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return w, errors.New("something follows it")
	}
	return w, nil
}

// areUUIDs says whether all are uuids as PostgreSQL writes them, and none is there twice.
func areUUIDs(list []string) bool {
	for _, u := range list {
		if len(u) != 36 {
			return false
		}
		for i, c := range []byte(u) {
			dash := i == 8 || i == 13 || i == 18 || i == 23
			if dash != (c == '-') || !dash && (c < '0' || c > '9') && (c < 'a' || c > 'f') {
				return false
			}
		}
	}
	sorted := slices.Sorted(slices.Values(list))
	return len(slices.Compact(sorted)) == len(list)
}

// MarshalJSON writes the demand in its canonical form, which is ASCII and on one line.
func (d Demand) MarshalJSON() ([]byte, error) {
	table := int64(d.Table)
	w := wireDemand{Kind: &d.Kind, Table: &table}
	if d.Kind == DemandFlush {
		w.Force = &d.Force
		return json.Marshal(w)
	}
	limit, after := int64(d.Limit), int64(d.After)
	w.Generation, w.Segments, w.Mode, w.Limit = &d.Generation, &d.Segments, &d.Mode, &limit
	if d.Mode == PageForward {
		w.After = &after
	}
	return json.Marshal(w)
}

// String is the canonical form.
func (d Demand) String() string {
	text, _ := d.MarshalJSON() // of numbers and short words
	return string(text)
}
