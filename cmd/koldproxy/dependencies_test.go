package main

import (
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
)

// fixedIn is the first version of a module without a flaw that matters here, or could, with the name of the flaw. `make vuln` asks the Go
// project's database for all of them where it can be reached; this list is for where it cannot.
var fixedIn = map[string]struct{ version, flaw string }{
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity":                            {"v1.6.0", "CVE-2024-35255, a race that gives away rights"},
	"github.com/apache/thrift":                                                    {"v0.14.0", "CVE-2020-13949, short messages that allocate a lot"},
	"github.com/go-jose/go-jose/v4":                                               {"v4.0.5", "CVE-2025-27144, memory while parsing"},
	"github.com/golang-jwt/jwt/v5":                                                {"v5.2.2", "CVE-2025-30204, memory while parsing"},
	"github.com/gorilla/websocket":                                                {"v1.4.1", "CVE-2020-27813, lengths that overflow"},
	"github.com/jackc/pgproto3/v2":                                                {"v2.3.3", "CVE-2024-27304, messages beyond 4 GB"},
	"github.com/jackc/pgx/v5":                                                     {"v5.5.4", "CVE-2024-27304, messages beyond 4 GB"},
	"github.com/prometheus/client_golang":                                         {"v1.11.1", "CVE-2022-21698, methods as labels"},
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc": {"v0.46.0", "CVE-2023-47108, labels without bound"},
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp":               {"v0.44.0", "CVE-2023-45142, labels without bound"},
	"golang.org/x/crypto":                                                         {"v0.35.0", "CVE-2024-45337, CVE-2025-22869, ssh"},
	"golang.org/x/net":                                                            {"v0.38.0", "CVE-2023-44487, CVE-2025-22870, CVE-2025-22872, http2 and html"},
	"golang.org/x/oauth2":                                                         {"v0.27.0", "CVE-2025-22868, memory while parsing"},
	"golang.org/x/sys":                                                            {"v0.1.0", "CVE-2022-29526, faccessat"},
	"golang.org/x/text":                                                           {"v0.3.8", "CVE-2022-32149, Accept-Language"},
	"google.golang.org/grpc":                                                      {"v1.56.3", "CVE-2023-44487, rapid reset"},
	"google.golang.org/protobuf":                                                  {"v1.33.0", "CVE-2024-24786, an endless loop"},
	"gopkg.in/yaml.v3":                                                            {"v3.0.1", "CVE-2022-28948, panics"},
}

// Nothing that is linked in is known to be vulnerable.
func TestDependenciesWithoutKnownFlaws(t *testing.T) {
	t.Parallel()
	info, ok := debug.ReadBuildInfo()
	if !ok || len(info.Deps) < 20 {
		t.Fatal("the binary does not know what it was made of")
	}
	found := 0
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		if fixed, listed := fixedIn[m.Path]; listed {
			found++
			if older(m.Version, fixed.version) {
				t.Errorf("%s %s: %s; use %s or later", m.Path, m.Version, fixed.flaw, fixed.version)
			}
		}
	}
	if found < 8 {
		t.Errorf("only %d of the modules in the list are linked in", found)
	}
	for _, c := range []struct {
		a, b string
		want bool
	}{{"v1.2.3", "v1.2.4", true}, {"v1.10.0", "v1.9.9", false}, {"v1.2.3", "v1.2.3", false}, {"v0.0.0-20200101000000-abc", "v0.1.0", true}, {"v2.0.0", "v1.9.9", false}} {
		if older(c.a, c.b) != c.want {
			t.Errorf("older(%s, %s) is wrong", c.a, c.b)
		}
	}
}

// older compares the three numbers of versions; what follows them does not count.
func older(version, than string) bool {
	number := func(v string) (n [3]int) {
		v, _, _ = strings.Cut(strings.TrimPrefix(v, "v"), "-")
		for i, part := range strings.SplitN(v, ".", 3) {
			n[i], _ = strconv.Atoi(part)
		}
		return n
	}
	a, b := number(version), number(than)
	for i := range a {
		if a[i] != b[i] {
			return a[i] < b[i]
		}
	}
	return false
}
