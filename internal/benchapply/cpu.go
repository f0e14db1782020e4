package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of times in /proc/PID/stat (USER_HZ, which is 100 on every architecture that Linux has today).
const tick = 10 * time.Millisecond

// processTimes are the user and system times of a process, its own and those of children that it has waited for.
func processTimes(pid int) (own, children time.Duration, parent int, err error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, 0, err
	}
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:])) // the third field on: state, ppid, …
	numbers := make([]int, len(fields))
	for i := range fields {
		numbers[i], _ = strconv.Atoi(fields[i]) // state is a letter
	}
	const utime, stime, cutime, cstime = 11, 12, 13, 14
	if len(numbers) <= cstime {
		return 0, 0, 0, fmt.Errorf("/proc/%d/stat is too short", pid)
	}
	return time.Duration(numbers[utime]+numbers[stime]) * tick, time.Duration(numbers[cutime]+numbers[cstime]) * tick, numbers[1], nil
}

// cpu is the processor time that the server, with all of its processes, and koldproxy have used so far. On a machine that others
// use as well it is the steadier figure.
func (d *database) cpu() (time.Duration, error) {
	raw, err := os.ReadFile(filepath.Join(d.b.cluster.DataDir, "postmaster.pid"))
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(raw), "\n")
	postmaster, err := strconv.Atoi(first)
	if err != nil {
		return 0, err
	}
	own, ended, _, err := processTimes(postmaster)
	if err != nil {
		return 0, err
	}
	total := own + ended
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if pid == int(d.source.PgConn().PID()) || pid == int(d.copy.PgConn().PID()) {
			continue // these only watch
		}
		if own, _, parent, err := processTimes(pid); err == nil && parent == postmaster { // it may have ended meanwhile
			total += own
		}
	}
	if d.serving != nil {
		own, _, _, err := processTimes(d.serving.Process.Pid)
		if err != nil {
			return 0, err
		}
		total += own
	}
	return total, nil
}
