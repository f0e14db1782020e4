package coldstore

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/google/uuid"

	"github.com/koldproxy/koldproxy"
)

// CorruptError says that an object is not what the catalog says it is. Offset is a position in bytes where one is known,
// otherwise -1.
type CorruptError struct {
	Object string
	Offset int64
	Reason string
}

// Error names the object and what is wrong with it.
func (e *CorruptError) Error() string {
	if e.Offset >= 0 {
		return fmt.Sprintf("object %s is corrupt at byte %d: %s", e.Object, e.Offset, e.Reason)
	}
	return fmt.Sprintf("object %s is corrupt: %s", e.Object, e.Reason)
}

// IsCorrupt says whether err is about an object that is there and is damaged, in contrast to one that is missing
// (fs.ErrNotExist) or was written in a form this version does not know ([ErrUnknownFormat]).
func IsCorrupt(err error) bool {
	var corrupt *CorruptError
	return errors.As(err, &corrupt)
}

// ErrUnknownFormat says that a file was written by a version of koldproxy that this one cannot read.
var ErrUnknownFormat = errors.New("unknown segment format")

// errStale says that a file was overtaken: something else published or removed segments in a way that makes the file's rows
// wrong to publish. The flush begins again.
var errStale = errors.New("another flush has published meanwhile")

// errCancelled says that the job was cancelled or taken over while it ran.
var errCancelled = errors.New("the job was cancelled or taken over")

// errInvariant marks what must never happen: the catalog contradicts itself.
var errInvariant = errors.New("the catalog contradicts itself")

func errUnknownKind(k kind) error {
	return fmt.Errorf("%w: column kind %q", ErrUnknownFormat, k)
}

func noLongerManaged(t *managedTable) error {
	return koldproxy.Errorf(koldproxy.CodeNotInPrerequisite, "table %s is no longer managed", t)
}

// segmentError is a [koldproxy.Error] that still says what it came from, so that [IsCorrupt] and errors.Is see through it.
type segmentError struct {
	client *koldproxy.Error
	cause  error
}

// Error is what the client sees.
func (e *segmentError) Error() string { return e.client.Error() }

// Unwrap gives the error for the client and its cause.
func (e *segmentError) Unwrap() []error { return []error{e.client, e.cause} }

// unreadable makes the KS002 error of a segment. It names the segment and the object and leaves the rest to the detail.
func unreadable(id uuid.UUID, object string, cause error) error {
	reason := "cannot be read"
	hint := "Check the cold storage; the statement can be repeated."
	switch {
	case IsCorrupt(cause):
		reason, hint = "is damaged", "Restore the object from a copy; or, if there is none, koldstore.forget_segment gives the segment up."
	case errors.Is(cause, ErrUnknownFormat):
		reason, hint = "was written by a newer koldproxy", "Upgrade this koldproxy."
	case errors.Is(cause, fs.ErrNotExist):
		reason, hint = "is missing", "If retention has just removed it, repeat the statement; otherwise restore the object from a copy, or, if there is none, koldstore.forget_segment gives the segment up."
	}
	err := koldproxy.Errorf(koldproxy.CodeColdUnreadable, "cold segment %s %s (object %s)", id, reason, object).
		WithDetail(cause.Error()).WithHint(hint)
	return &segmentError{client: err, cause: cause}
}

// gone makes the KS002 error of a segment that is not in the catalog any more.
func gone(id uuid.UUID) error {
	err := koldproxy.Errorf(koldproxy.CodeColdUnreadable, "cold segment %s is no longer there", id).
		WithHint("Retention has removed it; repeat the statement.")
	return &segmentError{client: err, cause: fs.ErrNotExist}
}
