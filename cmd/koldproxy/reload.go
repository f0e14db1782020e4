package main

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"slices"
)

// reloadOn reads the configuration again at each hangup until ctx ends. What cannot be used is logged, and the old one
// stays in force.
func (s *service) reloadOn(ctx context.Context, hangups <-chan os.Signal) error {
	for {
		select {
		case <-hangups:
			s.log.Info().Msg("SIGHUP: reloading the configuration and the TLS files")
			changed, needRestart, err := s.reload()
			if err != nil {
				s.log.Error().Err(err).Msg("cannot reload, everything stays as it was")
				continue
			}
			if len(needRestart) > 0 {
				s.log.Warn().Strs("keys", needRestart).Msg("a restart is needed to change these keys, they keep their values")
			}
			s.log.Info().Strs("changed", changed).Msg("reloaded; connections from now on use it")
		case <-ctx.Done():
			return nil
		}
	}
}

// reload puts in force what can be changed without a restart, and returns the keys that were and those that could not be.
func (s *service) reload() (changed, needRestart []string, err error) {
	next := s.running
	if s.cfg.again != nil {
		if next, err = s.cfg.again(); err != nil {
			return nil, nil, err
		}
	}
	merged := *s.running
	for i, f := range merged.fields() {
		value := next.fields()[i].value
		switch {
		case reflect.DeepEqual(f.value.Interface(), value.Interface()):
		case f.reloadable():
			f.value.Set(value)
			changed = append(changed, f.key)
		default:
			needRestart = append(needRestart, f.key)
		}
	}
	pg, err := merged.pgxConfig("")
	if err != nil {
		return nil, nil, fmt.Errorf("postgres.dsn: %w", err)
	}
	pc := merged.proxyConfig(pg)
	pc.Databases = s.databases.names()
	fixed, err := s.proxy.Reload(pc)
	if err != nil {
		return nil, nil, err
	}
	changed = slices.DeleteFunc(changed, func(key string) bool { return slices.Contains(fixed, key) })
	s.running = &merged
	return changed, append(needRestart, fixed...), nil
}

// reloadable says whether a key can be changed without a restart; package proxy has the last word on its own.
func (f field) reloadable() bool {
	return f.section == "proxy" && f.name != "listen" && f.name != "reuse_port"
}
