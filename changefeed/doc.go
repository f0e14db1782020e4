// Package changefeed says what committed row changes mean: which rows of mirrors and which events of stream logs they
// become, how a table that already has rows gets its mirror, what live subscribers are told, and how the demands of
// koldstore's SQL functions are answered.
//
// The types to know:
//
//   - [Target] turns batches of changes into statements of the apply transaction. walapply calls it.
//   - [Tail] reads new events from the logs after they were committed and hands them to live subscribers.
//   - [Sweeper] removes events that are past their stream's retention.
//   - [Fulfiller] answers demands (cold pages, flushes) that SQL functions raise and the proxy catches.
//
// # From changes to rows
//
//	changes ──▶ plan ──▶ events: one per key that was touched, each with its own seq
//	                       ├──▶ mirror write   one row per key, the last event wins       koldstore.<table>__cl
//	                       └──▶ stream writes  put, exit, delete, judged by the predicate  _stream_<name>
//
// Planning is pure. An update that changes the primary key is two events, a delete and an insert. The image of a row whose columns
// are all of PostgreSQL's own types is made here (see image.go); other rows, and those that predicates are asked about, travel to the
// eval session as literals of the table's row type. docs/decisions/0008 says why.
//
// # Where code of users runs
//
// In no session but one. Domains have checks, types have casts, predicates call functions, and all of that is code of whoever
// owns the table, while koldproxy's role may be a superuser. koldstore.eval_rows turns literals into JSON, judge_rows judges predicates,
// under rights of their own and in a session that does nothing else ([Config].DSN; see evalSession in eval.go). Only text comes
// back. The apply session writes that text: documents as jsonb, keys through the input functions of the mirror's types. It uses
// no cast from or to a type of a user, no operator that is looked up by name among them, and reads a table only when
// its indexes and statistics are free of such code (readTable).
//
// # What is known about the database
//
// A [Target] caches the catalog: what is managed or streamed, with which columns. Columns are those of today, while a change
// may be older; every ALTER TABLE puts the table's columns with their numbers into koldstore.wal_marker, so it is known at each
// place of the log which columns rows have, and values are matched by number. The
// cache is checked after every set of writes, inside the transaction, and the writes are repeated if it was stale. A stream
// or managed table takes part from its row in koldstore.wal_marker on, which arrives through the same log as the
// changes: nothing older, nothing missed.
//
// # What a bad row does
//
// A row that cannot be written (a predicate that raises, a value that does not cast any more, \u0000 in a json document) goes
// to koldstore.quarantine, is counted and logged, and the rest goes on. So does one whose evaluation takes too long. An update whose
// old row alone is bad is written without it, as an exit if nobody can say whether the old row had matched. Where not the row is to blame but the definition (a
// predicate's function was dropped, the primary key has changed, code takes too long again and again), the stream or mirror becomes broken with a reason, and the rest goes on. Everything
// else (the connection, a deadlock) fails the batch, which is tried again as a whole. Work in the background (a seed, a healing,
// a backfill) rests alone when it fails (nap.go), and cold rows are read beside all this (coldread.go).
//
// # Healing
//
// Where changes may have been missed (a gap, a table that was rewritten, partitions that came or went) a feed is compared with its
// table, from a place in the log behind which nothing is missing: see healing in heal.go. Streams cannot be healed; they show a hole.
//
// # After a crash
//
// Everything that [Target] does is in the transaction that also moves the checkpoint, seeding pages included. The tail's
// position is stored about once a second; after a crash up to that much is published again, and nothing is left out: live
// push is a hint, the log is the truth. Sweeps and demands keep no state outside their own transactions.
//
// docs/architecture.md has the picture of the whole.
package changefeed
