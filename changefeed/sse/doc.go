// Package sse serves the events of change streams to browsers and other HTTP clients, as server-sent events:
//
//	GET /streams/<db>/<name>                (<schema>.<name> outside schema public)
//
// The path is the topic of live push without $stream, percent-encoded as in any URL. [Handler] is an http.Handler. Each event has
// the id and the JSON that live push has (see package mqtt). Unlike live push it loses nothing: every client is served from the
// stream's log, at its own pace. A client that reconnects sends the header
// Last-Event-ID, as browsers do by themselves, and goes on behind that event. Without it, the parameter from says where to
// begin: earliest, or an id; otherwise the first event is the next new one, and the response begins with an id of its own, without data: what
// a browser sends if the connection ends before that event.
//
// A client whose position is below what retention has removed, when it connects or because it reads so slowly, gets an event
// named gap, with {"floor": id, "reason": "retention"} as data, so that it knows that it has missed something. So does one that comes to a
// hole, where changes were never captured (docs/operations.md, "Gaps"); the reason says why. When the stream is dropped, or the right to it is revoked, an event named end
// comes last, with {"reason": text}.
//
// Login is HTTP Basic with a PostgreSQL role and its password, and rights are those of live push (GRANT SUBSCRIBE ON TOPIC);
// both are asked through [Auth]. A revoked right, or a role that is dropped, ends a response within about a second; as with
// sessions of PostgreSQL, a new password does not. The connection is not encrypted here. Pages of other origins are not let in
// (there are no CORS headers): a web application has this behind its own origin.
//
// Nobody slows anybody: a client that reads slowly is sent the next page when it has taken the last, and one that takes nothing
// for a while is disconnected. The log is read through a pool of connections, so many clients share few of them, and only when
// there is something to read: of a stream with clients the number of its events is looked at, once for all of them.
package sse
