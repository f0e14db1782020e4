// Package cold tests the cold store against things that the product itself must not depend on: servers that speak the clouds'
// protocols, and other engines that read its files. It is a module of its own so that they stay out of the product's.
package cold_test

import (
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestMain(m *testing.M) { localpg.Main(m) }

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
