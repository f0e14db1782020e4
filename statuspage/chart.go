package statuspage

import (
	"fmt"
	"html/template"
	"slices"
	"strings"
)

// The drawing area of a chart in units of its viewBox; CSS decides how large that is on the screen.
const (
	chartWidth  = 240.0
	chartHeight = 48.0
	chartMargin = 2.0 // so that a line at the edge is not cut in half
)

// chart draws a series as a line with the area below it, scaled from 0 to its maximum. label says to screen readers, and to the
// mouse, what it shows. Fewer than two values give an empty frame of the same size, so that the page does not jump.
func chart(label string, series []float64) template.HTML {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg class="chart" viewBox="0 0 %g %g" preserveAspectRatio="none" role="img" aria-label="%s"><title>%[3]s</title>`,
		chartWidth, chartHeight, template.HTMLEscapeString(label))
	if len(series) >= 2 {
		line := chartLine(series)
		fmt.Fprintf(&b, `<path class="area" d="M0 %g L%s L%g %g Z"/>`, chartHeight, line, chartWidth, chartHeight)
		fmt.Fprintf(&b, `<path class="line" d="M%s"/>`, line)
	}
	b.WriteString(`</svg>`)
	return template.HTML(b.String()) //nolint:gosec // numbers and an escaped label
}

// chartLine is the points of a line, left to right. There are at least two values.
func chartLine(series []float64) string {
	top := max(slices.Max(series), 1)
	points := make([]string, len(series))
	for i, v := range series {
		x := chartWidth * float64(i) / float64(len(series)-1)
		y := chartHeight - chartMargin - (chartHeight-2*chartMargin)*max(v, 0)/top
		points[i] = fmt.Sprintf("%.1f %.1f", x, y)
	}
	return strings.Join(points, " L")
}
