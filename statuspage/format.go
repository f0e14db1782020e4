package statuspage

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"net/url"
	"sort"
	"strconv"
	"strings"
	"time"
)

// formats are the functions of the templates.
var formats = template.FuncMap{
	"bytes":     formatBytes,
	"count":     formatCount,
	"rate":      formatRate,
	"ago":       func(t time.Time) string { return formatAgo(time.Since(t)) },
	"clock":     func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.000 UTC") },
	"chart":     chart,
	"last":      last,
	"top":       top,
	"percent":   func(share float64) string { return strconv.FormatFloat(100*share, 'f', 0, 64) },
	"progress":  formatProgress,
	"retention": formatRetention,
	"link":      streamLink,
	"value": func(v any) any {
		switch v := v.(type) {
		case *int64:
			if v != nil {
				return *v
			}
			return int64(0)
		case *string:
			if v != nil {
				return *v
			}
			return ""
		}
		return v
	},
}

func execute(name string, data any) (template.HTML, error) {
	var b bytes.Buffer
	err := templates.ExecuteTemplate(&b, name, data)
	return template.HTML(b.String()), err //nolint:gosec // it comes from a template
}

// formatBytes uses the binary units that PostgreSQL's pg_size_pretty uses, under its names.
func formatBytes(n any) string {
	v := number(n)
	for _, unit := range []string{"B", "kB", "MB", "GB", "TB"} {
		if v < 1024 || unit == "TB" {
			if unit == "B" || v >= 100 {
				return fmt.Sprintf("%.0f %s", v, unit)
			}
			return fmt.Sprintf("%.1f %s", v, unit)
		}
		v /= 1024
	}
	return ""
}

// formatCount groups digits with thin spaces.
func formatCount(n int64) string {
	sign, digits := "", strconv.FormatInt(n, 10)
	if n < 0 {
		sign, digits = "-", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "\u202f" + digits[i:]
	}
	return sign + digits
}

func formatRate(perSecond float64) string {
	if perSecond > 0 && perSecond < 10 {
		return fmt.Sprintf("%.1f/s", perSecond)
	}
	return formatCount(int64(perSecond+0.5)) + "/s"
}

func formatAgo(d time.Duration) string {
	switch {
	case d < 2*time.Second:
		return "now"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h ago", int(d.Hours()))
	}
	return fmt.Sprintf("%d days ago", int(d.Hours()/24))
}

// formatProgress shows what a job says of itself, as "rows 1 000 · segments 2".
func formatProgress(raw json.RawMessage) string {
	var p map[string]any
	if json.Unmarshal(raw, &p) != nil {
		return ""
	}
	parts := make([]string, 0, len(p))
	for key, value := range p {
		text := fmt.Sprint(value)
		if n, ok := value.(float64); ok {
			text = formatCount(int64(n))
		}
		parts = append(parts, strings.ReplaceAll(key, "_", " ")+" "+text)
	}
	sort.Strings(parts)
	return strings.Join(parts, " · ")
}

// formatRetention shows an interval as PostgreSQL spells it, with units where that is a bare clock time ("24:00:00").
func formatRetention(interval string) string {
	var hours, minutes, seconds int
	if n, _ := fmt.Sscanf(interval, "%d:%d:%d", &hours, &minutes, &seconds); n != 3 || seconds != 0 {
		return interval
	}
	switch {
	case minutes == 0:
		return fmt.Sprintf("%d h", hours)
	case hours == 0:
		return fmt.Sprintf("%d min", minutes)
	}
	return fmt.Sprintf("%d h %d min", hours, minutes)
}

// streamLink is the address of a stream's page. Its names are any text at all.
func streamLink(database string, s stream) string {
	return "/stream?" + url.Values{"db": {database}, "schema": {s.Schema}, "name": {s.Name}}.Encode()
}

func number(n any) float64 {
	switch n := n.(type) {
	case int64:
		return float64(n)
	case *int64:
		if n != nil {
			return float64(*n)
		}
	case float64:
		return n
	}
	return 0
}
