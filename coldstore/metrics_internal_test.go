package coldstore

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// An alert on an increase does not see the first step of a series that begins with it.
func TestCountersByStatusBeginAtZero(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	newMetrics(registry)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string][]string)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if m.GetCounter().GetValue() != 0 {
				t.Errorf("%s begins at %v", f.GetName(), m.GetCounter().GetValue())
			}
			for _, l := range m.GetLabel() {
				got[f.GetName()] = append(got[f.GetName()], l.GetValue())
			}
		}
	}
	for name, want := range map[string][]string{
		"koldproxy_coldstore_flushes_total":       {jobCancelled, jobCompleted, jobError, jobNotDue, jobQueued},
		"koldproxy_coldstore_compactions_total":   {statusError, statusOK},
		"koldproxy_coldstore_pages_total":         {statusError, statusOK},
		"koldproxy_coldstore_verifications_total": {statusCorrupt, statusError, statusOK},
	} {
		if !slices.Equal(got[name], want) {
			t.Errorf("%s begins with the statuses %q, not %q", name, got[name], want)
		}
	}
}
