package coldstore

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// tempFile is a file without a name, so that nothing of it stays when the process is killed. Its errors do not say where it was: they are
// shown to clients.
type tempFile struct {
	file *os.File
}

// tempFile makes an empty one. The caller closes it.
func (s *Store) tempFile() (*tempFile, error) {
	file, err := os.CreateTemp(s.cfg.TempDir, "koldproxy-segment-*")
	if err != nil {
		return nil, withoutPath(err)
	}
	if err := os.Remove(file.Name()); err != nil {
		return nil, errors.Join(withoutPath(err), withoutPath(file.Close()))
	}
	return &tempFile{file}, nil
}

func (t *tempFile) Read(p []byte) (int, error) {
	n, err := t.file.Read(p)
	return n, withoutPath(err)
}

func (t *tempFile) Write(p []byte) (int, error) {
	n, err := t.file.Write(p)
	return n, withoutPath(err)
}

// Seek implements [io.Seeker].
func (t *tempFile) Seek(offset int64, whence int) (int64, error) {
	n, err := t.file.Seek(offset, whence)
	return n, withoutPath(err)
}

func (t *tempFile) Close() error { return withoutPath(t.file.Close()) }

// withoutPath names a file of package os's error by what it is for.
func withoutPath(err error) error {
	pathErr, ok := errors.AsType[*fs.PathError](err)
	if !ok {
		return err // io.EOF among others, as it is
	}
	return fmt.Errorf("temporary file: %s: %w", pathErr.Op, pathErr.Err)
}

var _ io.ReadWriteSeeker = (*tempFile)(nil)
