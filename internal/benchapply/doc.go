// Command benchapply measures how fast koldproxy applies changes, next to what PostgreSQL's own subscriber makes of the same
// write-ahead log. `make bench-apply` runs it.
//
// It starts a private server and runs the built binary (-koldproxy) against it. In a drain, both sides stand still while a
// workload is written; then each reads the same log from its slot, one after the other and in alternating order. koldproxy
// writes mirrors and stream logs in the source database, the subscription a plain table with the same primary key in
// another database of the same server. What counts is the time from the moment the slot is in use until the last change
// is committed at the destination. Results are compared with the source before they are printed.
//
// The other parts are measured as an application meets them: how long a commit takes to be visible, what it costs the
// application to be followed, what a page costs, how much memory a large transaction takes.
//
// The parts push, fanout, replay and sweep are about the logs of streams and those who read them; `make bench-streams` runs these.
//
// -scale 1 is the size that docs/benchmarks.md speaks of; the default is a tenth of it.
package main
