//go:build !linux

package proxy

import (
	"errors"
	"time"
)

// loopsExist says whether this system has event loops.
const loopsExist = false

// loop and looped are for Linux; elsewhere each session has its pumps.
type loop struct{}

type (
	looped struct{}
	end    struct{}
)

func newLoop(time.Duration) (*loop, error) { return nil, errors.ErrUnsupported }

func (*loop) close()               {}
func (*loop) carry(*session) error { return errors.ErrUnsupported }

func (*looped) wake() {}

func (*end) receiveRecord([]byte) (int, error) { return 0, errors.ErrUnsupported }
func (*end) send([]byte) error                 { return errors.ErrUnsupported }

func (*looped) sendTo(side, []byte) error { return errors.ErrUnsupported }
