package integration_test

import "syscall"

// dieWithParent lets the kernel kill the process when the tests end without stopping it.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}
