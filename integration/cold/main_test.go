// Package cold tests the cold store against things that the product itself must not depend on: servers that speak the clouds'
// protocols, and other engines that read its files. It is a module of its own so that they stay out of the product's.
package cold_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

// The servers of other projects end with the process, and so do the connections to them.
func TestMain(m *testing.M) {
	localpg.Main(m,
		goleak.IgnoreTopFunction("go.opencensus.io/stats/view.(*worker).start"),
		goleak.IgnoreTopFunction("github.com/versity/versitygw/embedgw.RunVersityGW"),
		goleak.IgnoreTopFunction("github.com/versity/versitygw/internal/netutil.(*MultiListener).Accept"),
		goleak.IgnoreTopFunction("internal/poll.runtime_pollWait"),
		goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"),
		goleak.IgnoreTopFunction("time.Sleep"))
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
