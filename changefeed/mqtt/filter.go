package mqtt

import (
	"strings"

	"github.com/koldproxy/koldproxy"
)

// maxFilterBytes bounds a filter. The longest stream topic has three names of 63 bytes, each escaped threefold.
const maxFilterBytes = 1024

// filterKind is what a subscription filter asks for.
type filterKind int

const (
	filterRefused  filterKind = iota // malformed, too long, or about a topic that begins with $ and is no stream's
	filterOrdinary                   // about topics that do not begin with $
	filterExact                      // one stream topic, no wildcard
	filterPattern                    // stream topics, with a wildcard behind the first level
)

// parseFilter takes a filter as SUBSCRIBE brings it apart: the share group, empty if none, and the part that topics are
// compared with.
func parseFilter(filter string) (group, pattern string, kind filterKind) {
	pattern = filter
	if rest, shared := strings.CutPrefix(filter, "$share/"); shared {
		var found bool
		group, pattern, found = strings.Cut(rest, "/")
		if !found || group == "" || strings.ContainsAny(group, "+#") {
			return "", "", filterRefused
		}
	}
	if pattern == "" || len(filter) > maxFilterBytes || !wildcardsInPlace(pattern) {
		return "", "", filterRefused
	}
	if !strings.HasPrefix(pattern, "$") {
		return group, pattern, filterOrdinary
	}
	if first, _, _ := strings.Cut(pattern, "/"); first != koldproxy.TopicRoot {
		return "", "", filterRefused
	}
	if strings.ContainsAny(pattern, "+#") {
		return group, pattern, filterPattern
	}
	return group, pattern, filterExact
}

// wildcardsInPlace tells whether every + and # stands alone in its level, and # in the last one only.
func wildcardsInPlace(pattern string) bool {
	for rest, more := pattern, true; more; {
		var level string
		level, rest, more = strings.Cut(rest, "/")
		if len(level) > 1 && strings.ContainsAny(level, "+#") || level == "#" && more {
			return false
		}
	}
	return true
}

// matches tells whether a topic belongs to a pattern of [parseFilter]. A leading wildcard does not match a topic that
// begins with $ [MQTT-4.7.2-1].
func matches(pattern, topic string) bool {
	if strings.HasPrefix(topic, "$") && !strings.HasPrefix(pattern, "$") {
		return false
	}
	for {
		level, patternRest, patternMore := strings.Cut(pattern, "/")
		if level == "#" {
			return true
		}
		topicLevel, topicRest, topicMore := strings.Cut(topic, "/")
		if level != "+" && level != topicLevel {
			return false
		}
		if !topicMore {
			return !patternMore || patternRest == "#" // a/# matches a as well
		}
		if !patternMore {
			return false
		}
		pattern, topic = patternRest, topicRest
	}
}

// validTopic tells whether a message may be published on a topic at all.
func validTopic(topic string) bool {
	return topic != "" && len(topic) <= 0xFFFF && !strings.ContainsAny(topic, "+#\x00")
}
