// Package koldproxy is the vocabulary that every other package of the project shares: positions in the write-ahead log
// ([LSN]) and in a change feed ([Seq]), one committed row event ([Change]) and errors that PostgreSQL clients understand
// ([Error]).
//
// It imports the standard library only and does no I/O. The packages of the project meet here and nowhere else: a package
// that needs something from a neighbour declares a small interface for it, and cmd/koldproxy wires the two together. The
// picture of who does what is in docs/architecture.md.
//
// All types are plain values. None of them holds memory of a network buffer unless its documentation says so.
package koldproxy
