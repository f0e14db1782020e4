package integration_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestGuaranteesNameTestsThatExist keeps docs/guarantees.md honest.
func TestGuaranteesNameTestsThatExist(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/guarantees.md")
	must(t, err)
	named := regexp.MustCompile("`([a-z/]+)\\.(Test[A-Z][A-Za-z]*)`").FindAllStringSubmatch(string(text), -1)
	if len(named) < 20 {
		t.Fatalf("only %d tests are named", len(named))
	}
	sources := map[string]string{}
	for _, n := range named {
		pkg, test := n[1], n[2]
		if _, ok := sources[pkg]; !ok {
			files, err := filepath.Glob(filepath.Join("..", pkg, "*_test.go"))
			must(t, err)
			for _, file := range files {
				source, err := os.ReadFile(file)
				must(t, err)
				sources[pkg] += string(source)
			}
		}
		if !strings.Contains(sources[pkg], "\nfunc "+test+"(") {
			t.Errorf("docs/guarantees.md names %s.%s, which does not exist", pkg, test)
		}
	}
}
