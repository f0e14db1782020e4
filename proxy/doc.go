// Package proxy is the wire: it stands between PostgreSQL clients and one PostgreSQL server and changes nothing of what
// they say to each other, except for the few statements that package rewrite knows.
//
// # Types to know
//
// A [Server] accepts clients on any number of listeners ([Server.Serve], [Listen]) and opens one server connection per
// client. Nothing is pooled or shared, so every feature of PostgreSQL that lives in a session works.
//
// Before it is a session, a client is counted and held to limits (admission.go), identified by a PROXY header where one is
// due (peer.go), and heard (startup.go). Its settings are those in force when it came ([Server.Reload], settings.go). Then one
// of several servers is chosen for it (hosts.go, upstream.go), and that is where its cancel requests go (cancel.go).
//
// A session is two pumps (frontend.go, backend.go), one goroutine per direction, each with a buffer of its own. A pump
// walks the five-byte message headers and writes whole runs of bytes as they came; only the bodies of Query and Parse are
// searched for statements of koldproxy's (look.go), and only answers to those are edited (edit.go).
//
// With [Config.EventLoops] sessions run in an event loop on Linux (loops.go, loop_linux.go, looped_linux.go), which calls the same
// two functions as the pumps and hands the session to them for everything that is not forwarding. The records of TLS go through
// socket.go, which knows who runs the session.
//
// The tracker (expect.go, received.go) is the session's idea of the protocol: a queue of the messages that await an
// answer. It does no I/O and knows what PostgreSQL does with each message: what is skipped after an error, what is ignored
// during COPY, which names stand for which statement. Whatever is decided about an answer is decided from what the server
// said, never from having read a message of the client.
//
// A statement that may need cold rows is run by demand.go and stage.go, in the client's own session: its answer is held
// until PostgreSQL either completes the statement or raises KS003, whose DETAIL is a demand. The demand goes to the
// [Fulfiller], the answer is sealed (seal.go) and put in front of the statement, and the statement runs again, with the
// batch that it belongs to if need be (batch.go). The planner calls functions too, so that Bind is run like this as well as Execute.
// asking.go knows which names lead to a demand that the text does not show, defined.go those that were made just now; timeout.go has the session's statement_timeout count
// meanwhile; budget.go bounds what all sessions hold. For that time one goroutine owns both directions of the session (takeover.go).
//
// # TLS and authentication
//
// Each side of a session has TLS of its own (tls.go): towards clients after an SSLRequest or directly, with certificates
// that are read again when they change (certificates.go, [Server.Reload]), and towards the server as libpq's sslmode does,
// for cancel requests too. There is none on Unix sockets.
//
// PostgreSQL authenticates the client, and the proxy relays its questions (auth.go). SCRAM ties a login to the certificate
// that the client sees; binding.go says when that can be relayed, and what a client is told when not. With [AuthSCRAM] the
// proxy ends SCRAM itself (terminate.go, and the pure part in scram.go): it checks the client's proof with the verifier that
// [Verifiers] reads from the server and logs in with the key that the proof reveals, bound to TLS on both sides.
//
// # What is promised
//
//   - What is not intercepted reaches the server byte for byte, and so do the server's answers.
//   - An error of koldproxy's own is an ordinary ErrorResponse that names koldproxy, never in the middle of a message.
//   - Nothing is allocated because of a length that somebody sent; buffers grow as bytes arrive, up to a limit.
//   - No server connection is opened before a client has sent a whole startup packet.
//   - Bytes in plain ahead of a TLS handshake are refused on either side, and what the server says before it is not passed on.
//   - A client that says nothing takes nobody else's place.
//   - A server on a Unix socket that asks for no proof of identity lets nobody in, unless a certificate has proved it.
//   - A handshake, TLS included, takes no longer than its deadline.
//   - Serve returns when each session of its listener and its server connection have ended.
//   - A panic ends its session only.
//
// The messages that demand.go adds to a session travel under reserved names as Parse, Bind, Execute and Close, so that the
// client's unnamed statement and portal survive. A Sync of koldproxy's own is sent only where it can end nothing of the
// client's: when the server has just said that it is idle, or when an error has ended the client's implicit transaction
// already.
//
// docs/architecture.md shows how demands travel through the other packages; docs/security.md has the TLS options in full.
package proxy
