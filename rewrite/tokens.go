package rewrite

import pg_query "github.com/pganalyze/pg_query_go/v6"

// The tokens that the walks look at, under shorter names.
const (
	tLineComment  = pg_query.Token_SQL_COMMENT
	tBlockComment = pg_query.Token_C_COMMENT

	tIdent         = pg_query.Token_IDENT
	tUnicodeIdent  = pg_query.Token_UIDENT
	tString        = pg_query.Token_SCONST
	tUnicodeString = pg_query.Token_USCONST
	tBits          = pg_query.Token_BCONST
	tHex           = pg_query.Token_XCONST
	tInteger       = pg_query.Token_ICONST
	tFloat         = pg_query.Token_FCONST
	tParam         = pg_query.Token_PARAM

	tOpen         = pg_query.Token_ASCII_40
	tClose        = pg_query.Token_ASCII_41
	tOpenBracket  = pg_query.Token_ASCII_91
	tCloseBracket = pg_query.Token_ASCII_93
	tComma        = pg_query.Token_ASCII_44
	tDot          = pg_query.Token_ASCII_46
	tSemicolon    = pg_query.Token_ASCII_59
	tEquals       = pg_query.Token_ASCII_61
	tPlus         = pg_query.Token_ASCII_43
	tMinus        = pg_query.Token_ASCII_45
	tStar         = pg_query.Token_ASCII_42
	tCast         = pg_query.Token_TYPECAST

	tAbort       = pg_query.Token_ABORT_P
	tAfter       = pg_query.Token_AFTER
	tAll         = pg_query.Token_ALL
	tAlter       = pg_query.Token_ALTER
	tAnd         = pg_query.Token_AND
	tAs          = pg_query.Token_AS
	tAsc         = pg_query.Token_ASC
	tAtomic      = pg_query.Token_ATOMIC
	tBetween     = pg_query.Token_BETWEEN
	tBegin       = pg_query.Token_BEGIN_P
	tBy          = pg_query.Token_BY
	tCall        = pg_query.Token_CALL
	tCase        = pg_query.Token_CASE
	tCommit      = pg_query.Token_COMMIT
	tCreate      = pg_query.Token_CREATE
	tCurrentRole = pg_query.Token_CURRENT_ROLE
	tCurrentUser = pg_query.Token_CURRENT_USER
	tDeclare     = pg_query.Token_DECLARE
	tDesc        = pg_query.Token_DESC
	tDistinct    = pg_query.Token_DISTINCT
	tDouble      = pg_query.Token_DOUBLE_P
	tDrop        = pg_query.Token_DROP
	tEnd         = pg_query.Token_END_P
	tExcept      = pg_query.Token_EXCEPT
	tExists      = pg_query.Token_EXISTS
	tFalse       = pg_query.Token_FALSE_P
	tFetch       = pg_query.Token_FETCH
	tFilter      = pg_query.Token_FILTER
	tFirst       = pg_query.Token_FIRST_P
	tFor         = pg_query.Token_FOR
	tFrom        = pg_query.Token_FROM
	tFunction    = pg_query.Token_FUNCTION
	tGrant       = pg_query.Token_GRANT
	tGroup       = pg_query.Token_GROUP_P
	tHaving      = pg_query.Token_HAVING
	tIf          = pg_query.Token_IF_P
	tIntersect   = pg_query.Token_INTERSECT
	tInto        = pg_query.Token_INTO
	tIs          = pg_query.Token_IS
	tLast        = pg_query.Token_LAST_P
	tLimit       = pg_query.Token_LIMIT
	tNext        = pg_query.Token_NEXT
	tNot         = pg_query.Token_NOT
	tNull        = pg_query.Token_NULL_P
	tNulls       = pg_query.Token_NULLS_P
	tOffset      = pg_query.Token_OFFSET
	tOn          = pg_query.Token_ON
	tOnly        = pg_query.Token_ONLY
	tOperator    = pg_query.Token_OPERATOR
	tOr          = pg_query.Token_OR
	tOrder       = pg_query.Token_ORDER
	tOver        = pg_query.Token_OVER
	tPrepare     = pg_query.Token_PREPARE
	tProcedure   = pg_query.Token_PROCEDURE
	tRecursive   = pg_query.Token_RECURSIVE
	tRelease     = pg_query.Token_RELEASE
	tReplace     = pg_query.Token_REPLACE
	tReset       = pg_query.Token_RESET
	tRevoke      = pg_query.Token_REVOKE
	tRollback    = pg_query.Token_ROLLBACK
	tRow         = pg_query.Token_ROW
	tRows        = pg_query.Token_ROWS
	tRule        = pg_query.Token_RULE
	tSavepoint   = pg_query.Token_SAVEPOINT
	tSchema      = pg_query.Token_SCHEMA
	tSelect      = pg_query.Token_SELECT
	tSessionUser = pg_query.Token_SESSION_USER
	tSet         = pg_query.Token_SET
	tShow        = pg_query.Token_SHOW
	tTable       = pg_query.Token_TABLE
	tText        = pg_query.Token_TEXT_P
	tTo          = pg_query.Token_TO
	tTransaction = pg_query.Token_TRANSACTION
	tTrue        = pg_query.Token_TRUE_P
	tUescape     = pg_query.Token_UESCAPE
	tUnion       = pg_query.Token_UNION
	tUsing       = pg_query.Token_USING
	tVarying     = pg_query.Token_VARYING
	tWhen        = pg_query.Token_WHEN
	tWhere       = pg_query.Token_WHERE
	tWindow      = pg_query.Token_WINDOW
	tWith        = pg_query.Token_WITH
	tWithin      = pg_query.Token_WITHIN
	tWork        = pg_query.Token_WORK
)

// Classes of keywords, as in PostgreSQL's kwlist.h.
const (
	kNone     = pg_query.KeywordKind_NO_KEYWORD
	kFree     = pg_query.KeywordKind_UNRESERVED_KEYWORD
	kColumn   = pg_query.KeywordKind_COL_NAME_KEYWORD
	kReserved = pg_query.KeywordKind_RESERVED_KEYWORD
)
