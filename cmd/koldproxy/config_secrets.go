package main

import (
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// masked stands for what is not shown.
const masked = "xxxxx"

// secretName finds parameters whose values are not for people to see.
var secretName = regexp.MustCompile(`(?i)password|secret|token|key|signature`)

// hasSecrets says whether a value is not shown as it is.
func (c *config) hasSecrets() bool {
	return slices.ContainsFunc(c.fields(), func(f field) bool { return strings.Contains(fmt.Sprint(f.shown()), masked) })
}

// maskDSN is a connection string without its secrets. What cannot be understood is not shown at all: it may well be that a password
// makes it so.
func maskDSN(text string) string {
	if strings.Contains(text, "://") {
		return maskURL(text)
	}
	return maskKeywords(text)
}

// maskURL is a URL without its secrets: the password, and parameters that are called so. If it is no good URL, or an @ stands where
// none should, a password is likely to be the reason, and all that may be a part of it is left out.
func maskURL(text string) string {
	scheme, rest, ok := strings.Cut(text, "://")
	if !ok || !slices.Contains(schemes, scheme) {
		return masked
	}
	u, err := url.Parse(text)
	misplaced := err == nil && (strings.ContainsRune(u.Host+u.Path+u.RawQuery, '@') || u.Fragment != "")
	if err == nil && (!misplaced || scheme == "file") {
		if u.RawQuery != "" {
			u.RawQuery = maskQuery(u.RawQuery)
		}
		return u.Redacted()
	}
	at := strings.LastIndex(rest, "@")
	if at < 0 || strings.Contains(rest[:at], "?") {
		return scheme + "://" + masked
	}
	where, query, ok := strings.Cut(rest[at:], "?")
	if ok {
		where += "?" + maskQuery(query)
	}
	return scheme + "://" + masked + where
}

// schemes are those of the URLs in a configuration.
var schemes = []string{"postgres", "postgresql", "mqtt", "mqtts", "ws", "wss", "file", "s3", "gs", "azblob"}

func maskQuery(raw string) string {
	query, err := url.ParseQuery(raw)
	if err != nil {
		return masked
	}
	for name, values := range query {
		if slices.Contains(values, "") { // as of a password with an & in it
			return masked
		}
		if secretName.MatchString(name) {
			query.Set(name, masked)
		}
	}
	return query.Encode()
}

var (
	keywordPair = regexp.MustCompile(`^\s*([a-z_]+)\s*=\s*('(?:[^'\\]|\\.)*'|(?:[^\s'\\]|\\.)(?:[^\s\\]|\\.)*|)(?:\s+|$)`)
	keywords    = strings.Fields(`application_name channel_binding client_encoding connect_timeout dbname gssencmode host hostaddr keepalives keepalives_count
		keepalives_idle keepalives_interval krbspn krbsrvname lock_timeout max_protocol_version min_protocol_version options passfile password port
		require_auth search_path service servicefile sslcert sslcrl sslkey sslmode sslnegotiation sslpassword sslrootcert sslsni statement_timeout
		target_session_attrs tcp_user_timeout timezone user`)
)

// maskKeywords is a list of keyword=value, as libpq takes it, without passwords. A keyword that nobody knows, or one that comes twice, may be a piece of one.
func maskKeywords(text string) string {
	var pairs []string
	seen := map[string]bool{}
	for text = strings.TrimLeft(text, " \t\r\n"); text != ""; {
		pair := keywordPair.FindStringSubmatch(text)
		if pair == nil || !slices.Contains(keywords, pair[1]) || seen[pair[1]] {
			return masked
		}
		seen[pair[1]] = true
		name, value := pair[1], pair[2]
		if secretName.MatchString(name) {
			value = masked
		}
		pairs = append(pairs, name+"="+value)
		text = text[len(pair[0]):]
	}
	return strings.Join(pairs, " ")
}
