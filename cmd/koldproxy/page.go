package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/koldproxy/koldproxy/statuspage"
)

// statusPage is the page for people at the HTTP port.
func (s *service) statusPage(listener net.Addr) (*statuspage.Page, error) {
	token, err := s.cfg.httpToken()
	if err != nil {
		return nil, fmt.Errorf("http.token_file: %w", err)
	}
	pc := statuspage.DefaultConfig()
	pc.Token = token
	pc.Version = release
	if tcp, ok := listener.(*net.TCPAddr); ok {
		pc.Loopback = tcp.IP.IsLoopback()
	}
	var list []statuspage.Database
	for _, db := range s.databases {
		list = append(list, statuspage.Database{
			Name: db.name, Pool: db.pool, Live: func() json.RawMessage { return db.tail.Stats() }, Unfit: db.fit,
		})
	}
	return statuspage.New(pc, list, s.log.With().Str("part", "statuspage").Logger()), nil
}

// httpToken is what readers of the status page have to show; empty when there is none.
func (c *config) httpToken() (string, error) {
	if c.HTTP.TokenFile == "" {
		return "", nil
	}
	raw, err := os.ReadFile(c.HTTP.TokenFile)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(raw))
	if len(token) < minToken {
		return "", errors.New("the token is shorter than 16 characters; openssl rand -hex 32 makes a good one")
	}
	return token, nil
}

// minToken is how long a token must be: it can be tried as often as somebody likes.
const minToken = 16
