package walapply

import (
	"strings"
	"time"

	"github.com/koldproxy/koldproxy"
)

// reader takes fields off the front of a message. Reading past the end gives zero values and sets bad. The strings it
// returns are parts of the message, which is copied once as a whole.
type reader struct {
	s   string
	bad bool
}

func (r *reader) bytes(n uint32) string {
	if uint64(n) > uint64(len(r.s)) {
		r.s, r.bad = "", true
		return ""
	}
	b := r.s[:n]
	r.s = r.s[n:]
	return b
}

func (r *reader) uint(size uint32) (n uint64) {
	b := r.bytes(size)
	for i := range len(b) {
		n = n<<8 | uint64(b[i])
	}
	return n
}

func (r *reader) byte() byte     { return byte(r.uint(1)) }
func (r *reader) uint16() uint16 { return uint16(r.uint(2)) }
func (r *reader) uint32() uint32 { return uint32(r.uint(4)) }

func (r *reader) lsn() koldproxy.LSN { return koldproxy.LSN(r.uint(8)) }

// time reads microseconds since 2000-01-01.
func (r *reader) time() time.Time {
	const micros2000 = 946_684_800_000_000
	return time.UnixMicro(int64(r.uint(8)) + micros2000).UTC()
}

func (r *reader) cstring() string {
	s, rest, ok := strings.Cut(r.s, "\x00")
	if !ok {
		r.s, r.bad = "", true
		return ""
	}
	r.s = rest
	return s
}
