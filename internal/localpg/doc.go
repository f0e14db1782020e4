// Package localpg runs private PostgreSQL clusters from the binaries that a machine already has: one for `koldproxy demo`,
// one per test binary.
//
// A [Cluster] is one server process with a data directory, a free TCP port on the loopback interface and a Unix socket
// directory. [Start] makes it, [Cluster.Stop] takes everything away again. Logical replication is on and every login needs
// its password (SCRAM). PostgreSQL refuses to run as root, so a root caller's servers run as the system user postgres, or
// nobody where that does not exist.
//
// Tests share one cluster per binary and get a database each:
//
//	func TestMain(m *testing.M) { localpg.Main(m) }
//
//	func TestSomething(t *testing.T) {
//		dsn := localpg.TestCluster(t).TestDatabase(t)
//		…
//	}
//
// # Nothing stays behind
//
// A cluster's server must not outlive the process that started it, however that process ends. Three things see to it:
//
//   - The kernel sends SIGQUIT (immediate shutdown) to the server when its parent dies. The request is tied to the
//     operating-system thread that forked, so the server is started and awaited on a thread of its own.
//   - A small shell process, the reaper, holds the reading end of a pipe. End of file means that the owner is gone, by
//     kill -9 too; the reaper then stops the server and removes the temporary folder.
//   - Every folder carries a lock file that its owner holds. [Start] sweeps folders whose lock nobody holds, which covers a
//     machine or container that went down with all processes at once.
//
// A kept data directory ([Config.Dir]) survives all this by design: the next Start on it waits for, or stops, a server that
// is still going down, removes a postmaster.pid whose process is not PostgreSQL any more, and lets crash recovery do the rest.
package localpg
