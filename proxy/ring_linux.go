package proxy

import (
	"errors"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ringSize is how many sends a ring takes at once, a power of two.
const ringSize = 64

// What linux/io_uring.h calls IORING_OFF_SQES, IORING_FEAT_SINGLE_MMAP, IORING_FEAT_FAST_POLL, IORING_OP_SEND and
// IORING_ENTER_GETEVENTS.
const (
	ringSendsAt    = 0x10000000
	ringOneMapping = 1 << 0
	ringNeverWaits = 1 << 5 // Linux 5.7, the first in which a send with MSG_DONTWAIT does not wait
	ringOpSend     = 26
	ringGetEvents  = 1
)

// ringParameters is struct io_uring_params.
type ringParameters struct {
	sends, results, flags, processor, idle, features, workers uint32
	_                                                         [3]uint32
	send                                                      struct{ head, tail, mask, entries, flags, dropped, order, _, _, _ uint32 }
	result                                                    struct{ head, tail, mask, entries, overflow, entriesAt, flags, _, _, _ uint32 }
}

// ringSend is struct io_uring_sqe as a send uses it.
type ringSend struct {
	operation, flags uint8
	_                uint16
	fd               int32
	_                uint64
	address          uint64
	size, how        uint32
	number           uint64
	_                [3]uint64
}

// ringResult is struct io_uring_cqe.
type ringResult struct {
	number uint64
	result int32 // bytes, or an error number below zero
	_      uint32
}

// ring hands several sends to the kernel with one system call (io_uring). That saves more than the other calls: whoever is
// woken up by a send may take the processor at the end of a system call, and so does it once instead of after each.
//
// The memory is shared with the kernel, which takes sends between its head and our tail, and leaves results between our head and
// its tail. A ring belongs to one goroutine.
type ring struct {
	fd                   int
	rings, entries       []byte // mappings
	sends                []ringSend
	sendTail             *uint32
	results              []ringResult
	resultHead, resultOf *uint32 // resultOf is the kernel's tail
	count                int     // sends since the last submit
}

// newRing fails where the kernel has no io_uring, or does not let this process use it.
func newRing() (*ring, error) {
	var p ringParameters
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, ringSize, uintptr(unsafe.Pointer(&p)), 0) //nolint:gosec // the pointer is used within the call
	if errno != 0 {
		return nil, os.NewSyscallError("io_uring_setup", errno)
	}
	r := &ring{fd: int(fd)}
	if err := r.share(&p); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// share maps the memory that the ring has in common with the kernel.
func (r *ring) share(p *ringParameters) (err error) {
	const needed = ringOneMapping | ringNeverWaits
	if p.features&needed != needed {
		return errors.ErrUnsupported
	}
	size := max(p.send.order+4*p.sends, p.result.entriesAt+p.results*uint32(unsafe.Sizeof(ringResult{})))
	if r.rings, err = r.mapped(0, uintptr(size)); err != nil {
		return err
	}
	if r.entries, err = r.mapped(ringSendsAt, uintptr(p.sends)*unsafe.Sizeof(ringSend{})); err != nil {
		return err
	}
	r.sendTail = r.word(p.send.tail)
	r.resultHead, r.resultOf = r.word(p.result.head), r.word(p.result.tail)
	r.sends = unsafe.Slice((*ringSend)(unsafe.Pointer(unsafe.SliceData(r.entries))), p.sends)        //nolint:gosec // the kernel's layout
	r.results = unsafe.Slice((*ringResult)(unsafe.Pointer(&r.rings[p.result.entriesAt])), p.results) //nolint:gosec // the kernel's layout
	for i := range p.sends {
		*r.word(p.send.order + 4*i) = i // sends are taken in the order in which they lie
	}
	return nil
}

func (r *ring) mapped(at int64, size uintptr) ([]byte, error) {
	b, err := unix.Mmap(r.fd, at, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	return b, os.NewSyscallError("mmap", err)
}

func (r *ring) word(at uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.rings[at])) } //nolint:gosec // the kernel's layout

func (r *ring) close() {
	for _, b := range [][]byte{r.rings, r.entries} {
		if b != nil {
			_ = unix.Munmap(b)
		}
	}
	_ = unix.Close(r.fd)
}

// full says that submit has to be called before the next add.
func (r *ring) full() bool { return r.count == len(r.sends) }

// add prepares a send of b, which is not empty, to a socket. b stays the ring's until submit has returned; it has to be kept alive
// and not to be on a stack.
func (r *ring) add(fd int, b []byte) {
	s := &r.sends[(*r.sendTail+uint32(r.count))&uint32(len(r.sends)-1)]
	*s = ringSend{
		operation: ringOpSend, fd: int32(fd), number: uint64(r.count), how: unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL,
		address: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), size: uint32(len(b)), //nolint:gosec // b is kept alive
	}
	r.count++
}

// submit carries out the sends in the order of the calls of add and tells done of each, by its number from 0, how many bytes
// were taken. It returns how many sends the kernel has taken on; the others were not begun.
func (r *ring) submit(done func(number, n int, errno syscall.Errno)) (begun int) {
	tail := *r.sendTail
	atomic.StoreUint32(r.sendTail, tail+uint32(r.count))
	begun = r.enter(r.count, 0, 0)
	if begun < r.count {
		atomic.StoreUint32(r.sendTail, tail+uint32(begun))
	}
	r.count = 0
	for left := begun; left > 0; {
		head, end := *r.resultHead, atomic.LoadUint32(r.resultOf)
		if head == end {
			r.enter(0, left, ringGetEvents) // none of them should have to be waited for
			continue
		}
		for ; head != end; head++ {
			left--
			c := r.results[head&uint32(len(r.results)-1)]
			if n := int(c.result); n >= 0 {
				done(int(c.number), n, 0)
			} else {
				done(int(c.number), 0, syscall.Errno(-n))
			}
		}
		atomic.StoreUint32(r.resultHead, head)
	}
	return begun
}

// enter returns how many sends were taken on.
func (r *ring) enter(sends, results, flags int) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(sends), uintptr(results), uintptr(flags), 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}
