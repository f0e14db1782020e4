package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
)

// options are the flags.
type options struct {
	binary  string
	scale   float64
	rounds  int
	seconds int
	bigRows int
	expired int
	only    string
	perf    string
}

// parts are what can be measured, in this order.
var parts = []struct {
	name string
	run  func(ctx context.Context, b *bench) error
}{
	{"drain", drains},
	{"streams", streamDrains},
	{"latency", latencies},
	{"cost", applicationCost},
	{"page", hotPage},
	{"memory", bigTransaction},
	{"push", pushLatency},
	{"fanout", fanOut},
	{"replay", replay},
	{"sweep", sweep},
}

func main() {
	var o options
	flag.StringVar(&o.binary, "koldproxy", "bin/koldproxy", "the binary to measure")
	flag.Float64Var(&o.scale, "scale", 0.1, "size of the workloads; 1 is 500 000 inserts and 100 000 update transactions")
	flag.IntVar(&o.rounds, "rounds", 3, "rounds of each comparison; medians are printed")
	flag.IntVar(&o.seconds, "seconds", 5, "length of each measurement that takes time rather than rows")
	flag.IntVar(&o.bigRows, "big", 1_000_000, "rows of the large transaction of part memory")
	flag.IntVar(&o.expired, "expired", 0, "expired events of part sweep; 0 is 10 000 000 times the scale")
	flag.StringVar(&o.only, "only", "", "parts to measure, separated by commas: drain, streams, latency, cost, page, memory, push, fanout, replay, sweep; or case names of drains")
	flag.StringVar(&o.perf, "perf", "", "record the drains of koldproxy with `perf` into this file")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "benchapply:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	if o.scale <= 0 || o.rounds < 1 || o.seconds < 1 || o.bigRows < 1 || o.expired < 0 {
		return errors.New("sizes must be positive")
	}
	b, err := newBench(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }() //nolint:contextcheck // also after ctx has ended
	for _, p := range parts {
		if !b.wanted(p.name) {
			continue
		}
		if err := p.run(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// wanted says whether a part, or something in it, was asked for.
func (b *bench) wanted(part string) bool {
	if b.only == "" {
		return true
	}
	for name := range strings.SplitSeq(b.only, ",") {
		if name == part || strings.HasPrefix(name, part+":") {
			return true
		}
	}
	return false
}

// wantedCase is the same for one case of a part, asked for as part:case.
func (b *bench) wantedCase(part, name string) bool {
	asked := strings.Split(b.only, ",")
	return b.only == "" || slices.Contains(asked, part) || slices.Contains(asked, part+":"+name)
}

// scaled is a number of rows at the scale of this run.
func (b *bench) scaled(rows int) int { return max(int(float64(rows)*b.scale), 1000) }

// median of figures; it sorts them.
func median(figures []float64) float64 {
	slices.Sort(figures)
	return figures[len(figures)/2]
}
