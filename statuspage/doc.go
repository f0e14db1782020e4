// Package statuspage is the page that koldproxy shows to a person at its HTTP port: what each database's applier does and how
// far it is behind, which tables and streams there are, what is running, and the newest events of a stream.
//
// # Types to know
//
// A [Page] is an http.Handler. [Page.Run] samples a few numbers of each [Database] every few seconds and keeps them in memory, for
// the charts (history.go) and for rates; everything else is read when somebody looks (read.go). Pages are rendered on the server
// from one template (page.go, assets/) with charts as inline SVG (chart.go). A few lines of script replace the page's content
// while it is open; without script the browser reloads it.
//
// # What is promised
//
//   - Nobody sees it by accident (guard.go): with a token only those who have it, without one only clients of a listener at a
//     loopback address, and then only under a name of this machine, so that a web page elsewhere cannot read it through the
//     browser of an administrator. Values of rows are shown with a token only.
//   - Looking costs little: no table is counted, mirror sizes are the server's own estimates, and a page is read at most once
//     a second however many look at it.
//   - A database that cannot be read is shown as such, the others as ever.
//
// The page shows nothing that `koldproxy status` and the metrics do not know; scripts should read those.
package statuspage
