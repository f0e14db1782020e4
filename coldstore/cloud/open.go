package cloud

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// Credentials are keys of one cloud. Those that are empty are found as the cloud's own tools find them: environment,
// configuration files, the role of the machine.
type Credentials struct {
	// For s3.
	AccessKeyID     string
	SecretAccessKey string
	SessionToken    string
	// ServiceAccount, for gs, is the JSON of a service account's key.
	ServiceAccount string
	// For azblob: the account, and its key or a shared access signature.
	AccountName string
	AccountKey  string
	SASToken    string
}

// Schemes are the schemes of URLs that [Open] knows.
var Schemes = []string{"s3", "gs", "azblob"}

// Open opens the bucket that a URL names. Nothing is asked of the cloud yet, except for its credentials where they come from the
// machine. Parameters of a URL that mean nothing are errors. The URL must not hold secrets.
//
//	s3://bucket[/prefix]?region=…&endpoint=https://…&use_path_style=true
//	gs://bucket[/prefix]?endpoint=https://…
//	azblob://container[/prefix]?account=…&endpoint=https://…
func Open(ctx context.Context, rawURL string, credentials Credentials, options Options) (*Bucket, error) {
	p, err := parse(rawURL)
	if err != nil {
		return nil, fmt.Errorf("cold storage URL: %w", err)
	}
	var b *Bucket
	switch p.scheme {
	case "s3":
		b, err = openS3(ctx, p, credentials, options)
	case "gs":
		b, err = openGCS(ctx, p, credentials, options)
	case "azblob":
		b, err = openAzure(ctx, p, credentials, options)
	}
	if err != nil {
		return nil, fmt.Errorf("cold storage %s://%s: %w", p.scheme, p.bucket, err)
	}
	return b, nil
}

// Check says whether [Open] would take a URL, without asking anybody.
func Check(rawURL string) error {
	_, err := parse(rawURL)
	return err
}

// place is a URL taken apart.
type place struct {
	scheme, bucket, prefix string
	region, endpoint       string
	account                string
	pathStyle              bool
}

var parameters = map[string][]string{
	"s3": {"region", "endpoint", "use_path_style"}, "gs": {"endpoint"}, "azblob": {"account", "endpoint"},
}

func parse(rawURL string) (place, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return place{}, errors.New("is no URL")
	}
	known, ok := parameters[u.Scheme]
	switch {
	case !ok:
		return place{}, fmt.Errorf("unknown scheme %q; use file, %s", u.Scheme, strings.Join(Schemes, ", "))
	case u.User != nil:
		return place{}, errors.New("credentials do not belong into the URL; leave them to the environment, a file or the machine's role")
	case u.Host == "":
		return place{}, errors.New("names no bucket")
	case u.Fragment != "":
		return place{}, errors.New("has a fragment")
	}
	p := place{scheme: u.Scheme, bucket: u.Host, prefix: strings.Trim(u.Path, "/")}
	for element := range strings.SplitSeq(p.prefix, "/") {
		if element == "." || element == ".." || p.prefix != "" && element == "" {
			return place{}, fmt.Errorf("the prefix %q has empty elements or dots", p.prefix)
		}
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return place{}, errors.New("has parameters that cannot be read")
	}
	for name, values := range query {
		if !slices.Contains(known, name) || len(values) != 1 || values[0] == "" {
			return place{}, fmt.Errorf("parameter %q of %s is unknown, empty or given twice; there are %s", name, u.Scheme, strings.Join(known, ", "))
		}
	}
	p.region, p.endpoint, p.account = query.Get("region"), query.Get("endpoint"), query.Get("account")
	switch query.Get("use_path_style") {
	case "", "false":
	case "true":
		p.pathStyle = true
	default:
		return place{}, errors.New("use_path_style must be true or false")
	}
	if p.endpoint != "" {
		if e, err := url.Parse(p.endpoint); err != nil || e.Scheme != "https" && e.Scheme != "http" || e.Host == "" {
			return place{}, errors.New("endpoint must be an http or https URL")
		}
	}
	return p, nil
}
