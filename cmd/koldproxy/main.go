package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitFine   = 0
	exitFailed = 1
	exitUsage  = 2
)

// usageError marks what the person at the keyboard can correct: flags, arguments, configuration.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	code := execute(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// execute runs one command line and returns its exit code.
func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRootCommand() //nolint:contextcheck // commands get theirs from ExecuteContext
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	strictCompletion(root)
	err := root.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return exitFine
	case errors.As(err, &usage):
		_, _ = fmt.Fprintf(stderr, "koldproxy: %v\n", err) // nowhere is left to report that this failed
		return exitUsage
	default:
		_, _ = fmt.Fprintf(stderr, "koldproxy: %v\n%s", err, serverSays(err)) // nowhere is left to report that this failed
		return exitFailed
	}
}

// serverSays is what PostgreSQL adds to the message of an error, as psql shows it.
func serverSays(err error) string {
	pe, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return ""
	}
	var text string
	if pe.Detail != "" {
		text += "DETAIL: " + pe.Detail + "\n"
	}
	if pe.Hint != "" {
		text += "HINT: " + pe.Hint + "\n"
	}
	return text
}

// options are the flags that every command has.
type options struct {
	configFile string
	set        []string
}

func newRootCommand() *cobra.Command {
	opts := &options{}
	root := &cobra.Command{
		Use:   "koldproxy",
		Short: "change streams and a change feed in front of an unmodified PostgreSQL",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q; koldproxy --help lists them", args[0])}
			}
			return nil
		},
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; %s --help shows the flags", err, cmd.CommandPath())}
	})
	flags := root.PersistentFlags()
	flags.StringVar(&opts.configFile, "config", "", "TOML configuration `FILE`")
	flags.StringArrayVar(&opts.set, "set", nil, "set one configuration `KEY=VALUE`, as in --set http.listen=127.0.0.1:9632; may be repeated")
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp) // arguments are names of tables and streams
	if err := root.MarkPersistentFlagFilename("config", "toml"); err != nil {
		panic(err) // there is no such flag
	}
	root.AddCommand(
		newDemoCommand(opts),
		newInitCommand(opts),
		newServeCommand(opts),
		newCheckCommand(opts),
		newMigrateCommand(opts),
		newStatusCommand(opts),
		newFlushCommand(opts),
		newRetentionCommand(opts),
		newSegmentsCommand(opts),
		newGapsCommand(opts),
		newHealCommand(opts),
		newVerifyCommand(opts),
		newTailCommand(opts),
		newConfigCommand(opts),
		newVersionCommand(),
	)
	if err := completeNames(root, opts); err != nil {
		panic(err) // a command or flag that is not there
	}
	return root
}

// arguments wraps a cobra check of positional arguments, so that a violation counts as wrong usage.
func arguments(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{fmt.Errorf("%w; usage: %s", err, strings.TrimSpace(cmd.UseLine()))}
		}
		return nil
	}
}

// newLogger makes the one logger of the process: for people on a terminal, JSON elsewhere.
func newLogger(out io.Writer, level zerolog.Level) zerolog.Logger {
	if f, ok := out.(*os.File); ok && isatty.IsTerminal(f.Fd()) {
		out = zerolog.ConsoleWriter{Out: f, TimeFormat: "15:04:05.000"}
	}
	return zerolog.New(out).Level(level).With().Timestamp().Logger()
}
