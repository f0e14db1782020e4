package main

import "syscall"

// dieWithParent lets the kernel end a child when the tests end without stopping it.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
}
