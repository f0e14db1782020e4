package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/coldstore/cloud"
)

// secretEnvPrefix begins the environment variables that credentials in the database may refer to.
const secretEnvPrefix = "KOLDPROXY_SECRET_"

// checkColdURL says what is wrong with cold.url.
func checkColdURL(raw string) error {
	u, err := url.Parse(raw)
	if err != nil {
		return fmt.Errorf("is no URL")
	}
	if u.Scheme != "file" {
		return cloud.Check(raw)
	}
	if u.Host != "" || !filepath.IsAbs(u.Path) {
		return fmt.Errorf("%q is not file:///absolute/path", u.Redacted())
	}
	return nil
}

// openCold opens the storage of the configuration. The clouds' own ways to find credentials apply. closeCold ends the use of it.
func openCold(ctx context.Context, c *config) (coldstore.Bucket, error) {
	if strings.HasPrefix(c.Cold.URL, "file:") {
		return coldstore.OpenBucket(c.Cold.URL)
	}
	return openCloud(ctx, c.Cold.URL, cloud.Credentials{})
}

// openServerCold opens the storage of the configuration for serve, which alone makes a missing folder, and only while no database
// knows of a file that should be in it: an empty folder in the place of a volume that is not mounted would take what belongs on
// the volume. Hot rows are served meanwhile.
func openServerCold(ctx context.Context, c *config) (coldstore.Bucket, error) {
	bucket, err := openCold(ctx, c)
	if local, ok := bucket.(*coldstore.LocalBucket); ok {
		local.MakeFolderIf(func(ctx context.Context) error { return checkColdUnused(ctx, c) })
	}
	return bucket, err
}

// makeColdFolder makes the folder of a storage that is one, as soon as the databases say that it may be made. Each flush would, too;
// here somebody is told what is in the way.
func makeColdFolder(ctx context.Context, bucket coldstore.Bucket, log zerolog.Logger) {
	local, ok := bucket.(*coldstore.LocalBucket)
	if !ok {
		return
	}
	untilItWorks(ctx, local.MakeFolder, func(err error) {
		log.Error().Err(err).Msg("cold.url: the folder is missing; nothing is flushed, and cold rows cannot be read until it is there")
	})
}

// checkColdUnused asks all databases; they share the storage of the configuration. One that does not exist has no segments.
func checkColdUnused(ctx context.Context, c *config) error {
	for _, name := range c.Postgres.Databases {
		conn, err := c.connect(ctx, name)
		if pe, ok := errors.AsType[*pgconn.PgError](err); ok && pe.Code == codeNoDatabase {
			continue
		}
		if err != nil {
			return err
		}
		err = coldstore.CheckUnused(ctx, conn, "default")
		_ = conn.Close(context.WithoutCancel(ctx))
		if err != nil {
			return fmt.Errorf("database %s: %w", name, err)
		}
	}
	return nil
}

func closeCold(b coldstore.Bucket) error {
	if closer, ok := b.(io.Closer); ok {
		return closer.Close()
	}
	return nil
}

// openStorage opens a storage that was registered in a database. Where its files may be on this machine, and which secrets may be
// sent to it, is for the configuration to say.
func openStorage(ctx context.Context, c *config, spec coldstore.StorageSpec) (coldstore.Bucket, error) {
	if spec.Type == "filesystem" {
		root := filepath.Clean(c.Cold.FilesystemRoot)
		path := filepath.Clean(spec.BasePath)
		if c.Cold.FilesystemRoot == "" {
			return nil, fmt.Errorf("filesystem storages are refused: cold.filesystem_root is not set")
		}
		inside, err := filepath.Rel(root, path)
		if err != nil || !filepath.IsLocal(inside) {
			return nil, fmt.Errorf("%s is not in cold.filesystem_root", spec.BasePath)
		}
		return coldstore.OpenLocalBucketIn(root, inside) // nor does it get out by a symbolic link
	}
	scheme := map[string]string{"s3": "s3", "gcs": "gs", "azure": "azblob"}[spec.Type]
	if scheme == "" {
		return nil, fmt.Errorf("unknown storage type %q", spec.Type)
	}
	var options map[string]any
	if err := json.Unmarshal(spec.Config, &options); err != nil {
		return nil, fmt.Errorf("its config is no JSON object")
	}
	query := url.Values{}
	for name, value := range options {
		query.Set(name, fmt.Sprint(value))
	}
	bucket, prefix, _ := strings.Cut(spec.BasePath, "/")
	secrets := cloud.Secrets{Folder: c.Cold.SecretsDir, EnvPrefix: secretEnvPrefix}
	credentials, err := secrets.Credentials(spec.Credentials)
	if err != nil {
		return nil, err
	}
	where := url.URL{Scheme: scheme, Host: bucket, Path: "/" + prefix, RawQuery: query.Encode()}
	return openCloud(ctx, where.String(), credentials)
}

func openCloud(ctx context.Context, where string, credentials cloud.Credentials) (coldstore.Bucket, error) {
	b, err := cloud.Open(ctx, where, credentials, cloud.Options{})
	if err != nil {
		return nil, err
	}
	return b, nil
}
