// Package rewrite finds koldproxy's own statements in a query string and replaces them by SQL that PostgreSQL has.
//
// [Rewrite] is a pure function from text to text. It replaces these and leaves every other byte as it is:
//
//	CREATE STREAM s ON t WHEN ( … )            →  CALL koldstore.create_stream( … )
//	ALTER STREAM s SET ( … )                   →  CALL koldstore.alter_stream( … )
//	DROP STREAM s                              →  CALL koldstore.drop_stream( … )
//	SHOW STREAMS                               →  SELECT … FROM koldstore.show_streams( … )
//	ALTER TABLE t SET (koldstore_enabled = …)  →  CALL koldstore.alter_table_set( … )
//	GRANT SUBSCRIBE ON TOPIC 'f' TO r          →  CALL koldstore.grant_subscribe( … )
//	REVOKE SUBSCRIBE ON TOPIC 'f' FROM r       →  CALL koldstore.revoke_subscribe( … )
//	… ORDER BY id LIMIT 5 AFTER ('x')          →  … WHERE ( … ) AND (id > ('x') … ) ORDER BY id LIMIT 5
//
// The text is cut into tokens by PostgreSQL's own scanner ([pg_query.Scan]), so words in literals, comments and dollar
// quotes are never taken for statements. It is not parsed: the real parser recurses on its input and a few hundred
// kilobytes of nested expression end the process. Everything here is a walk over tokens with explicit stacks; time and
// memory are linear in the length of the text.
//
// # When in doubt, PostgreSQL decides
//
// A text that the scanner refuses, that is longer than [MaxTextBytes] or made to keep the scanner busy, that is not valid in its encoding, or whose quotes
// cannot be told for sure (an encoding whose second bytes look like ASCII, a backslash while standard_conforming_strings
// may be off) is forwarded unchanged. Function bodies and rules are text and stay as they are.
//
// A statement that is koldproxy's but wrong is forwarded too, because PostgreSQL will refuse it and so keeps the transaction
// state right (a few that PostgreSQL's grammar knows are made a syntax error on purpose). [Result.Refusal] says what the
// error should read like.
//
// # What keeps its place
//
//   - A query string is never split: statements are replaced in place, so atomicity and the order of answers stay.
//   - The set of parameters ($1, $2, …) of the text stays the same, each in a context of the same type.
//   - [PositionMap] leads error positions back to what the user typed, in characters.
//
// The exact meaning of AFTER, its NULLs and the form that PostgreSQL can answer from an index are explained in keyset.go.
//
// [pg_query.Scan]: https://pkg.go.dev/github.com/pganalyze/pg_query_go/v6#Scan
package rewrite
