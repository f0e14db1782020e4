package localpg

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

const (
	folderPrefix = "koldproxy-pg-"
	lockName     = "owner.lock"
	// maxSocketDir leaves room for "/.s.PGSQL.65535.lock" within the 107 bytes of a Unix socket address.
	maxSocketDir = 85
	// unlockedGrace is how long a folder may exist without a lock file before it counts as abandoned.
	unlockedGrace = time.Minute
)

// randomName returns n random characters that need no quoting in SQL, shells, file names and URLs.
func randomName(n int) string {
	s := rand.Text()
	for len(s) < n {
		s += rand.Text()
	}
	return s[:n]
}

// lockFile takes an exclusive lock that the kernel gives back when the process ends. The error matches
// syscall.EWOULDBLOCK when somebody else holds it.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(&fs.PathError{Op: "lock", Path: path, Err: err}, f.Close())
	}
	return f, nil
}

// runFolder is a temporary folder with a lock that says its owner lives.
type runFolder struct {
	path string
	lock *os.File
}

// newRunFolder makes a folder that acct can reach and whose path is short enough for Unix sockets.
func newRunFolder(acct *account) (*runFolder, error) {
	bases := []string{os.TempDir(), "/tmp", "/var/tmp"}
	var problems error
	for _, base := range bases {
		if len(base) > maxSocketDir-len(folderPrefix)-16 {
			problems = errors.Join(problems, fmt.Errorf("%s is too long for a Unix socket", base))
			continue
		}
		if err := acct.canReach(base); err != nil {
			problems = errors.Join(problems, err)
			continue
		}
		sweep(base)
		folder, err := makeRunFolder(base)
		if err == nil {
			return folder, nil
		}
		problems = errors.Join(problems, err)
	}
	return nil, fmt.Errorf("make a temporary folder: %w", problems)
}

func makeRunFolder(base string) (*runFolder, error) {
	for range 10 {
		path, err := os.MkdirTemp(base, folderPrefix)
		if err != nil {
			return nil, err
		}
		if err := os.Chmod(path, 0o755); err != nil {
			return nil, errors.Join(err, os.RemoveAll(path))
		}
		lock, err := lockFile(filepath.Join(path, lockName))
		if errors.Is(err, syscall.EWOULDBLOCK) || errors.Is(err, fs.ErrNotExist) {
			continue // a sweeper came between making and locking, and takes the folder away
		}
		if err != nil {
			return nil, errors.Join(err, os.RemoveAll(path))
		}
		if _, err := os.Stat(lock.Name()); err != nil { // the same, a moment later
			if err := lock.Close(); err != nil {
				return nil, err
			}
			continue
		}
		return &runFolder{path: path, lock: lock}, nil
	}
	return nil, fmt.Errorf("make a folder in %s: taken away each time", base)
}

// remove takes the folder away and gives the lock back.
func (f *runFolder) remove() error {
	return errors.Join(os.RemoveAll(f.path), f.lock.Close())
}

// sweep removes the folders of dead owners below base, and their servers. It does what it can: folders of other users and
// those that another sweeper has just taken are left alone.
func sweep(base string) {
	folders, err := filepath.Glob(filepath.Join(base, folderPrefix+"*"))
	if err != nil {
		return
	}
	for _, folder := range folders {
		sweepFolder(folder)
	}
}

func sweepFolder(folder string) {
	info, err := os.Lstat(folder)
	if err != nil || !info.IsDir() {
		return
	}
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || int(stat.Uid) != os.Geteuid() {
		return
	}
	path := filepath.Join(folder, lockName)
	if _, err := os.Lstat(path); err != nil && time.Since(info.ModTime()) < unlockedGrace {
		return // being made
	}
	lock, err := lockFile(path)
	if err != nil {
		return // its owner lives
	}
	defer lock.Close() //nolint:errcheck // nothing was written
	if err := evict(filepath.Join(folder, dataName)); err == nil {
		_ = os.RemoveAll(folder) // what stays is met again by the next sweep
	}
}
