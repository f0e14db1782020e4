package localpg

import "syscall"

// serverAttr starts a server in a process group of its own, so that a Ctrl-C in the terminal reaches koldproxy only, and
// asks the kernel to stop it when the thread that forked it dies.
func serverAttr(a *account) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Credential: a.credential(), Pdeathsig: syscall.SIGQUIT}
}
