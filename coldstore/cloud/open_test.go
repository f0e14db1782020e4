package cloud

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestURLsThatMeanNothingAreRefused(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"ftp://x": "unknown scheme", "s3://": "names no bucket", "s3://key:secret@bucket": "credentials", "s3://b?regoin=x": "regoin", "s3://b?region=": "region",
		"s3://b?region=a&region=b": "region", "s3://b?endpoint=localhost:9000": "endpoint", "s3://b?use_path_style=yes": "use_path_style", "gs://b?region=x": "region",
		"s3://b/a/../c": "dots", "s3://b/a//c": "empty", "s3://b#f": "fragment",
	} {
		if err := Check(url); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret@") {
			t.Errorf("%s: %v", url, err)
		}
	}
	for _, url := range []string{"s3://bucket", "s3://bucket/a/prefix/?region=eu-central-1&use_path_style=true&endpoint=https%3A%2F%2Fs3.example", "gs://b/p", "azblob://c/p?account=a"} {
		if err := Check(url); err != nil {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestReferencesLeadNowhereElse(t *testing.T) {
	folder, outside := t.TempDir(), t.TempDir()
	for name, content := range map[string]string{filepath.Join(folder, "key"): "s3cret\n", filepath.Join(outside, "other"): "private"} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(outside, "other"), filepath.Join(folder, "link")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KOLDPROXY_SECRET_ID", "id")
	t.Setenv("PGPASSWORD", "private")
	s := Secrets{Folder: folder, EnvPrefix: "KOLDPROXY_SECRET_"}
	c, err := s.Credentials([]byte(`{"access_key_id": {"env": "KOLDPROXY_SECRET_ID"}, "secret_access_key": {"file": "key"}, "session_token": "literal"}`))
	if err != nil || c.AccessKeyID != "id" || c.SecretAccessKey != "s3cret" || c.SessionToken != "literal" {
		t.Errorf("%+v, %v", c, err)
	}
	for _, stored := range []string{
		`{"account_key": {"env": "PGPASSWORD"}}`, `{"account_key": {"env": "KOLDPROXY_SECRET_MISSING"}}`, `{"account_key": {"file": "link"}}`,
		`{"account_key": {"file": "../other"}}`, `{"account_key": {"file": "/etc/passwd"}}`, `{"account_key": {"file": ""}}`, `{"account_key": {"file": "."}}`,
		`{"account_key": 5}`, `{"pasword": "private"}`, `[]`,
	} {
		if c, err := s.Credentials([]byte(stored)); err == nil || strings.Contains(err.Error(), "private") {
			t.Errorf("%s: %+v, %v", stored, c, err)
		}
	}
	none := Secrets{}
	if _, err := none.Credentials([]byte(`{"account_key": {"file": "key"}}`)); err == nil {
		t.Error("a file without a folder for secrets")
	}
}
