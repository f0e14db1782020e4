package integration_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestGuaranteesNameTestsThatExist keeps docs/guarantees.md and the threat model honest.
func TestGuaranteesNameTestsThatExist(t *testing.T) {
	t.Parallel()
	sources := map[string]string{}
	for _, page := range []string{"guarantees.md", "security.md"} {
		text, err := os.ReadFile(filepath.Join("../docs", page))
		must(t, err)
		named := regexp.MustCompile("`([a-z/]+)\\.((?:Test|Fuzz)[A-Z][A-Za-z0-9]*)`").FindAllStringSubmatch(string(text), -1)
		if len(named) < 20 {
			t.Errorf("docs/%s names only %d tests", page, len(named))
		}
		for _, n := range named {
			pkg, test := n[1], n[2]
			if _, ok := sources[pkg]; !ok {
				sources[pkg] = testSources(t, pkg)
			}
			if !strings.Contains(sources[pkg], "\nfunc "+test+"(") {
				t.Errorf("docs/%s names %s.%s, which does not exist", page, pkg, test)
			}
		}
	}
}

// testSources is the text of a package's tests.
func testSources(t *testing.T, pkg string) string {
	t.Helper()
	if pkg == "koldproxy" { // the root
		pkg = "."
	}
	files, err := filepath.Glob(filepath.Join("..", pkg, "*_test.go"))
	must(t, err)
	var all strings.Builder
	for _, file := range files {
		source, err := os.ReadFile(file)
		must(t, err)
		all.Write(source)
	}
	return all.String()
}
