package main

import (
	"context"
	"time"
)

// The growing pauses between attempts, and how long an error that keeps coming back is not told again.
const (
	retryMin   = 100 * time.Millisecond
	retryMax   = 5 * time.Second
	retryAgain = time.Minute
)

// untilItWorks calls do until it returns nil. It says false if ctx ended before. failed is told of each new error at once, and
// of the same one again once a minute.
func untilItWorks(ctx context.Context, do func(context.Context) error, failed func(error)) bool {
	var told string
	var at time.Time
	for pause := retryMin; ; pause = min(2*pause, retryMax) {
		err := do(ctx)
		if ctx.Err() != nil {
			return false
		}
		if err == nil {
			return true
		}
		if told != err.Error() || time.Since(at) > retryAgain {
			told, at = err.Error(), time.Now()
			failed(err)
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}
