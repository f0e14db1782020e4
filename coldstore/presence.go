package coldstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// presence finds out whether another server has the same catalog and works in the same storage: one that was started from a
// file-level copy of this database, without a change of its configuration, does. What one of them replaces the other may
// still read, so neither may remove objects while both live.
//
// Each leader leaves a sign, a small object under a fresh key, in every storage that has segments, and replaces it four times
// in each delete grace. A sign of somebody else that was not there at the last look is a sign of life. Clocks of the two are not
// compared. All methods may be called concurrently.
type presence struct {
	mu       sync.Mutex
	self     string    // what this leader's signs begin with
	next     time.Time // when to look again
	storages map[string]*neighbours
}

// neighbours is what is known of those who use one storage.
type neighbours struct {
	since  time.Time       // when the first look was
	looked time.Time       // when the last one succeeded
	signs  map[string]bool // the others' signs at the last look
	ours   string          // the sign that is there now
	count  int             // of our signs so far
	alive  time.Time       // when a new one of somebody else was seen, zero if never
}

func newPresence() *presence {
	p := &presence{}
	p.beginAnew()
	return p
}

// beginAnew forgets what was seen, for somebody who leads again: signs may have come and gone meanwhile.
func (p *presence) beginAnew() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.self, p.next, p.storages = strings.ToLower(rand.Text()), time.Time{}, map[string]*neighbours{}
}

// alone lists the storages whose objects may be removed: they have been watched for the grace, to this day, and for as long nobody
// else was seen. It is nil, for all, without a grace: then nobody is watched for.
func (p *presence) alone(now time.Time, grace time.Duration) []string {
	if grace == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	names := []string{}
	for name, n := range p.storages {
		watched := now.Sub(n.since) >= grace && now.Sub(n.looked) <= max(grace, time.Minute)
		if watched && (n.alive.IsZero() || now.Sub(n.alive) > grace) {
			names = append(names, name)
		}
	}
	return names
}

// due says whether it is time to look for others. Whoever is told so looks.
func (p *presence) due(now time.Time, grace time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Before(p.next) {
		return false
	}
	p.next = now.Add(grace / 4)
	return true
}

// watch gives the neighbours in a storage, watched from now on, and the name of the next sign to leave there.
func (p *presence) watch(storage string, now time.Time) (n *neighbours, sign string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n = p.storages[storage]; n == nil {
		n = &neighbours{since: now}
		p.storages[storage] = n
	}
	return n, p.self + "-" + strconv.Itoa(n.count)
}

// seen notes a look: the signs that are there, and the new one of our own. It returns who was not there before, empty if nobody, and
// the signs that can be cleared away: a living owner has replaced, or will replace, his.
func (p *presence) seen(n *neighbours, now time.Time, ours string, all []string) (stranger string, stale []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	others := map[string]bool{}
	for _, key := range all {
		switch {
		case key == ours || key == n.ours:
		case n.signs[key]:
			stale = append(stale, key)
		default:
			others[key] = true
			if n.signs != nil { // at the first look they may be of those who led before
				stranger, n.alive = key, now
			}
		}
	}
	if n.ours != "" && n.ours != ours {
		stale = append(stale, n.ours)
	}
	n.looked, n.signs, n.ours = now, others, ours
	n.count++
	return stranger, stale
}

// showPresence leaves a sign in the storages that hold segments, four times in each delete grace, and looks for those of others.
func (s *Store) showPresence(ctx context.Context) (bool, error) {
	now := s.cfg.Now()
	if s.cfg.DeleteGrace == 0 || !s.presence.due(now, s.cfg.DeleteGrace) {
		return false, nil
	}
	var identity string
	if err := s.pool.QueryRow(ctx, `SELECT (SELECT system_identifier FROM pg_control_system()) || '-' || oid FROM pg_database WHERE datname = current_database()`).
		Scan(&identity); err != nil {
		return false, fmt.Errorf("identify the database: %w", err)
	}
	rows, err := s.pool.Query(ctx, "SELECT DISTINCT storage FROM koldstore.segment")
	if err != nil {
		return false, fmt.Errorf("list storages in use: %w", err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return false, fmt.Errorf("list storages in use: %w", err)
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, s.look(ctx, name, "presence/"+identity+"/", now))
	}
	return false, errors.Join(errs...)
}

// sign is what is in one, for people who come across it.
const sign = "A koldproxy that leads works here."

// look replaces our sign in one storage. Until it succeeds nothing is removed there.
func (s *Store) look(ctx context.Context, storage, prefix string, now time.Time) error {
	n, next := s.presence.watch(storage, now)
	bucket, err := s.bucketOf(ctx, storage)
	if err != nil {
		return err
	}
	ours := prefix + next
	// A key that is taken was put by an attempt whose answer was lost.
	if err := bucket.PutIfAbsent(ctx, ours, strings.NewReader(sign), int64(len(sign))); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("leave a sign in storage %q: %w", storage, err)
	}
	objects, err := bucket.List(ctx, prefix)
	if err != nil {
		return fmt.Errorf("look for others in storage %q: %w", storage, err)
	}
	signs := make([]string, len(objects))
	for i, o := range objects {
		signs[i] = o.Key
	}
	stranger, stale := s.presence.seen(n, now, ours, signs)
	if stranger != "" {
		s.log.Warn().Str("storage", storage).Str("sign", stranger).
			Msg("another koldproxy works on a copy of this database in the same storage, or has led until now: no object is removed until it has been silent for the delete grace")
	}
	var errs []error
	for _, key := range stale {
		errs = append(errs, bucket.Delete(ctx, key))
	}
	return errors.Join(errs...)
}
