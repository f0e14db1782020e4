package main

import (
	"encoding"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
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

// assign sets a key from text. Lists are separated by commas, or written as in the file, which config print shows.
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
		*target, err = splitList(text)
	default:
		return fmt.Errorf("%s: no text form for %T", f.key, target)
	}
	if err != nil {
		return fmt.Errorf("%s (%s): want %s, not %q", f.key, origin, f.kind(), text)
	}
	c.origins[f.key] = origin
	return nil
}

// splitList reads a, b or ["a", "b"].
func splitList(text string) (list []string, err error) {
	if text = strings.TrimSpace(text); strings.HasPrefix(text, "[") {
		var document struct{ List []string }
		err = toml.Unmarshal([]byte("List = "+text), &document)
		return document.List, err
	}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			list = append(list, part)
		}
	}
	return list, nil
}

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
	switch {
	case text == "":
		return text
	case f.key == "postgres.dsn":
		return maskDSN(text)
	case f.name == "url", strings.Contains(text, "://"):
		return maskURL(text)
	}
	return text
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
