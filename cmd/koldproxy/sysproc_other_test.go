//go:build !linux

package main

import "syscall"

// dieWithParent has no means outside of Linux.
func dieWithParent() *syscall.SysProcAttr { return nil }
