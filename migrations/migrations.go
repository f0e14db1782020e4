package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/tern/v2/migrate"
)

//go:embed sql/*.sql
var files embed.FS

// Schema is where everything lives.
const Schema = "koldstore"

const versionTable = Schema + ".schema_version"

// lockKey serializes migrations of one database; tern's own lock is taken too late to guard the creation of the schema.
const lockKey = 0x6b6f6c64_6d696772 // "koldmigr"

// FirstWhole is the oldest version whose functions need nothing of a later one. Those before it came with it.
const FirstWhole = 10

// State is where a database stands.
type State struct {
	Version int32 `json:"version"` // 0: nothing is installed
	Newest  int32 `json:"newest"`  // what this binary would install
}

// Up installs the catalog or brings it to the newest version. The connection's role becomes the owner of everything; it must
// be the role that koldproxy runs as. A catalog that a newer binary or a development version has installed is left alone, and that is an error.
func Up(ctx context.Context, conn *pgx.Conn) error {
	return locked(ctx, conn, func() error {
		if _, err := conn.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+Schema); err != nil {
			return fmt.Errorf("create schema %s: %w", Schema, err)
		}
		m, err := newMigrator(ctx, conn)
		if err != nil {
			return err
		}
		if err := refuseDevelopment(ctx, conn); err != nil {
			return err
		}
		current, err := m.GetCurrentVersion(ctx)
		if err != nil {
			return fmt.Errorf("read catalog version: %w", err)
		}
		if newest := int32(len(m.Migrations)); current > newest {
			return fmt.Errorf("the catalog is at version %d, which a newer koldproxy has installed, and this one knows %d: use the newer one, or let it go back with migrate down --to %[2]d",
				current, newest)
		}
		return m.Migrate(ctx)
	})
}

// Down goes back to version; 0 removes the schema altogether, with every stream, mirror and log in it. A version below [FirstWhole] has no
// place for streams and feeds, and is an error while there are some.
func Down(ctx context.Context, conn *pgx.Conn, version int32) error {
	return locked(ctx, conn, func() error {
		installed, err := isInstalled(ctx, conn)
		if err != nil || !installed {
			return err
		}
		if err := refuseDevelopment(ctx, conn); err != nil {
			return err
		}
		m, err := newMigrator(ctx, conn)
		if err != nil {
			return err
		}
		current, err := m.GetCurrentVersion(ctx)
		if err != nil {
			return fmt.Errorf("read catalog version: %w", err)
		}
		if version > current {
			return fmt.Errorf("catalog is at version %d, which is below %d already", current, version)
		}
		switch {
		case version == 0:
			err = removeMirrors(ctx, conn)
		case version < FirstWhole:
			err = refuseStreams(ctx, conn, version)
		}
		if err != nil {
			return err
		}
		if err := m.MigrateTo(ctx, version); err != nil {
			return err
		}
		if version == 0 {
			if _, err := conn.Exec(ctx, "DROP TABLE "+versionTable+"; DROP SCHEMA "+Schema); err != nil {
				return fmt.Errorf("drop schema %s: %w", Schema, err)
			}
		}
		return nil
	})
}

// Status reads the version of the catalog without changing anything. That of a development version is an error.
func Status(ctx context.Context, conn *pgx.Conn) (State, error) {
	names, err := fs.Glob(files, "sql/*.sql")
	if err != nil {
		return State{}, fmt.Errorf("list migrations: %w", err)
	}
	s := State{Newest: int32(len(names))}
	installed, err := isInstalled(ctx, conn)
	if err != nil || !installed {
		return s, err
	}
	if err := conn.QueryRow(ctx, "SELECT version FROM "+versionTable).Scan(&s.Version); err != nil {
		return s, fmt.Errorf("read catalog version: %w", err)
	}
	return s, refuseDevelopment(ctx, conn)
}

func isInstalled(ctx context.Context, conn *pgx.Conn) (bool, error) {
	var yes bool
	if err := conn.QueryRow(ctx, "SELECT pg_catalog.to_regclass($1) IS NOT NULL", versionTable).Scan(&yes); err != nil {
		return false, fmt.Errorf("look for the catalog: %w", err)
	}
	return yes, nil
}

// refuseDevelopment is an error where a binary from before 0.1.0 has installed the catalog, in steps that were other ones under the same
// numbers. Those had the table replaced from their 13th on, and no command_log before.
func refuseDevelopment(ctx context.Context, conn *pgx.Conn) error {
	var yes bool
	err := conn.QueryRow(ctx, `SELECT version > 0 AND (pg_catalog.to_regclass('koldstore.command_log') IS NULL OR pg_catalog.to_regclass('koldstore.replaced') IS NOT NULL)
		FROM `+versionTable).Scan(&yes)
	if err != nil {
		return fmt.Errorf("look for a catalog from before 0.1.0: %w", err)
	}
	if yes {
		return errors.New("the catalog is that of a development version from before 0.1.0, which has no way to this one: remove it with the koldproxy that has installed it, by migrate down --to 0, and begin anew")
	}
	return nil
}

// refuseStreams is an error while there are streams or feeds.
func refuseStreams(ctx context.Context, conn *pgx.Conn, version int32) error {
	var some bool
	if err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM koldstore.stream) OR EXISTS (SELECT FROM koldstore.managed_table)`).Scan(&some); err != nil {
		return fmt.Errorf("look for streams and feeds: %w", err)
	}
	if some {
		return fmt.Errorf("version %d of the catalog cannot hold the streams and feeds that there are: go back to %d or later, or to 0, which ends them", version, FirstWhole)
	}
	return nil
}

// removeMirrors ends the feeds and streams of all tables as their owner would, so that nothing is left that depends on the schema.
func removeMirrors(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, `DO $$
		DECLARE m record; s record;
		BEGIN
			IF pg_catalog.to_regclass('koldstore.managed_table') IS NULL OR pg_catalog.to_regproc('koldstore.do_unmanage_table') IS NULL THEN RETURN; END IF;
			FOR m IN SELECT table_oid, mirror_oid FROM koldstore.managed_table LOOP
				IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = m.table_oid) THEN
					PERFORM koldstore.do_unmanage_table(current_user, pg_catalog.jsonb_build_object('table', m.table_oid, 'drop_cold', false));
				ELSIF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = m.mirror_oid) THEN
					EXECUTE pg_catalog.format('DROP TABLE %s', m.mirror_oid::pg_catalog.regclass);
				END IF;
			END LOOP;
			IF pg_catalog.to_regproc('koldstore.do_drop_stream') IS NULL THEN RETURN; END IF;
			FOR s IN SELECT t.schema_name, t.name, coalesce((SELECT pg_catalog.pg_get_userbyid(c.relowner) FROM pg_catalog.pg_class c WHERE c.oid = t.table_oid), t.created_by) AS owner
				FROM koldstore.stream t LOOP
				PERFORM koldstore.do_drop_stream(s.owner, pg_catalog.jsonb_build_object('schema', s.schema_name, 'name', s.name));
			END LOOP;
		END $$`)
	if err != nil {
		return fmt.Errorf("remove mirrors: %w", err)
	}
	return nil
}

func newMigrator(ctx context.Context, conn *pgx.Conn) (*migrate.Migrator, error) {
	m, err := migrate.NewMigrator(ctx, conn, versionTable)
	if err != nil {
		return nil, fmt.Errorf("prepare migrations: %w", err)
	}
	dir, err := fs.Sub(files, "sql")
	if err != nil {
		return nil, fmt.Errorf("open migrations: %w", err)
	}
	if err := m.LoadMigrations(dir); err != nil {
		return nil, fmt.Errorf("load migrations: %w", err)
	}
	return m, nil
}

func locked(ctx context.Context, conn *pgx.Conn, f func() error) error {
	if _, err := conn.Exec(ctx, "SELECT pg_catalog.pg_advisory_lock($1)", int64(lockKey)); err != nil {
		return fmt.Errorf("take the migration lock: %w", err)
	}
	defer func() {
		// The lock goes with the session anyway; a connection that is broken by now has nothing to release.
		_, _ = conn.Exec(context.WithoutCancel(ctx), "SELECT pg_catalog.pg_advisory_unlock($1)", int64(lockKey))
	}()
	return f()
}
