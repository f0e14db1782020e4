// Package integration_test runs the built binary as its users do: a real PostgreSQL behind it, real clients in front of it
// (psql, pgbench, pg_dump, drivers of three languages, mosquitto_sub).
//
// An [instance] is one koldproxy process with its folder, its ports and its log. Most tests share the one that [shared]
// starts and work in a schema of their own ([newTenant]); a test that stops or kills the process has its own. However an
// instance ends, the harness then looks for processes and files that it left behind, for a panic and for a data race in
// its log, and fails the test for them.
//
// Nothing sleeps in order to synchronize: tests fence with koldstore.wait_for_async_mirror() or await an event. The
// guarantees that these tests try to break are listed in docs/guarantees.md.
package integration_test
