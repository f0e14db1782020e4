package proxy

import (
	"fmt"
	"testing"
)

// BenchmarkForwarding sends a small query and reads its answer, with pumps and in a loop. What it allocates is the proxy's:
// the client reuses its buffers. The time is mostly PostgreSQL's.
func BenchmarkForwarding(b *testing.B) {
	for _, loops := range []int{-1, 1} {
		if loops > 0 && !loopsExist {
			continue
		}
		b.Run(fmt.Sprintf("loops=%d", loops), func(b *testing.B) {
			p := startProxy(b, func(c *Config, _ *Deps) { c.EventLoops = loops })
			w := dialWire(b, p.dsn(b, p.cluster.TestDatabase(b)))
			query := appendMessage(nil, msgQuery, zeroTerminated("SELECT 1"))
			b.ReportAllocs()
			for b.Loop() {
				w.send(b, query, 0)
				for ready := false; !ready; {
					message, err := w.read()
					if err != nil {
						b.Fatal(err)
					}
					ready = message[0] == msgReady
				}
			}
		})
	}
}
