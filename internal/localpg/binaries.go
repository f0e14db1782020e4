package localpg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// BinsEnv names the environment variable with directories of PostgreSQL binaries, separated as in PATH. The first one is
// what [FindBinaries] takes.
const BinsEnv = "KOLDPROXY_TEST_PG_BINS"

// MinMajor is the oldest major version of PostgreSQL that koldproxy works with.
const MinMajor = 15

// ErrNoBinaries means that no usable PostgreSQL server was found on this machine.
var ErrNoBinaries = errors.New("no PostgreSQL server binaries found")

// searchPatterns are the places where packages install servers outside of PATH.
var searchPatterns = []string{
	"/usr/lib/postgresql/*/bin",          // Debian, Ubuntu
	"/usr/pgsql-*/bin",                   // Red Hat
	"/usr/libexec/postgresql*",           // Alpine
	"/usr/local/pgsql/bin",               // built from source
	"/opt/homebrew/opt/postgresql@*/bin", // Homebrew
	"/usr/local/opt/postgresql@*/bin",
}

// FindBinaries returns the directory that holds postgres and initdb. An explicit directory is taken or refused, never
// replaced by another one; an empty one is looked for in [BinsEnv], in PATH and where packages put servers, newest
// version first. The error matches [ErrNoBinaries] when there is none.
func FindBinaries(explicit string) (string, error) {
	if explicit != "" {
		if !hasServer(explicit) {
			return "", fmt.Errorf("%w in %s: postgres and initdb must both be there", ErrNoBinaries, explicit)
		}
		return filepath.Abs(explicit)
	}
	for _, dir := range filepath.SplitList(os.Getenv(BinsEnv)) {
		if dir != "" {
			return FindBinaries(dir)
		}
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		if dir, err := filepath.Abs(filepath.Dir(path)); err == nil && hasServer(dir) {
			return dir, nil
		}
	}
	var found []string
	for _, pattern := range searchPatterns {
		dirs, err := filepath.Glob(pattern)
		if err != nil {
			return "", fmt.Errorf("look for PostgreSQL in %s: %w", pattern, err)
		}
		found = append(found, slices.DeleteFunc(dirs, func(d string) bool { return !hasServer(d) })...)
	}
	if len(found) == 0 {
		return "", fmt.Errorf("%w: install PostgreSQL %d or later, or name its bin directory", ErrNoBinaries, MinMajor)
	}
	return slices.MaxFunc(found, func(a, b string) int { return versionInPath(a) - versionInPath(b) }), nil
}

func hasServer(dir string) bool {
	for _, name := range []string{"postgres", "initdb"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}

var digits = regexp.MustCompile(`\d+`)

// versionInPath is the last number in a directory name such as /usr/lib/postgresql/15/bin, 0 where there is none.
func versionInPath(dir string) int {
	numbers := digits.FindAllString(dir, -1)
	if len(numbers) == 0 {
		return 0
	}
	n, err := strconv.Atoi(numbers[len(numbers)-1])
	if err != nil {
		return 0
	}
	return n
}

// majorVersion asks the server binary in dir for its major version.
func majorVersion(ctx context.Context, dir string) (int, error) {
	path := filepath.Join(dir, "postgres")
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return 0, fmt.Errorf("ask %s for its version: %w", path, err)
	}
	n, err := strconv.Atoi(digits.FindString(string(out)))
	if err != nil {
		return 0, fmt.Errorf("ask %s for its version: no number in %q", path, strings.TrimSpace(string(out)))
	}
	return n, nil
}
