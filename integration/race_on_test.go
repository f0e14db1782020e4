//go:build race

package integration_test

// buildFlags: the binary under test gets the race detector when the tests have it.
var buildFlags = []string{"-race"}
