package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
)

func newServeCommand(opts *options) *cobra.Command {
	return &cobra.Command{
		Use:   "serve",
		Short: "run koldproxy in front of the server that the configuration names",
		Example: `  koldproxy serve --config /etc/koldproxy/koldproxy.toml
  KOLDPROXY_LOG_LEVEL=debug koldproxy serve --config koldproxy.toml --set http.pprof=true`,
		Args: arguments(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadValid(opts)
			if err != nil {
				return err
			}
			log, err := cfg.logger(cmd)
			if err != nil {
				return err
			}
			hangups := make(chan os.Signal, 1)
			signal.Notify(hangups, syscall.SIGHUP) // which would end the process otherwise
			defer signal.Stop(hangups)
			return run(cmd.Context(), cfg, log, hangups, watch{
				listening: func(e endpoints) error {
					e.log(log, "listening")
					return tellSystemd(daemon.SdNotifyReady, "STATUS=forwarding sessions")
				},
				ready: func(_ context.Context, e endpoints) error {
					e.log(log, "ready")
					return nil
				},
				state: func(state error) error { return tellSystemd(systemdStatus(state)) },
				drain: func() error { return tellSystemd(daemon.SdNotifyStopping, "STATUS=waiting for sessions to end") },
			})
		},
	}
}

func (c *config) logger(cmd *cobra.Command) (zerolog.Logger, error) {
	level, err := c.logLevel()
	return newLogger(cmd.ErrOrStderr(), level), err
}

func (e endpoints) log(log zerolog.Logger, message string) {
	event := log.Info()
	for _, addr := range e.proxy {
		event = event.Str("proxy", addr.String())
	}
	if e.mqtt != nil {
		event = event.Str("mqtt", e.mqtt.String())
	}
	if e.http != nil {
		event = event.Str("http", e.http.String())
	}
	event.Msg(message)
}
