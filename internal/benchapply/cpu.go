package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
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
	numbers := atois(strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))) // the third field on: state, ppid, …
	const utime, stime, cutime, cstime = 11, 12, 13, 14
	if len(numbers) <= cstime {
		return 0, 0, 0, fmt.Errorf("/proc/%d/stat is too short", pid)
	}
	return time.Duration(numbers[utime]+numbers[stime]) * tick, time.Duration(numbers[cutime]+numbers[cstime]) * tick, numbers[1], nil
}

// atois reads numbers; what is none is 0.
func atois(fields []string) []int {
	numbers := make([]int, len(fields))
	for i := range fields {
		numbers[i], _ = strconv.Atoi(fields[i])
	}
	return numbers
}

// cpu is the processor time that the server, with all of its processes, and koldproxy have used so far. On a machine that others
// use as well it is the steadier figure.
func (d *database) cpu() (time.Duration, error) {
	var total time.Duration
	err := d.eachProcess(func(_ string, own time.Duration) { total += own })
	if err == nil && d.serving != nil {
		var own time.Duration
		own, _, _, err = processTimes(d.serving.Process.Pid)
		total += own
	}
	return total, err
}

// eachProcess calls visit for the server's processes, with what they are and the processor time that they have used so far. The time of
// those that have ended is the postmaster's, and what ends meanwhile may be missed. Sessions that only watch are left out.
func (d *database) eachProcess(visit func(title string, own time.Duration)) error {
	raw, err := os.ReadFile(filepath.Join(d.b.cluster.DataDir, "postmaster.pid"))
	if err != nil {
		return err
	}
	first, _, _ := strings.Cut(string(raw), "\n")
	postmaster, err := strconv.Atoi(first)
	if err != nil {
		return err
	}
	own, ended, _, err := processTimes(postmaster)
	if err != nil {
		return err
	}
	visit("postmaster", own+ended)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == int(d.source.PgConn().PID()) || pid == int(d.copy.PgConn().PID()) {
			continue
		}
		own, _, parent, err := processTimes(pid)
		if err != nil || parent != postmaster { // it may have ended meanwhile
			continue
		}
		if title, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
			visit(string(title), own)
		}
	}
	return nil
}

// spending is what has been used so far.
type spending struct {
	// Processor time of pgbench, its sessions and the server's own processes; of walsenders; of sessions, or workers, that apply what was
	// read; and of koldproxy.
	application, sender, sessions, process time.Duration
	busy                                   time.Duration // the machine's processors
	switches                               int           // of context
	log                                    int64         // bytes of write-ahead log
}

// since is what has been used since an earlier look.
func (s spending) since(before spending) spending {
	return spending{
		s.application - before.application, s.sender - before.sender, s.sessions - before.sessions, s.process - before.process,
		s.busy - before.busy, s.switches - before.switches, s.log - before.log,
	}
}

// spending looks while no client of pgbench is there, nor a process that served one.
func (d *database) spending(ctx context.Context) (s spending, err error) {
	if err := await(ctx, d.source, time.Millisecond, `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'pgbench')`); err != nil {
		return s, err
	}
	time.Sleep(200 * time.Millisecond) // such a process has left pg_stat_activity, and takes a moment to end
	err = d.eachProcess(func(title string, own time.Duration) {
		switch {
		case strings.HasPrefix(title, "postgres: walsender"):
			s.sender += own
		case strings.HasPrefix(title, "postgres: logical replication worker") || strings.Contains(title, " "+d.name+" "):
			s.sessions += own
		default:
			s.application += own
		}
	})
	if err != nil {
		return s, err
	}
	var pgbench syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &pgbench); err != nil {
		return s, err
	}
	s.application += time.Duration(pgbench.Utime.Nano() + pgbench.Stime.Nano())
	if d.serving != nil {
		if s.process, _, _, err = processTimes(d.serving.Process.Pid); err != nil {
			return s, err
		}
	}
	if err := s.machine(); err != nil {
		return s, err
	}
	s.log, err = value[int64](ctx, d.source, `SELECT (pg_current_wal_lsn() - '0/0')::bigint`)
	return s, err
}

// machine reads what the kernel counts.
func (s *spending) machine() error {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(stat)) {
		fields := strings.Fields(line)
		switch {
		case len(fields) > 8 && fields[0] == "cpu":
			for i, n := range atois(fields[1:8]) {
				if i != 3 && i != 4 { // idle, waiting for disks
					s.busy += time.Duration(n) * tick
				}
			}
		case len(fields) > 1 && fields[0] == "ctxt":
			s.switches = atois(fields)[1]
		}
	}
	return nil
}
