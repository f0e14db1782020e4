package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
	"github.com/jackc/pgx/v5"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: DATABASE_URL=postgres://… MQTT_URL=tcp://user:password@host:port gomqtt TOPIC LOG POSITION_FILE")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := follow(ctx, os.Args[1], os.Args[2], os.Args[3]); err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// follow prints the events of a stream until ctx ends.
func follow(ctx context.Context, topic, log, file string) error {
	raw, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	position := string(raw)
	woken := make(chan struct{}, 1)
	client, err := subscribe(topic, woken)
	if err != nil {
		return err
	}
	defer client.Disconnect(100)
	conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for {
		last, err := page(ctx, conn, log, position)
		if err != nil {
			return err
		}
		if last != "" {
			position = last
			if err := os.WriteFile(file+".new", []byte(position), 0o600); err != nil {
				return err
			}
			if err := os.Rename(file+".new", file); err != nil { // a crash leaves the old position or the new one
				return err
			}
			continue // until there is nothing more
		}
		select {
		case <-ctx.Done():
			return nil
		case <-woken:
		case <-time.After(5 * time.Second):
		}
	}
}

// subscribe returns once the broker has confirmed, and does so again by itself after a lost connection.
func subscribe(topic string, woken chan<- struct{}) (mqtt.Client, error) {
	u, err := url.Parse(os.Getenv("MQTT_URL"))
	if err != nil {
		return nil, errors.New("MQTT_URL is no URL")
	}
	wake := func(mqtt.Client, mqtt.Message) {
		select {
		case woken <- struct{}{}:
		default: // it will look anyway
		}
	}
	subscribed := make(chan error, 1)
	opts := mqtt.NewClientOptions().AddBroker(os.Getenv("MQTT_URL")).SetOnConnectHandler(func(c mqtt.Client) {
		token := c.Subscribe(topic, 0, wake)
		token.Wait()
		wake(c, nil) // what came while there was no connection
		select {
		case subscribed <- token.Error():
		default:
		}
	})
	if u.User != nil {
		password, _ := u.User.Password()
		opts.SetUsername(u.User.Username()).SetPassword(password)
	}
	client := mqtt.NewClient(opts)
	if token := client.Connect(); token.Wait() && token.Error() != nil {
		return nil, token.Error()
	}
	return client, <-subscribed
}

// page processes the events behind an id and returns the last one's id; empty if there were none.
func page(ctx context.Context, conn *pgx.Conn, log, after string) (last string, err error) {
	rows, err := conn.Query(ctx, "SELECT id, op, k::text, doc::text FROM "+pgx.Identifier(strings.Split(log, ".")).Sanitize()+" ORDER BY id LIMIT 500 AFTER ($1)", after)
	if err != nil {
		return "", err
	}
	var op, key, doc string
	_, err = pgx.ForEachRow(rows, []any{&last, &op, &key, &doc}, func() error {
		_, err := fmt.Fprintln(os.Stdout, last, op, key, doc)
		return err
	})
	return last, err
}
