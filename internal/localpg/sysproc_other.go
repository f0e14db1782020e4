//go:build !linux

package localpg

import "syscall"

// serverAttr starts a server in a process group of its own, so that a Ctrl-C in the terminal reaches koldproxy only. Only
// the reaper stops it when koldproxy dies.
func serverAttr(a *account) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Credential: a.credential()}
}
