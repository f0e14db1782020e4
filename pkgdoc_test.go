package koldproxy_test

import (
	"go/parser"
	"go/token"
	"path"
	"slices"
	"strings"
	"testing"
)

// TestEveryPackageHasADocFile: the documentation of a package stands in its doc.go and nowhere else.
func TestEveryPackageHasADocFile(t *testing.T) {
	t.Parallel()
	files := productFiles(t)
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		text := ""
		if parsed.Doc != nil {
			text = parsed.Doc.Text()
		}
		if doc := path.Join(path.Dir(file), "doc.go"); !slices.Contains(files, doc) {
			t.Errorf("%s is missing", doc)
		} else if file != doc && text != "" {
			t.Errorf("%s has a package comment; it belongs into %s", file, doc)
		} else if file == doc && len(strings.Fields(text)) < 20 {
			t.Errorf("%s says too little: %q", doc, text)
		}
	}
}
