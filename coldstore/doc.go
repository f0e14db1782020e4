// Package coldstore keeps the cold part of a change feed: Parquet files in a bucket, and the manifest of them in
// PostgreSQL (koldstore.segment). It moves the oldest rows of a managed table's mirror into files ("flush"), reads pages of
// them back in seq order, merges them ("compaction"), and drops them by age or size ("retention").
//
// The types to know:
//
//   - [Bucket] stores whole objects under fresh keys. [OpenBucket] opens a folder, package cloud the others.
//   - [Store] does the work on one database: [Store.RunJobs] and [Store.Run] for the leader, [Store.Page] for every
//     instance.
//   - [PageRequest] and [Page] are how a feed reads: the caller names the segments of its own snapshot.
//
// # What a flush promises
//
// A flush takes the oldest rows of the mirror, file by file. For each file: a segment row in state in_progress (its own
// transaction, before the first byte), the file, put-if-absent under a key that was never used before, reading back and
// checking what was stored, and then one transaction that makes the segment active, marks the rows of older segments that
// it supersedes as dead, deletes exactly the flushed rows from the mirror and raises the generation. Until that transaction
// commits the mirror alone counts; from then on the file does. A failure or a crash at any point therefore loses nothing
// and repeats nothing; what it may leave behind is an object nobody refers to except its in_progress row, which the sweep
// removes.
//
// Because each flush takes the oldest prefix, the seq ranges of active segments are disjoint, and every row of the mirror
// has a higher seq than every active segment. The publishing transaction asserts it.
//
// # One row for each key
//
// A key may be in several segments and in the mirror. A row of a segment is dead when a newer segment holds its key; dead
// rows are kept as a bitmap with the generation since which they are dead, so that a page is exact for the snapshot that
// asked. A row whose key is in the mirror is superseded too; that comparison is the feed's, which reads the mirror.
//
// # Compaction
//
// Files grow stale and many. [Store.Compact] replaces neighbours by one file with their live rows, which keep their seqs, by the
// same protocol as a flush. Rows that a flush supersedes meanwhile are dead in the new file from its first moment; readers
// of an older snapshot read on in the old objects, which stay for the grace. Deletes are forgotten in the oldest segment
// only, together with raising the floor over them; rows in front of them get seqs behind them, so that no row is below the floor.
//
// # Mirrors
//
// What flushes leave of a mirror is holes, which PostgreSQL keeps. [Store.RunJobs] writes a mirror anew once it has few rows and large
// indexes, if that takes about a second at most; readers and writers wait for it so long.
//
// # Speed
//
// A flush is three things at once: the server copies rows out, one goroutine takes their JSON apart into typed columns, another one encodes
// and compresses. Memory holds a few thousand rows, the compressed pages of a row group, and 16 bytes for each row of the file. Who reads
// page after page finds the next batch of rows decoded. Where each piece of a column is a request, some columns are read at a time.
//
// # Trust
//
// An object is hashed once and compared with the catalog before anything in it is decoded, and read under the version that
// was hashed; each block that is read later is compared with what it was then. What is missing or different is a [*koldproxy.Error] with code KS002 that names the segment and the object,
// never a shorter page.
//
// docs/format.md describes the files and the catalog byte by byte.
package coldstore
