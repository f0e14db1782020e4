package main

import (
	"encoding"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// field is one configuration key and the place of its value.
type field struct {
	section, name, key string
	value              reflect.Value
}

// fields lists all keys in the order of the struct.
func (c *config) fields() []field {
	var list []field
	sections := reflect.ValueOf(c).Elem()
	for i := range sections.NumField() {
		section := sections.Type().Field(i)
		if !section.IsExported() {
			continue
		}
		for j := range section.Type.NumField() {
			f := field{
				section: section.Tag.Get("toml"),
				name:    section.Type.Field(j).Tag.Get("toml"),
				value:   sections.Field(i).Field(j),
			}
			f.key = f.section + "." + f.name
			list = append(list, f)
		}
	}
	return list
}

// env is the environment variable that sets the key.
func (f field) env() string {
	return "KOLDPROXY_" + strings.ToUpper(strings.ReplaceAll(f.key, ".", "_"))
}

// kind says what values the key takes.
func (f field) kind() string {
	switch f.value.Interface().(type) {
	case string:
		return "a string"
	case bool:
		return "true or false"
	case int:
		return "a whole number"
	case duration:
		return `a duration, as "1m30s"`
	case []string:
		return `a list of strings, as ["app"]`
	default:
		return "another value"
	}
}

// assign sets a key from text; lists are separated by commas.
func (c *config) assign(f field, text, origin string) error {
	var err error
	switch target := f.value.Addr().Interface().(type) {
	case encoding.TextUnmarshaler:
		err = target.UnmarshalText([]byte(text))
	case *string:
		*target = text
	case *bool:
		*target, err = strconv.ParseBool(text)
	case *int:
		*target, err = strconv.Atoi(text)
	case *[]string:
		*target = nil
		for part := range strings.SplitSeq(text, ",") {
			if part = strings.TrimSpace(part); part != "" {
				*target = append(*target, part)
			}
		}
	default:
		err = fmt.Errorf("no text form for %T", target)
	}
	if err != nil {
		return fmt.Errorf("%s (%s): %w", f.key, origin, err)
	}
	c.origins[f.key] = origin
	return nil
}

var (
	keywordPassword = regexp.MustCompile(`(?i)(password\s*=\s*)('(?:[^'\\]|\\.)*'|\S+)`)
	secretName      = regexp.MustCompile(`(?i)password|secret|token|key|signature`)
)

// toml is a value of the key as a configuration file spells it.
func (f field) toml(value any) string {
	if list, ok := value.([]string); ok && list == nil {
		value = []string{} // null is no TOML
	}
	var b strings.Builder
	encoder := json.NewEncoder(&b) // for strings, numbers, booleans and lists the same as TOML
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		panic(fmt.Sprintf("%s: %v", f.key, err)) // no key has such a type
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// shown is the value for people to see: secrets are masked.
func (f field) shown() any {
	switch {
	case f.value.Kind() == reflect.Slice && f.value.IsNil():
		return []string{} // null says nothing
	case f.value.Kind() != reflect.String:
		return f.value.Interface()
	}
	text := f.value.String()
	if u, err := url.Parse(text); err == nil && u.Scheme != "" && (u.User != nil || u.RawQuery != "") {
		query := u.Query()
		for name := range query {
			if secretName.MatchString(name) {
				query.Set(name, "xxxxx")
			}
		}
		u.RawQuery = query.Encode()
		return u.Redacted()
	}
	if f.key != "postgres.dsn" {
		return text
	}
	return keywordPassword.ReplaceAllString(text, "${1}xxxxx")
}

func newConfigCommand(opts *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "look at the configuration",
		Args:  arguments(cobra.NoArgs),
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var asJSON bool
	show := &cobra.Command{
		Use:   "print",
		Short: "print every key with its value and where that came from; secrets are masked",
		Example: `  koldproxy config print --config koldproxy.toml
  koldproxy config print --json | jq '.[] | select(.origin != "default")'`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := loadConfig(opts, os.Environ())
			if err != nil {
				return err
			}
			return c.print(cmd, asJSON)
		},
	}
	show.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.AddCommand(show)
	return cmd
}

func (c *config) print(cmd *cobra.Command, asJSON bool) error {
	out := cmd.OutOrStdout()
	if asJSON {
		type entry struct {
			Key    string `json:"key"`
			Value  any    `json:"value"`
			Origin string `json:"origin"`
		}
		entries := []entry{}
		for _, f := range c.fields() {
			entries = append(entries, entry{f.key, f.shown(), c.origins[f.key]})
		}
		return printJSON(out, entries)
	}
	section := ""
	for _, f := range c.fields() {
		if f.section != section {
			section = f.section
			if _, err := fmt.Fprintf(out, "[%s]\n", section); err != nil {
				return err
			}
		}
		if _, err := fmt.Fprintf(out, "%s = %s  # %s\n", f.name, f.toml(f.shown()), c.origins[f.key]); err != nil {
			return err
		}
	}
	return nil
}
