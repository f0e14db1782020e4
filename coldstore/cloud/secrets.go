package cloud

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Secrets says which references in stored credentials may be followed. Who may register a storage decides where its requests go
// to, so a reference must not lead to whatever this machine has.
type Secrets struct {
	// Folder is where {"file": "name"} looks, and nowhere else. Empty refuses files.
	Folder string
	// EnvPrefix begins the names of environment variables that {"env": "NAME"} may name.
	EnvPrefix string
}

// maxSecretBytes bounds a secret; the largest are service accounts of about 2.5 kB.
const maxSecretBytes = 64 << 10

// Credentials reads the credentials of a registered storage, following references. Errors name no secret.
func (s *Secrets) Credentials(stored json.RawMessage) (Credentials, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(stored, &members); err != nil {
		return Credentials{}, errors.New("the credentials are no JSON object")
	}
	var c Credentials
	for name, into := range map[string]*string{
		"access_key_id": &c.AccessKeyID, "secret_access_key": &c.SecretAccessKey, "session_token": &c.SessionToken,
		"service_account": &c.ServiceAccount, "account_name": &c.AccountName, "account_key": &c.AccountKey, "sas_token": &c.SASToken,
	} {
		raw, ok := members[name]
		if !ok {
			continue
		}
		value, err := s.resolve(raw)
		if err != nil {
			return Credentials{}, fmt.Errorf("credential %s: %w", name, err)
		}
		*into = value
		delete(members, name)
	}
	for name := range members {
		return Credentials{}, fmt.Errorf("credential %q is unknown", name)
	}
	return c, nil
}

func (s *Secrets) resolve(raw json.RawMessage) (string, error) {
	var literal string
	if json.Unmarshal(raw, &literal) == nil {
		return literal, nil
	}
	var reference struct{ File, Env string }
	if err := json.Unmarshal(raw, &reference); err != nil {
		return "", errors.New("is neither a string nor a reference")
	}
	switch {
	case reference.Env != "":
		if s.EnvPrefix == "" || !strings.HasPrefix(reference.Env, s.EnvPrefix) {
			return "", fmt.Errorf("environment variables must begin with %s", s.EnvPrefix)
		}
		value, ok := os.LookupEnv(reference.Env)
		if !ok {
			return "", fmt.Errorf("environment variable %s is not set", reference.Env)
		}
		return value, nil
	case s.Folder == "":
		return "", errors.New("files are refused: cold.secrets_dir is not set")
	}
	return s.file(reference.File)
}

func (s *Secrets) file(name string) (string, error) {
	if !filepath.IsLocal(name) {
		return "", fmt.Errorf("file %q is not in cold.secrets_dir", name)
	}
	root, err := os.OpenRoot(s.Folder) // links that lead out of it are not followed
	if err != nil {
		return "", errors.New("cold.secrets_dir cannot be opened")
	}
	defer func() { _ = root.Close() }() // only a handle
	info, err := root.Stat(name)
	if err != nil || !info.Mode().IsRegular() || info.Size() > maxSecretBytes {
		return "", fmt.Errorf("file %q in cold.secrets_dir is missing, no regular file or too large", name)
	}
	data, err := root.ReadFile(name)
	if err != nil {
		return "", fmt.Errorf("file %q in cold.secrets_dir cannot be read", name)
	}
	return strings.TrimRight(string(data), "\r\n"), nil
}
