// Package mqtt is the embedded MQTT broker: it pushes the events of change streams to live subscribers, over MQTT 3.1.1
// and 5.
//
// A [Broker] does the work. Its clients log in as PostgreSQL roles with their passwords and subscribe to topics
// $stream/<db>/<name> (see [koldproxy.StreamTopic]); what a role may do is asked through [Auth], of which [PostgresAuth] is
// the implementation. The change feed hands events to [Broker.Publish].
//
// # What is promised
//
// Delivery is a hint, the stream's log is the truth. Everything is QoS 0: no retained messages, no sessions that outlive
// their connection, nothing on disk. A message that cannot be delivered at once is dropped and counted, and the subscriber
// sees the gap (each event names its predecessor) and reads the log. Messages of one topic arrive in the order of their
// Publish calls.
//
// Nobody slows anybody: Publish never blocks, every subscriber has a bounded queue and a goroutine of its own, and a
// subscriber that does not take a byte for [Config.WriteTimeout] is disconnected.
//
// # Who receives what
//
// The owner of a stream's table, and whoever has a topic grant (GRANT SUBSCRIBE ON TOPIC); see
// docs/decisions/0006-topic-grants.md. Every delivery is judged for the exact topic, whatever filter led to it, on an answer
// of PostgreSQL that is at most [Config.RightsTTL] old. So a filter such as $stream/default/# may be subscribed to by anyone
// and brings only what its role is granted, and a REVOKE ends delivery within that time. A subscription to an exact topic is
// judged at once too and refused (0x80, in MQTT 5 0x87) if the role has no right to it; when the right is revoked later on,
// or the stream is dropped, the client is disconnected within about that time, rather than left waiting. When PostgreSQL cannot be asked,
// nothing is delivered.
//
// A filter that begins with a wildcard (#, +/…, $share/group/#) never matches a topic that begins with $. Clients may not
// publish; with [Config.ClientPublish] they may, but never under $, neither by PUBLISH nor by a will. A client that tries is
// disconnected rather than left to believe that it was heard.
//
// # How it is built
//
//	listener ─▶ conn ─▶ mochi-mqtt: CONNECT, SUBSCRIBE, PINGREQ …  ─▶ hooks.go: login, rights, what is allowed at all
//	                                                                     │
//	                                     router.go: who wants what  ◀────┘
//	                                          ▲
//	Publish ─▶ queue ─▶ dispatch ─────────────┴─▶ session (queue, judge, write) ─▶ conn
//
// mochi-mqtt reads and answers packets. Accepting, routing, queueing, delivering and shutting down are done here and not by
// that library, because in the version in use (2.7.9) its shared subscriptions match topics that begin with $, its wills are
// sent without any check, its queues are bounded in messages and not in bytes, an MQTT 5 topic alias may be announced in a
// message that is then dropped, the takeover of a session may remove its successor, a packet may stop the process (a
// truncated MQTT 5 SUBSCRIBE), and closing its server races with clients that connect.
package mqtt
