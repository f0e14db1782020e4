package coldstore

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/metadata"
	"github.com/apache/arrow-go/v18/parquet/schema"
)

// A segment file is a Parquet file whose rows are sorted by seq (docs/format.md):
//
//	_ks_seq      INT64, required   position in the feed; strictly ascending through the file
//	_ks_op       INT32, required   1 insert, 2 update, 3 delete (tombstone)
//	_ks_hash     INT64, required   hash of the primary key
//	_ks_exact    JSON, optional    object: members of the image whose column cannot hold them exactly
//	_ks_missing  JSON, optional    array: names of columns that the image does not have at all
//	_ks_key      JSON, optional    the key object, where it does not follow from the other columns
//	…            optional          the table's columns; a tombstone fills those of the key only
const (
	colSeq = iota
	colOp
	colHash
	colExact
	colMissing
	colKey
	systemColumns // how many there are
)

var systemNames = [systemColumns]string{"_ks_seq", "_ks_op", "_ks_hash", "_ks_exact", "_ks_missing", "_ks_key"}

// formatVersion is raised when a reader of the version before would misread a file.
const formatVersion = 1

// Keys of the file's metadata.
const (
	metaFormat  = "koldproxy.format"  // formatVersion
	metaTable   = "koldproxy.table"   // the table's OID
	metaName    = "koldproxy.name"    // its name when the file was written, for people
	metaColumns = "koldproxy.columns" // JSON array of column
	metaKey     = "koldproxy.key"     // JSON array of the names of the key columns
	metaSegment = "koldproxy.segment" // the segment's id
	createdBy   = "koldproxy version 0.1.0"
)

// layout is the shape of one segment file.
type layout struct {
	table   uint32
	name    string
	segment string
	columns []column
	key     []string
}

// schema is the Parquet schema of the file.
func (l *layout) schema() (*schema.GroupNode, error) {
	required, optional := parquet.Repetitions.Required, parquet.Repetitions.Optional
	fields := make(schema.FieldList, 0, systemColumns+len(l.columns))
	add := func(node schema.Node, err error) error {
		fields = append(fields, node)
		return err
	}
	system := func(i int, repetition parquet.Repetition, logical schema.LogicalType, typ parquet.Type) error {
		return add(schema.NewPrimitiveNodeLogical(systemNames[i], repetition, logical, typ, -1, -1))
	}
	for _, err := range []error{
		system(colSeq, required, schema.NewIntLogicalType(64, true), parquet.Types.Int64),
		system(colOp, required, schema.NewIntLogicalType(16, true), parquet.Types.Int32),
		system(colHash, required, schema.NewIntLogicalType(64, true), parquet.Types.Int64),
		system(colExact, optional, schema.JSONLogicalType{}, parquet.Types.ByteArray),
		system(colMissing, optional, schema.JSONLogicalType{}, parquet.Types.ByteArray),
		system(colKey, optional, schema.JSONLogicalType{}, parquet.Types.ByteArray),
	} {
		if err != nil {
			return nil, fmt.Errorf("segment schema: %w", err)
		}
	}
	for i := range l.columns {
		if err := add(l.columns[i].node()); err != nil {
			return nil, fmt.Errorf("segment schema: column %q: %w", l.columns[i].Name, err)
		}
	}
	return schema.NewGroupNode("koldproxy", required, fields, -1)
}

// metadata is what the file says about itself.
func (l *layout) metadata() (metadata.KeyValueMetadata, error) {
	columns, err := json.Marshal(l.columns)
	if err != nil {
		return nil, fmt.Errorf("segment metadata: %w", err)
	}
	key, err := json.Marshal(l.key)
	if err != nil {
		return nil, fmt.Errorf("segment metadata: %w", err)
	}
	m := metadata.NewKeyValueMetadata()
	for _, pair := range [][2]string{
		{metaFormat, strconv.Itoa(formatVersion)},
		{metaTable, strconv.FormatUint(uint64(l.table), 10)},
		{metaName, l.name},
		{metaSegment, l.segment},
		{metaKey, string(key)},
		{metaColumns, string(columns)},
	} {
		if err := m.Append(pair[0], pair[1]); err != nil {
			return nil, fmt.Errorf("segment metadata: %w", err)
		}
	}
	return m, nil
}

// fingerprint names the columns and the key: files with the same one hold rows that can be merged as they are.
func (l *layout) fingerprint() (string, error) {
	text, err := json.Marshal([]any{formatVersion, l.columns, l.key})
	if err != nil {
		return "", fmt.Errorf("segment layout: %w", err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16]), nil
}

// readLayout takes the shape of a file from its footer.
func readLayout(footer *metadata.FileMetaData) (*layout, error) {
	kv := footer.KeyValueMetadata()
	text := func(key string) string {
		if v := kv.FindValue(key); v != nil {
			return *v
		}
		return ""
	}
	switch version, err := strconv.Atoi(text(metaFormat)); {
	case err == nil && version > formatVersion:
		return nil, fmt.Errorf("%w: version %d", ErrUnknownFormat, version)
	case err != nil || version != formatVersion:
		return nil, fmt.Errorf("segment metadata: %s is %q", metaFormat, text(metaFormat))
	}
	table, err := strconv.ParseUint(text(metaTable), 10, 32)
	if err != nil {
		return nil, fmt.Errorf("segment metadata: %w", err)
	}
	l := &layout{table: uint32(table), name: text(metaName), segment: text(metaSegment)}
	if err := json.Unmarshal([]byte(text(metaColumns)), &l.columns); err != nil {
		return nil, fmt.Errorf("segment metadata: %w", err)
	}
	if err := json.Unmarshal([]byte(text(metaKey)), &l.key); err != nil {
		return nil, fmt.Errorf("segment metadata: %w", err)
	}
	want, err := l.schema()
	if err != nil {
		return nil, err
	}
	if !footer.Schema.Root().Equals(want) {
		return nil, errors.New("segment metadata: the columns are not those that it names")
	}
	return l, nil
}

// Compression at level 3 is zstd's own default: two to three times smaller than snappy at comparable speed.
const zstdLevel = 3

// A page ends after pageRows rows, or pageBytes bytes before compression: that is how much is decoded to reach one row.
const (
	pageRows  = 8 << 10
	pageBytes = 128 << 10
)

// A Bloom filter says yes by mistake this often, which costs a byte for each row. It has the size that its row group needs, or the smallest of
// some where that is not known beforehand.
const (
	bloomFalse    = 0.05
	bloomMaxBytes = 256 << 10
	bloomSizes    = 5
)

// properties are the writer's settings for a file whose first rows are the sample. What is chosen here keeps to the plainest, oldest
// encodings, which every reader has, and leaves out those in which libraries were found to shift or lose values (research: BYTE_STREAM_SPLIT, V2 pages).
func properties(l *layout, sample *batch) *parquet.WriterProperties {
	p := []parquet.WriterProperty{
		parquet.WithCreatedBy(createdBy),
		parquet.WithVersion(parquet.V2_LATEST),
		parquet.WithDataPageVersion(parquet.DataPageV1),
		parquet.WithDataPageSize(math.MaxInt32), // pages are cut by typed.write,
		parquet.WithDictionaryPageSizeLimit(pageBytes),
		parquet.WithCompression(compress.Codecs.Zstd),
		parquet.WithCompressionLevel(zstdLevel),
		parquet.WithPageIndexEnabled(true),
		parquet.WithSortingColumns([]parquet.SortingColumn{{ColumnIdx: colSeq}}),
		parquet.WithDictionaryFor(systemNames[colSeq], false),
		parquet.WithEncodingFor(systemNames[colSeq], parquet.Encodings.DeltaBinaryPacked),
		parquet.WithDictionaryFor(systemNames[colHash], false),
		parquet.WithMaxBloomFilterBytes(bloomMaxBytes),
	}
	for i, c := range sample.columns {
		different, all := c.distinct()
		if different*2 <= all {
			continue
		}
		// Few values come twice: a dictionary would only be in the way.
		name := l.columns[i].Name
		p = append(p, parquet.WithDictionaryFor(name, false))
		ascending := false
		switch c := c.(type) {
		case *typed[int32]:
			ascending = slices.IsSorted(c.values)
			p = append(p, parquet.WithEncodingFor(name, parquet.Encodings.DeltaBinaryPacked))
		case *typed[int64]:
			ascending = slices.IsSorted(c.values)
			p = append(p, parquet.WithEncodingFor(name, parquet.Encodings.DeltaBinaryPacked))
		case *typed[parquet.ByteArray]:
			// Lengths in between cost what they do not look like: the compressor takes them for part of the texts.
			p = append(p, parquet.WithEncodingFor(name, parquet.Encodings.DeltaLengthByteArray))
		}
		// Other engines look keys up. A column with a dictionary has its values listed already, and of one that ascends the page index
		// says where a value would be.
		if slices.Contains(l.key, name) && !ascending {
			p = append(p, parquet.WithBloomFilterEnabledFor(name, true), parquet.WithBloomFilterFPPFor(name, bloomFalse))
			if sample.endsGroup {
				p = append(p, parquet.WithBloomFilterNDVFor(name, int64(different)))
			} else {
				p = append(p, parquet.WithAdaptiveBloomFilterEnabledFor(name, true), parquet.WithBloomFilterCandidatesFor(name, bloomSizes))
			}
		}
	}
	return parquet.NewWriterProperties(p...)
}
