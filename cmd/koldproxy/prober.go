package main

import (
	"context"
	"fmt"
	"net"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/koldproxy/koldproxy/proxy"
)

// prober asks servers for their state as the service role.
type prober struct{ cfg *config }

// Probe implements proxy.Prober. The connection is encrypted as postgres.dsn says.
func (p prober) Probe(ctx context.Context, network, address, host string) (proxy.ServerState, error) {
	name, port := hostAndPort(network, address)
	cc, err := p.cfg.pgxConfigWith(map[string]string{"host": name, "port": port, "target_session_attrs": "any"})
	if err != nil {
		return proxy.ServerState{}, err
	}
	cc.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
		var dialer net.Dialer
		return dialer.DialContext(ctx, network, address)
	}
	conn, err := pgconn.ConnectConfig(ctx, &cc.Config)
	if err != nil {
		return proxy.ServerState{}, fmt.Errorf("ask %s for its state: %w", address, err)
	}
	defer conn.Close(ctx)
	standby, readOnly := conn.ParameterStatus("in_hot_standby"), conn.ParameterStatus("default_transaction_read_only")
	if standby == "" {
		return proxy.ServerState{}, fmt.Errorf("%s does not report in_hot_standby, as PostgreSQL does since version 14", host)
	}
	return proxy.ServerState{HotStandby: standby == "on", DefaultReadOnly: readOnly == "on"}, nil
}
