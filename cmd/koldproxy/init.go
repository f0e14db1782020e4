package main

import (
	"bytes"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
)

// reference is the configuration with every key, its meaning and its default. TestReferenceConfiguration makes it from the
// structs' comments, see there.
//
//go:embed reference.toml
var reference string

//go:embed role.sql
var roleTemplate string

// The files that init writes.
const (
	configFileName   = "koldproxy.toml"
	roleFileName     = "koldproxy.sql"
	passwordFileName = "koldproxy.password"
)

// initiation is what init has to know.
type initiation struct {
	host      string
	port      uint16
	role      string
	databases []string
	owners    []string
	force     bool
	json      bool
}

func newInitCommand(opts *options) *cobra.Command {
	in := &initiation{}
	cmd := &cobra.Command{
		Use:   "init [DIR]",
		Short: "write a commented configuration, and the SQL that creates the service role with the least privileges",
		Long: `init writes three files into DIR (default: the current folder):

  koldproxy.toml       every key of the configuration with its meaning and its default
  koldproxy.sql        what an administrator of the server runs once: the service role, without superuser
  koldproxy.password   the role's password, made at random; koldproxy.sql has only a verifier of it

Values given with --set are written into the configuration. A role that exists keeps its password: for a second koldproxy at the same
server, copy koldproxy.password of the first.`,
		Example: `  koldproxy init --host db.internal --database app --owner app_owner /etc/koldproxy
  psql -v ON_ERROR_STOP=1 -h db.internal -U postgres -f /etc/koldproxy/koldproxy.sql
  koldproxy check --config /etc/koldproxy/koldproxy.toml
  koldproxy serve --config /etc/koldproxy/koldproxy.toml`,
		Args: arguments(cobra.MaximumNArgs(1)),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return nil, cobra.ShellCompDirectiveFilterDirs
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			dir := "."
			if len(args) > 0 {
				dir = args[0]
			}
			return in.run(cmd, opts, dir)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&in.host, "host", "localhost", "the `HOST` of the PostgreSQL server, or the folder of its Unix socket")
	flags.Uint16Var(&in.port, "port", 5432, "its `PORT`")
	flags.StringVar(&in.role, "role", "koldproxy", "the `NAME` of the service role")
	flags.StringArrayVar(&in.databases, "database", []string{"app"}, "a database with streams and feeds; may be repeated")
	flags.StringArrayVar(&in.owners, "owner", nil, "a `ROLE` that owns tables to capture; may be repeated (default: the owner of each database)")
	flags.BoolVar(&in.force, "force", false, "overwrite files that exist, but for the password")
	flags.BoolVar(&in.json, "json", false, "print JSON")
	return cmd
}

func (in *initiation) run(cmd *cobra.Command, opts *options, dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if err := in.validate(); err != nil {
		return err
	}
	password, err := in.password(filepath.Join(dir, passwordFileName))
	if err != nil {
		return err
	}
	sql, err := in.roleSQL(password)
	if err != nil {
		return err
	}
	c, err := loadConfig(&options{set: opts.set}, nil)
	if err != nil {
		return err
	}
	if pg, err := c.pgxConfig(""); c.Postgres.DSN != "" && (err != nil || pg.Password != "") {
		return usageError{errors.New("--set postgres.dsn: want one that is right, and without a password: " + passwordFileName + " has it")}
	}
	in.fill(c, filepath.Join(dir, passwordFileName))
	configMode := os.FileMode(0o644)
	if c.hasSecrets() {
		configMode = 0o600
	}
	files := []struct {
		name, text string
		mode       os.FileMode
	}{
		{configFileName, c.commented(), configMode},
		{roleFileName, sql, 0o600},
		{passwordFileName, password + "\n", 0o600},
	}
	if !in.force {
		for _, f := range files {
			if _, err := os.Lstat(filepath.Join(dir, f.name)); err == nil {
				return usageError{fmt.Errorf("%s exists; nothing was written, --force overwrites it", filepath.Join(dir, f.name))}
			} else if !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var paths []string
	for _, f := range files {
		path := filepath.Join(dir, f.name)
		if err := replaceFile(path, f.text, f.mode); err != nil {
			return err
		}
		paths = append(paths, path)
	}
	if in.json {
		return printJSON(cmd.OutOrStdout(), map[string]any{"files": paths})
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), `wrote %s
wrote %s
wrote %s
next, as an administrator of the server:
  psql -v ON_ERROR_STOP=1 -h %s -p %d -U postgres -f %s
then:
  koldproxy check --config %s
  koldproxy serve --config %[7]s
`, paths[0], paths[1], paths[2], shellWord(in.host), in.port, shellWord(paths[1]), shellWord(paths[0]))
	return err
}

// validate refuses what cannot be meant.
func (in *initiation) validate() error {
	switch {
	case in.host == "" || strings.ContainsAny(in.host, "\x00\n"):
		return usageError{fmt.Errorf("--host %q: want a host or the folder of a Unix socket", in.host)}
	case in.port == 0:
		return usageError{errors.New("--port 0: want the server's port")}
	}
	for _, name := range slices.Concat([]string{in.role}, in.databases, in.owners) {
		if name == "" || strings.ContainsAny(name, "\x00\n") {
			return usageError{fmt.Errorf("%q is no name of a role or database", name)}
		}
	}
	if in.role == evalRole || slices.Contains(in.owners, evalRole) {
		return usageError{errors.New(evalRole + " is the role without rights in which code of users runs; it can be neither the service role nor an owner")}
	}
	return nil
}

// password is the one in a file that exists (the role may have it already), or a new one.
func (in *initiation) password(path string) (string, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) || err == nil && !in.force { // which is refused soon
		return rand.Text(), nil
	}
	password := strings.TrimRight(string(raw), "\r\n")
	if err == nil && (password == "" || strings.ContainsFunc(password, func(r rune) bool { return r < ' ' || r > '~' })) {
		err = fmt.Errorf("%s: want a password of printable ASCII", path)
	}
	return password, err
}

// shellWord is a text as one word of a shell's command line.
func shellWord(text string) string {
	if plainWord.MatchString(text) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

var plainWord = regexp.MustCompile(`^[a-zA-Z0-9_./:@%+,-]+$`)

// fill puts the service connection into a configuration, unless --set has done so.
func (in *initiation) fill(c *config, passwordFile string) {
	byDefault := func(key string) bool { return c.origins[key] == "default" }
	if byDefault("postgres.dsn") {
		quote := func(s string) string { return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'" }
		c.Postgres.DSN = fmt.Sprintf("host=%s port=%d user=%s dbname=%s", quote(in.host), in.port, quote(in.role), quote(in.databases[0]))
	}
	if byDefault("postgres.password_file") {
		c.Postgres.PasswordFile = passwordFile
	}
	if byDefault("postgres.databases") {
		c.Postgres.Databases = in.databases
	}
}

// referenceKey finds a key in reference.
var referenceKey = regexp.MustCompile(`^#([a-z_]+) = `)

// commented is the configuration as a file that explains itself: keys that have their default are commented out.
func (c *config) commented() string {
	defaults := defaultConfig()
	values := map[string]string{}
	for i, f := range c.fields() {
		line := f.name + " = " + f.toml(f.value.Interface())
		if standard := f.name + " = " + f.toml(defaults.fields()[i].value.Interface()); line == standard {
			line = "#" + standard
		}
		values[f.key] = line + "\n"
	}
	var b strings.Builder
	section := ""
	for line := range strings.Lines(reference) {
		if strings.HasPrefix(line, "[") {
			section = strings.Trim(line, "[]\n")
		}
		if m := referenceKey.FindStringSubmatch(line); m != nil {
			line = values[section+"."+m[1]]
		}
		b.WriteString(line)
	}
	return b.String()
}

// roleSQL is what creates the service role.
func (in *initiation) roleSQL(password string) (string, error) {
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return "", err
	}
	verifier, err := scramVerifier(password, salt)
	if err != nil {
		return "", err
	}
	t, err := template.New("role.sql").Funcs(template.FuncMap{
		"ident":   func(name string) string { return pgx.Identifier{name}.Sanitize() },
		"literal": quoteLiteral,
	}).Parse(roleTemplate)
	if err != nil {
		return "", fmt.Errorf("role.sql: %w", err)
	}
	var b bytes.Buffer
	err = t.Execute(&b, map[string]any{
		"Role": in.role, "Databases": in.databases, "Owners": in.owners, "Verifier": verifier,
		"Slots": len(in.databases), "Config": configFileName, "Password": passwordFileName, "Tag": in.dollarTag(),
	})
	return b.String(), err
}

// dollarTag delimits bodies of DO: no name contains it.
func (in *initiation) dollarTag() string {
	names := strings.Join(slices.Concat([]string{in.role}, in.databases, in.owners), " ")
	tag := "$init$"
	for n := 1; strings.Contains(names, tag); n++ {
		tag = fmt.Sprintf("$init%d$", n)
	}
	return tag
}

// quoteLiteral is a text as a constant of SQL.
func quoteLiteral(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

// scramIterations is what PostgreSQL uses by default.
const scramIterations = 4096

// scramVerifier is what PostgreSQL stores of a password of ASCII letters and digits (others would have to be normalized first).
func scramVerifier(password string, salt []byte) (string, error) {
	salted, err := pbkdf2.Key(sha256.New, password, salt, scramIterations, sha256.Size)
	if err != nil {
		return "", err
	}
	mac := func(text string) []byte {
		h := hmac.New(sha256.New, salted)
		h.Write([]byte(text))
		return h.Sum(nil)
	}
	stored := sha256.Sum256(mac("Client Key"))
	encode := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s", scramIterations, encode(salt), encode(stored[:]), encode(mac("Server Key"))), nil
}

// replaceFile writes a file whole or not at all.
func replaceFile(path, text string, mode os.FileMode) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".koldproxy-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.WriteString(text)
	if err = errors.Join(err, f.Chmod(mode), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
