package koldproxy

import "fmt"

// SQLSTATE codes of koldproxy's own and those of PostgreSQL that it answers with. docs/architecture.md says when.
const (
	CodeRetentionGap         = "KS001" // a cursor below the retained beginning of a feed
	CodeColdUnreadable       = "KS002" // cold storage cannot be read or is damaged
	CodeProxyNeeded          = "KS003" // the statement needs koldproxy in front of the server
	CodeSyntaxError          = "42601"
	CodeFeatureNotSupported  = "0A000"
	CodeInvalidParameter     = "22023"
	CodeNotInPrerequisite    = "55000"
	CodeInsufficientPriv     = "42501"
	CodeProtocolViolation    = "08P01"
	CodeConnectionFailure    = "08006"
	CodeCannotConnect        = "08001"
	CodeInvalidAuthorization = "28000"
	CodeInvalidPassword      = "28P01"
	CodeOutOfMemory          = "53200"
	CodeTooManyConnections   = "53300"
	CodeAdminShutdown        = "57P01"
	CodeCannotConnectNow     = "57P03"
	CodeQueryCanceled        = "57014"
	CodeInternal             = "XX000"
)

// Error is an error that becomes a PostgreSQL ErrorResponse. The zero Position means none; otherwise it counts characters
// from 1 in what the client typed, as PostgreSQL's P field does.
type Error struct {
	Code     string
	Message  string
	Detail   string
	Hint     string
	Position int
}

// Error returns the message with its code.
func (e *Error) Error() string { return fmt.Sprintf("%s (SQLSTATE %s)", e.Message, e.Code) }

// Errorf makes an [Error] of a code and a formatted message.
func Errorf(code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// WithHint returns a copy of e that tells the reader what to do.
func (e *Error) WithHint(hint string) *Error {
	c := *e
	c.Hint = hint
	return &c
}

// WithDetail returns a copy of e with a detail line.
func (e *Error) WithDetail(detail string) *Error {
	c := *e
	c.Detail = detail
	return &c
}

// At returns a copy of e that points at a character of the client's text, counted from 1.
func (e *Error) At(position int) *Error {
	c := *e
	c.Position = position
	return &c
}
