package proxy

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy"
)

// side says who failed and while doing what; logs and the metric koldproxy_proxy_errors_total use the same words.
type side string

const (
	sideClient side = "client"
	sideServer side = "server"
	sideProxy  side = "proxy"
)

// failure is an I/O error together with the side on which it happened.
type failure struct {
	side      side
	direction string // "read", "write", "dial", "handshake", "protocol", "panic"
	err       error
}

func (f *failure) Error() string { return fmt.Sprintf("%s %s: %v", f.side, f.direction, f.err) }
func (f *failure) Unwrap() error { return f.err }

// refused notes why a connection came to nothing before its startup packet was whole, or was not accepted as it was. Peers
// that say nothing or nonsense are part of life on a network and not worth more than a debug line.
func (s *Server) refused(err error, from peer) {
	reason := refusalReason(err)
	s.metrics.refused.WithLabelValues(reason).Inc()
	level := zerolog.DebugLevel
	switch reason {
	case reasonTLS, reasonPolicy, reasonPlaintext, reasonProxyProtocol:
		level = zerolog.InfoLevel
	}
	s.log.WithLevel(level).Err(err).Stringer("client", from).Str("reason", reason).Msg("client refused")
}

// Reasons of refused, as in the metric koldproxy_proxy_refused_total.
const (
	reasonClosed        = "closed"         // it went away
	reasonTimeout       = "timeout"        // it was too slow
	reasonStartup       = "startup"        // what it sent is no startup packet
	reasonPlaintext     = "plaintext"      // bytes in plain ahead of TLS
	reasonPolicy        = "policy"         // no TLS, or not the right certificate
	reasonTLS           = "tls"            // the TLS handshake failed
	reasonProxyProtocol = "proxy_protocol" // a PROXY header that is missing, damaged or not allowed
)

func refusalReason(err error) string {
	e, forClient := errors.AsType[*koldproxy.Error](err)
	switch {
	case interrupted(err):
		return reasonTimeout
	case errors.Is(err, errProxyHeader):
		return reasonProxyProtocol
	case errors.Is(err, errHandshake):
		return reasonTLS
	case forClient && e.Code == koldproxy.CodeProtocolViolation:
		return reasonPlaintext
	case forClient && e.Code == koldproxy.CodeInvalidAuthorization:
		return reasonPolicy
	case isEOF(err), isReset(err):
		return reasonClosed
	}
	return reasonStartup
}

// field is one field of an ErrorResponse or a NoticeResponse.
type field struct {
	code  byte
	value string
}

// Field codes of the protocol.
const (
	fieldSeverity         = 'S'
	fieldSeverityFixed    = 'V'
	fieldCode             = 'C'
	fieldMessage          = 'M'
	fieldDetail           = 'D'
	fieldHint             = 'H'
	fieldPosition         = 'P'
	fieldInternalPosition = 'p'
	fieldInternalQuery    = 'q'
	fieldContext          = 'W'
)

// fields is the body of an ErrorResponse or a NoticeResponse, in the order in which the server wrote it.
type fields []field

// parseFields reads a body; ok is false when it is damaged, and then it must be passed on as it is.
func parseFields(body []byte) (fs fields, ok bool) {
	for len(body) > 0 {
		code := body[0]
		if code == 0 {
			return fs, len(body) == 1
		}
		end := bytes.IndexByte(body[1:], 0)
		if end < 0 {
			return nil, false
		}
		fs = append(fs, field{code, string(body[1 : 1+end])})
		body = body[end+2:]
	}
	return nil, false // no terminator
}

func (fs fields) get(code byte) string {
	for _, f := range fs {
		if f.code == code {
			return f.value
		}
	}
	return ""
}

// with returns a copy in which a field has a value; an empty value takes the field out.
func (fs fields) with(code byte, value string) fields {
	out := make(fields, 0, len(fs)+1)
	found := false
	for _, f := range fs {
		if f.code == code {
			found = true
			if value == "" {
				continue
			}
			f.value = value
		}
		out = append(out, f)
	}
	if !found && value != "" {
		out = append(out, field{code, value})
	}
	return out
}

func (fs fields) without(codes string) fields {
	for i := range len(codes) {
		fs = fs.with(codes[i], "")
	}
	return fs
}

func (fs fields) appendTo(dst []byte, typ byte) []byte {
	var body []byte
	for _, f := range fs {
		body = append(body, f.code)
		body = append(body, f.value...)
		body = append(body, 0)
	}
	return appendMessage(dst, typ, append(body, 0))
}

// errorFields turns an error of koldproxy's own into wire fields.
func errorFields(severity string, e *koldproxy.Error) fields {
	fs := fields{{fieldSeverity, severity}, {fieldSeverityFixed, severity}, {fieldCode, e.Code}, {fieldMessage, e.Message}}
	return fs.with(fieldDetail, e.Detail).with(fieldHint, e.Hint).with(fieldPosition, position(e.Position))
}

func position(p int) string {
	if p <= 0 {
		return ""
	}
	return fmt.Sprint(p)
}

func fatal(code, format string, args ...any) []byte {
	return errorFields("FATAL", koldproxy.Errorf(code, format, args...)).appendTo(nil, msgError)
}

// replaced puts the text of e into an ErrorResponse of the server, which keeps its severity and its source fields.
func (fs fields) replaced(e *koldproxy.Error) fields {
	return fs.with(fieldCode, e.Code).with(fieldMessage, e.Message).with(fieldDetail, e.Detail).with(fieldHint, e.Hint).
		with(fieldPosition, position(e.Position)).without("pqW")
}

// asError gives any error the shape that a client can be shown. Text of unexpected errors stays out of it: it belongs in
// the log.
func asError(err error) *koldproxy.Error {
	if e, ok := errors.AsType[*koldproxy.Error](err); ok {
		return e
	}
	return koldproxy.Errorf(koldproxy.CodeInternal, "koldproxy could not get the cold rows that this statement needs").
		WithHint("The log of koldproxy says why.")
}
