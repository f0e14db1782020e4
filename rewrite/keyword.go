package rewrite

import pg_query "github.com/pganalyze/pg_query_go/v6"

// IsKeyword says whether a word is one of PostgreSQL's keywords, reserved or not.
func IsKeyword(word string) bool {
	scanned, err := pg_query.Scan(word)
	return err == nil && len(scanned.Tokens) == 1 && scanned.Tokens[0].KeywordKind != kNone
}
