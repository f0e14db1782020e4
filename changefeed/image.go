package changefeed

import (
	"cmp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/koldproxy/koldproxy"
)

// A row image is what to_jsonb says of the row, and mostly the server is not needed to say it: for PostgreSQL's own types the
// JSON of a value follows from its text (datum_to_jsonb in utils/adt/jsonb.c), and nobody can change how. The session
// that runs code of users is asked about the other tables.

// renderer appends the JSON of a value, of which it gets the text that the type's output function makes under the settings
// of the applier.
type renderer func(b []byte, text string) []byte

// renderers knows types that are PostgreSQL's own and their OIDs. Types that are missing: json, whose text may be no jsonb
// (\u0000), and what can contain values of other types.
var renderers = map[uint32]renderer{
	pgtype.BoolOID: renderBool,

	pgtype.Int2OID: renderNumber, pgtype.Int4OID: renderNumber, pgtype.Int8OID: renderNumber,
	pgtype.Float4OID: renderNumber, pgtype.Float8OID: renderNumber, pgtype.NumericOID: renderNumber,

	pgtype.TextOID: renderString, pgtype.VarcharOID: renderString, pgtype.BPCharOID: renderString, pgtype.NameOID: renderString,
	pgtype.QCharOID: renderString, pgtype.UUIDOID: renderString, pgtype.ByteaOID: renderString, pgtype.DateOID: renderString,
	pgtype.TimeOID: renderString, pgtype.TimetzOID: renderString, pgtype.IntervalOID: renderString, pgtype.OIDOID: renderString,
	pgtype.InetOID: renderString, pgtype.CIDROID: renderString, pgtype.MacaddrOID: renderString, pgtype.BitOID: renderString,
	pgtype.VarbitOID: renderString,

	pgtype.TimestampOID: renderTimestamp, pgtype.TimestamptzOID: renderTimestamptz,

	pgtype.JSONBOID: renderRaw,

	pgtype.BoolArrayOID: renderArray(renderBool), pgtype.Int2ArrayOID: renderArray(renderNumber), pgtype.Int4ArrayOID: renderArray(renderNumber),
	pgtype.Int8ArrayOID: renderArray(renderNumber), pgtype.Float4ArrayOID: renderArray(renderNumber), pgtype.Float8ArrayOID: renderArray(renderNumber),
	pgtype.NumericArrayOID: renderArray(renderNumber), pgtype.TextArrayOID: renderArray(renderString), pgtype.VarcharArrayOID: renderArray(renderString),
	pgtype.UUIDArrayOID: renderArray(renderString), pgtype.DateArrayOID: renderArray(renderString), pgtype.TimestampArrayOID: renderArray(renderTimestamp),
	pgtype.TimestamptzArrayOID: renderArray(renderTimestamptz),
}

// painter makes images of the rows of one table. Members are in the order in which jsonb keeps them, so that the server finds them
// sorted.
type painter []member

// member is a column in an image.
type member struct {
	name   string // as JSON, with the colon
	column int    // position in rows
	render renderer
}

// newPainter returns nil if a column is of a type that only the server knows.
func newPainter(tab *table) painter {
	p := make(painter, len(tab.columns))
	for i := range tab.columns {
		a := tab.column(i)
		render := renderers[a.typeOID]
		if render == nil || a.generated {
			return nil
		}
		p[i] = member{string(renderString(nil, a.name)) + ":", i, render}
	}
	slices.SortFunc(p, func(a, b member) int { return compareMembers(tab.column(a.column).name, tab.column(b.column).name) })
	return p
}

// compareMembers orders names as jsonb does (lengthCompareJsonbString in utils/adt/jsonb_util.c).
func compareMembers(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) }

// image is a row, in the order of the table's columns, as a JSON object.
func (p painter) image(row []koldproxy.Datum) string {
	return string(p.append(make([]byte, 0, p.size(row)), row))
}

// size is about how long the image of a row is.
func (p painter) size(row []koldproxy.Datum) int {
	n := 2
	for i := range p {
		n += len(p[i].name) + len(row[i].Text) + 3
	}
	return n
}

// append appends the image of a row.
func (p painter) append(b []byte, row []koldproxy.Datum) []byte {
	b = append(b, '{')
	for i := range p {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, p[i].name...)
		if value := &row[p[i].column]; value.Kind == koldproxy.DatumText {
			b = p[i].render(b, value.Text)
		} else {
			b = append(b, "null"...)
		}
	}
	return append(b, '}')
}

// keyImage is a row with nothing but its primary key as a JSON object; nil if only the server can make it.
func (t *table) keyImage(key []string) *string {
	b := []byte{'{'}
	for i, text := range key {
		a := t.column(t.key[i])
		render := renderers[a.typeOID]
		if render == nil {
			return nil
		}
		if i > 0 {
			b = append(b, ", "...)
		}
		b = render(append(renderString(b, a.name), ": "...), text)
	}
	image := string(append(b, '}'))
	return &image
}

func renderRaw(b []byte, text string) []byte { return append(b, text...) }

func renderBool(b []byte, text string) []byte {
	if text == "t" {
		return append(b, "true"...)
	}
	return append(b, "false"...)
}

// renderNumber knows what JSON has no numbers for by the letter that NaN and Infinity share, as the server does.
func renderNumber(b []byte, text string) []byte {
	if strings.ContainsAny(text, "nN") {
		return renderString(b, text)
	}
	return append(b, text...)
}

// renderTimestamp writes the form of XML Schema, in which jsonb has times whatever DateStyle says: a T between date and time.
func renderTimestamp(b []byte, text string) []byte {
	date, time, ok := strings.Cut(text, " ")
	if !ok { // infinity
		return renderString(b, text)
	}
	b = append(append(append(b, '"'), date...), 'T')
	return append(append(b, time...), '"')
}

// renderTimestamptz writes the offset with its minutes besides. It comes as +00, since the applier's time zone is UTC.
func renderTimestamptz(b []byte, text string) []byte {
	before, after, ok := strings.Cut(text, "+00")
	if !ok {
		return renderString(b, text)
	}
	return renderTimestamp(b, before+"+00:00"+after)
}

func renderString(b []byte, text string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	from := 0
	for i := range len(text) {
		c := text[i]
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		b = append(b, text[from:i]...)
		if from = i + 1; c < 0x20 {
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		} else {
			b = append(b, '\\', c)
		}
	}
	return append(append(b, text[from:]...), '"')
}

// renderArray reads array_out's text: [2:3]={{1,2},{NULL,"a \"b\""}}, of a type whose delimiter is the comma. Bounds are not
// shown in JSON.
func renderArray(element renderer) renderer {
	return func(b []byte, text string) []byte {
		if strings.HasPrefix(text, "[") {
			_, text, _ = strings.Cut(text, "=")
		}
		for len(text) > 0 {
			switch c := text[0]; c {
			case '{':
				b, text = append(b, '['), text[1:]
			case '}':
				b, text = append(b, ']'), text[1:]
			case ',':
				b, text = append(b, ','), text[1:]
			case '"':
				var value strings.Builder
				i := 1
				for ; i < len(text) && text[i] != '"'; i++ {
					if text[i] == '\\' && i+1 < len(text) {
						i++
					}
					value.WriteByte(text[i])
				}
				b, text = element(b, value.String()), text[min(i+1, len(text)):]
			default:
				i := strings.IndexAny(text, ",}")
				if i < 0 {
					i = len(text)
				}
				if text[:i] == "NULL" {
					b = append(b, "null"...)
				} else {
					b = element(b, text[:i])
				}
				text = text[i:]
			}
		}
		return b
	}
}
