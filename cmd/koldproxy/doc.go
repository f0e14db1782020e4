// Command koldproxy puts change streams and a change feed in front of an unmodified PostgreSQL.
//
// This package is wiring and nothing else: it reads the configuration, connects the parts with each other and turns errors
// into exit codes. One function, run, starts everything; `demo` calls it on a private PostgreSQL that it has just started,
// `serve` on the server that the configuration names. Each database of [postgres] databases gets a database runtime: a
// connection pool, the applier with the change feed as its target, the cold store, and the tail that pushes live events.
//
// # Conventions
//
// Results go to stdout, logs to stderr. Exit codes: 0 fine, 1 failed, 2 the command line or the configuration is wrong.
// SIGINT and SIGTERM drain: no new sessions, open transactions may end until the deadline, then everything stops.
//
// Configuration comes from defaults, a TOML file, KOLDPROXY_… environment variables and --set flags, later ones winning;
// `koldproxy config print` shows each value with its origin.
package main
