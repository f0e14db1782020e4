package proxy

import (
	"bytes"
	"encoding/binary"
	"math"
)

// A message is a type byte, a length that counts itself but not the type, and a body:
//
//	byte 0      1 2 3 4         5 …
//	     type   length (BE)     length-4 bytes of body
const headerLen = 5

// Message types that more than one file speaks about. The letters mean different things in the two directions.
const (
	msgQuery     = 'Q'
	msgParse     = 'P'
	msgBind      = 'B'
	msgDescribe  = 'D'
	msgExecute   = 'E'
	msgClose     = 'C'
	msgSync      = 'S'
	msgFlush     = 'H'
	msgFunction  = 'F'
	msgCopyDone  = 'c'
	msgCopyFail  = 'f'
	msgTerminate = 'X'
	msgPassword  = 'p'

	msgError           = 'E'
	msgNotice          = 'N'
	msgNotification    = 'A'
	msgParameterStatus = 'S'
	msgReady           = 'Z'
	msgComplete        = 'C'
	msgEmpty           = 'I'
	msgSuspended       = 's'
	msgAuth            = 'R'
	msgKeyData         = 'K'
	msgDataRow         = 'D'
	msgCopyIn          = 'G'
	msgCopyBoth        = 'W'
	msgParsed          = '1'
	msgBound           = '2'
	msgClosed          = '3'
	msgRowDescription  = 'T'
	msgNoData          = 'n'
	msgFunctionResult  = 'V'
)

// appendMessage appends a whole message whose body is the concatenation of parts.
func appendMessage(dst []byte, typ byte, parts ...[]byte) []byte {
	size := 4
	for _, p := range parts {
		size += len(p)
	}
	dst = append(dst, typ)
	dst = binary.BigEndian.AppendUint32(dst, uint32(size))
	for _, p := range parts {
		dst = append(dst, p...)
	}
	return dst
}

// messageSize is the size of the message that b begins with, header included; at least that of a header.
func messageSize(b []byte) int {
	return int(min(max(int64(binary.BigEndian.Uint32(b[1:]))+1, headerLen), math.MaxInt32))
}

// cString reads a NUL-terminated string from the front of b.
func cString(b []byte) (s, rest []byte, ok bool) {
	i := bytes.IndexByte(b, 0)
	if i < 0 {
		return nil, nil, false
	}
	return b[:i], b[i+1:], true
}

func zeroTerminated(s string) []byte { return append([]byte(s), 0) }

// The extended protocol in the few shapes that are needed for statements of koldproxy's own.

func appendParse(dst []byte, name, sql string) []byte {
	return appendMessage(dst, msgParse, zeroTerminated(name), zeroTerminated(sql), []byte{0, 0})
}

// appendBind binds text parameters and asks for text results.
func appendBind(dst []byte, portal, statement string, args ...[]byte) []byte {
	body := append(zeroTerminated(portal), zeroTerminated(statement)...)
	body = append(body, 0, 0) // parameter formats: all text
	body = binary.BigEndian.AppendUint16(body, uint16(len(args)))
	for _, a := range args {
		body = binary.BigEndian.AppendUint32(body, uint32(len(a)))
		body = append(body, a...)
	}
	body = append(body, 0, 0) // result formats: all text
	return appendMessage(dst, msgBind, body)
}

func appendExecute(dst []byte, portal string) []byte {
	return appendMessage(dst, msgExecute, zeroTerminated(portal), []byte{0, 0, 0, 0})
}

func appendClose(dst []byte, target byte, name string) []byte {
	return appendMessage(dst, msgClose, []byte{target}, zeroTerminated(name))
}

func appendFlush(dst []byte) []byte { return appendMessage(dst, msgFlush) }
func appendSync(dst []byte) []byte  { return appendMessage(dst, msgSync) }

// firstColumn is the first column of a DataRow body; nil when it is null or the body is damaged.
func firstColumn(body []byte) []byte {
	if len(body) < 6 || binary.BigEndian.Uint16(body) == 0 {
		return nil
	}
	size := binary.BigEndian.Uint32(body[2:])
	if int64(size) > int64(len(body)-6) {
		return nil
	}
	return body[6 : 6+size]
}
