package sse_test

import (
	"testing"

	"github.com/koldproxy/koldproxy/internal/localpg"
)

func TestMain(m *testing.M) { localpg.Main(m) }
