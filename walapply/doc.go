// Package walapply follows the write-ahead log of one database and applies what it says exactly once.
//
// An [Applier] reads the database's replication slot, decodes pgoutput into [koldproxy.Change] values and hands them to a
// [Target], inside a transaction of the same database. That transaction also moves koldstore.checkpoint, so what the
// target wrote and how far the applier is are always of one mind:
//
//	START_REPLICATION ─▶ receiver ─▶ queue ─▶ apply loop:  BEGIN
//	        ▲            (decodes)  (bounded)              Target.Apply(changes of whole source transactions)
//	        │                                              UPDATE koldstore.checkpoint … WHERE epoch = mine AND applied_lsn = what I know
//	        └──────── status update ◀───────────────────── COMMIT
//
// # What holds after a crash
//
// A source transaction has been applied once or not yet, whatever was killed: the applier, its connections, the server.
// After a restart the stream begins again at the checkpoint, and a transaction whose commit lies before it is skipped.
// The checkpoint is compared and set, not merely set: when the outcome of a COMMIT is unknown, or another instance has
// taken over meanwhile, the late writer hits no row and rolls back.
//
// # Positions
//
// Each source transaction has two: its commit record begins at one LSN and ends at another. The begin comes first on the
// wire, before any change, so it is what [koldproxy.Change] carries as CommitLSN; it is unique and ordered. The end is what
// the checkpoint stores and what is acknowledged. Changes of a transaction that is larger than a batch arrive in several
// Apply calls of one apply transaction.
//
// # Acknowledging
//
// The slot is told the end of the last source transaction whose apply transaction has committed. The end of log that a
// keepalive names is acknowledged too, when everything received before it has been applied: so an idle database next to
// busy ones lets go of the log, without a write. Both happen at once, because koldstore.wait_for_async_mirror waits for
// the slot's confirmed_flush_lsn. Write, flush and apply positions are always the same number: the server sends a
// keepalive when it has caught up only while both write and flush are behind.
//
// # Who applies
//
// Of several instances the one that holds an advisory lock ([LeaderLockClass]) on a session of its own leads. It raises the
// epoch in the checkpoint; every apply transaction checks the epoch, and [Applier.Fence] checks it for transactions of
// others. The lock's session ends itself when the leader stops pinging it for [Config.Lease], so a stopped process loses
// leadership although its TCP connections live on; its sessions are terminated by the next leader, and once it wakes up
// its transactions find another epoch. [Config.WhileLeading] runs whatever else must run on the leader only.
//
// # Errors
//
// The applier never skips a change and never gives up: a target that cannot take a row deals with it itself (quarantine).
// Everything else is tried again with a growing pause, from the checkpoint, and shown in [Status]. What only an operator can
// put right is a *[SetupError] with a hint. A slot that is gone, lost, replaced, older than the publication, or of another
// server than the checkpoint is a gap: applying on would silently lose changes, and so would going on when the cause has
// vanished. So it is written to koldstore.checkpoint, and then applying begins anew (anew.go): with a new slot, and in one transaction
// with the note of what is missing, which makes the target compare feeds with their tables. With [OnGapStop] that waits for
// koldstore.heal_gap(). [Inspect] shows all of it without an applier.
//
// The publication is compared with the tables that streams and feeds follow, at the beginning of each session and every few
// seconds: what it does not cover is not in the stream, so such a table is published again, with a marker from which on its feed is
// healed; with [OnGapStop] its streams and feed are marked broken. Partitions are looked at in the same way.
//
// The server keeps its log for a slot that is behind, whatever that takes: retained.go warns, and gives the slot up at a limit.
//
// The apply session runs with synchronous_commit = local. A commit must be durable here before it is acknowledged; waiting
// for standbys as well could mean waiting for our own walsender, which a synchronous_standby_names of * would count as one.
//
// docs/architecture.md has the picture of the whole.
package walapply
