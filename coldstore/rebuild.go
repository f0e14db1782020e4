package coldstore

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/parquet"

	"github.com/koldproxy/koldproxy"
)

// chunk is some rows of one row group, decoded. What it held before is overwritten by the next ones.
type chunk struct {
	f           *segmentFile
	op          typed[int32]
	exact       typed[parquet.ByteArray]
	missing, pk typed[parquet.ByteArray]
	columns     []codec // nil for those that were not read
}

// row builds row i. Its texts are appended to buf, which the rows of a chunk share; the longer one is returned.
func (c *chunk) row(i int, keysOnly bool, buf []byte) (Row, []byte, error) {
	row := Row{Op: koldproxy.Op(c.op.values[i])}
	var exact map[string]json.RawMessage // most rows have none
	if c.exact.present(i) {
		exact = map[string]json.RawMessage{}
		if err := eachMember(c.exact.value(i), func(key, value []byte) error {
			name, ok := unescape(key)
			if !ok {
				return errNotJSON
			}
			exact[name] = value
			return nil
		}); err != nil {
			return row, buf, err
		}
	}
	from := len(buf)
	if c.pk.present(i) {
		buf = append(buf, c.pk.value(i)...)
	} else {
		for n, k := range c.f.key {
			if k < 0 {
				return row, buf, fmt.Errorf("key column %q is nowhere", c.f.layout.key[n])
			}
			buf = c.member(buf, from, k, i, exact)
		}
		buf = endObject(buf, from)
	}
	row.PK = json.RawMessage(buf[from:len(buf):len(buf)])
	if keysOnly || row.Op == koldproxy.OpDelete {
		return row, buf, nil
	}
	var missing []string
	if c.missing.present(i) {
		if err := json.Unmarshal(c.missing.value(i), &missing); err != nil {
			return row, buf, err
		}
	}
	// Members that are no columns come in between, so that the text is the one that jsonb has.
	var extras []string
	for name := range exact {
		if _, ok := c.f.byName[name]; !ok {
			extras = append(extras, name)
		}
	}
	slices.SortFunc(extras, compareNames)
	from = len(buf)
	addExtra := func(name string) {
		buf = append(appendName(buf, from, appendString(nil, name)), exact[name]...)
	}
	for _, k := range c.f.order {
		if extras != nil || missing != nil {
			name := c.f.layout.columns[k].Name
			for len(extras) > 0 && compareNames(extras[0], name) < 0 {
				addExtra(extras[0])
				extras = extras[1:]
			}
			if slices.Contains(missing, name) {
				continue
			}
		}
		buf = c.member(buf, from, k, i, exact)
	}
	for _, name := range extras {
		addExtra(name)
	}
	buf = endObject(buf, from)
	row.Image = json.RawMessage(buf[from:len(buf):len(buf)])
	return row, buf, nil
}

// member appends column k of row i to the object that begins at from in buf, or would.
func (c *chunk) member(buf []byte, from, k, i int, exact map[string]json.RawMessage) []byte {
	name := c.f.names[k]
	if len(buf) == from {
		buf, name = append(buf, '{'), name[len(", "):]
	}
	buf = append(buf, name...)
	if exact != nil {
		if value, ok := exact[c.f.layout.columns[k].Name]; ok {
			return append(buf, value...)
		}
	}
	before := len(buf)
	if buf = c.columns[k].render(buf, i); len(buf) == before {
		buf = append(buf, "null"...)
	}
	return buf
}
