package main

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
)

// systemdPrefix begins the address of a socket that systemd has opened, followed by its FileDescriptorName.
const systemdPrefix = "systemd:"

// systemdListener takes the socket over that systemd opened under this name. It stays open while koldproxy restarts, so
// that clients wait in its queue meanwhile. Each can be taken once in a process.
func systemdListener(address string) (net.Listener, error) {
	name := strings.TrimPrefix(address, systemdPrefix)
	passed, err := activation.ListenersWithNames()
	if err != nil {
		return nil, fmt.Errorf("sockets of systemd: %w", err)
	}
	if len(passed[name]) != 1 || passed[name][0] == nil {
		for _, ln := range slices.Concat(slices.Collect(maps.Values(passed))...) {
			_ = ln.Close() // taken over and of no use
		}
		return nil, fmt.Errorf("systemd passes %d listening sockets named %q; the socket unit needs one ListenStream and FileDescriptorName=%s",
			len(passed[name]), name, name)
	}
	return passed[name][0], nil
}

// tellSystemd sends assignments to the service manager, as daemon.SdNotifyReady; where there is none it does nothing.
func tellSystemd(state ...string) error {
	_, err := daemon.SdNotify(false, strings.Join(state, "\n"))
	return err
}

// systemdStatus is the line that systemctl status shows, for what [watch] calls the state.
func systemdStatus(state error) string {
	text := "forwarding sessions; changes of every database are applied"
	if state != nil {
		text = "forwarding sessions; " + strings.Join(strings.Fields(state.Error()), " ")
	}
	return "STATUS=" + text
}
