package coldstore

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/parquet"

	"github.com/koldproxy/koldproxy"
)

// chunk is some rows of one row group, decoded.
type chunk struct {
	f           *segmentFile
	op          typed[int32]
	exact       typed[parquet.ByteArray]
	missing, pk typed[parquet.ByteArray]
	columns     []codec // nil for those that were not read
}

// row builds row i.
func (c *chunk) row(i int, keysOnly bool) (Row, error) {
	row := Row{Op: koldproxy.Op(c.op.values[i])}
	exact := map[string]json.RawMessage{}
	if c.exact.present(i) {
		if err := eachMember(c.exact.value(i), func(key, value []byte) error {
			name, ok := unescape(key)
			if !ok {
				return errNotJSON
			}
			exact[name] = value
			return nil
		}); err != nil {
			return row, err
		}
	}
	if c.pk.present(i) {
		row.PK = json.RawMessage(c.pk.value(i))
	} else {
		var w objectWriter
		for k, name := range c.f.layout.key {
			if c.f.key[k] < 0 {
				return row, fmt.Errorf("key column %q is nowhere", name)
			}
			w.add(c.f.quoted[c.f.key[k]], c.render(c.f.key[k], i, exact))
		}
		row.PK = w.finish()
	}
	if keysOnly || row.Op == koldproxy.OpDelete {
		return row, nil
	}
	missing := map[string]bool{}
	if c.missing.present(i) {
		var names []string
		if err := json.Unmarshal(c.missing.value(i), &names); err != nil {
			return row, err
		}
		for _, name := range names {
			missing[name] = true
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
	var w objectWriter
	for _, k := range c.f.order {
		name := c.f.layout.columns[k].Name
		for len(extras) > 0 && compareNames(extras[0], name) < 0 {
			w.add(appendString(nil, extras[0]), exact[extras[0]])
			extras = extras[1:]
		}
		if !missing[name] {
			w.add(c.f.quoted[k], c.render(k, i, exact))
		}
	}
	for _, name := range extras {
		w.add(appendString(nil, name), exact[name])
	}
	row.Image = w.finish()
	return row, nil
}

// render gives the raw value of column k in row i.
func (c *chunk) render(k, i int, exact map[string]json.RawMessage) []byte {
	if value, ok := exact[c.f.layout.columns[k].Name]; ok {
		return value
	}
	if value := c.columns[k].render(nil, i); len(value) > 0 {
		return value
	}
	return []byte("null")
}
