// The consumer reads a stream's log or a table's change feed through koldproxy from where it stopped last time, prints every
// event and remembers the position in a file:
//
//	DATABASE_URL=postgres://… consumer stream|feed TABLE POSITION_FILE
package main
