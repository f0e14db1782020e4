// Package feedtest checks what streams and feeds promise, and makes histories to check it with. It is for tests, those of this
// repository and those of applications; everything returns errors and nothing needs package testing.
//
//   - [CheckOrder] looks at a stream log alone: ids ascend, and each key's events make sense one after the other.
//   - [CheckFold] compares a stream log, folded, with SELECT … WHERE predicate.
//   - [CheckFeed] drains koldstore.changes_since page by page and compares it with the table and its tombstones.
//   - [Audit] is a ground truth that knows nothing of logical decoding: a trigger writes every row change into a table of
//     its own, and [Audit.CheckStream] wants exactly the events that follow from it, per key and in order.
//   - [History] writes random transactions; the same seed writes the same ones.
//
// All checks look at the state at one moment: call koldstore.wait_for_async_mirror first, and keep writers away meanwhile.
package feedtest
