package localpg

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
)

// serverPIDName is where, in the run folder, the owner writes down the number of the server that it has started.
const serverPIDName = "server.pid"

// reaperScript waits for the end of its standard input, which comes when the owner closes it or dies. Then it stops the
// owner's server of data directory $1 if it still runs, waits for it, and removes folder $2. It must not wait for anything
// else: it runs without anybody who could see it. It goes by the number that the owner wrote down and not by postmaster.pid:
// on a kept data directory that may be the next owner's server by now.
const reaperScript = `
trap '' HUP INT TERM
cat >/dev/null
pid=$(cat "$2/` + serverPIDName + `" 2>/dev/null)
serves() { if [ -d /proc/self ]; then [ "$(readlink "/proc/$pid/cwd")" = "$1" ]; else kill -0 "$pid" 2>/dev/null; fi; }
if [ -n "$pid" ] && serves "$1"; then
	kill -QUIT "$pid"
	n=0
	while serves "$1"; do
		n=$((n + 1))
		[ "$n" -eq 200 ] && kill -KILL "$pid"
		[ "$n" -eq 300 ] && break
		sleep 0.05
	done
fi
rm -rf -- "$2"
`

// reaper is a shell process that outlives a killed owner just long enough to clean up.
type reaper struct {
	cmd  *exec.Cmd
	life *os.File // the writing end; closing it lets the reaper go
}

func startReaper(data, folder string) (*reaper, error) {
	reading, life, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the reaper: %w", err)
	}
	// The context of the caller is not for this process: it has to outlive everything.
	cmd := exec.Command("/bin/sh", "-c", reaperScript, "koldproxy-reaper", data, folder)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdin = reading
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	if closeErr := reading.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the reaper: %w", err), life.Close())
	}
	return &reaper{cmd: cmd, life: life}, nil
}

// stop lets the reaper do its work and waits for it. The server must have been stopped, or the reaper does it the hard way.
func (r *reaper) stop() error {
	if err := r.life.Close(); err != nil {
		return err
	}
	if err := r.cmd.Wait(); err != nil {
		return fmt.Errorf("wait for the reaper: %w", err)
	}
	return nil
}
