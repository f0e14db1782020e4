package main

import (
	"github.com/koldproxy/koldproxy/changefeed/mqtt"
)

// mqttSection is section [mqtt].
type mqttSection struct {
	// Enabled turns the embedded broker on.
	Enabled bool `toml:"enabled"`
	// Listen, TLSListen, WSListen and WSSListen are the broker's host:port for MQTT over TCP, over TLS, in websockets and in
	// websockets over TLS. Empty turns one off; one of them at least is needed.
	Listen    string `toml:"listen"`
	TLSListen string `toml:"tls_listen"`
	WSListen  string `toml:"ws_listen"`
	WSSListen string `toml:"wss_listen"`
	// TLSCert and TLSKey are PEM files with what clients are shown; they are read again when they change.
	TLSCert string `toml:"tls_cert"`
	TLSKey  string `toml:"tls_key"`
	// URL is another broker that gets the same events: mqtt, mqtts, ws or wss://user:password@host:port. Empty: none. It
	// does not need enabled.
	URL string `toml:"url"`
	// Prefix is the first part of topics there, in place of $stream.
	Prefix string `toml:"prefix"`
}

func defaultMQTTSection() mqttSection {
	return mqttSection{Listen: ":1883", Prefix: mqtt.DefaultRelayConfig("").Prefix}
}

func (m mqttSection) validate(bad func(key, format string, args ...any)) {
	if m.Enabled {
		any := false
		for _, l := range m.listeners() {
			if l.address == "" {
				continue
			}
			any = true
			checkHostPort(bad, l.key, l.address)
			if l.tls && (m.TLSCert == "" || m.TLSKey == "") {
				bad(l.key, "needs mqtt.tls_cert and mqtt.tls_key")
			}
		}
		if !any {
			bad("mqtt.listen", "is empty, and so are tls_listen, ws_listen and wss_listen")
		}
	}
	if m.URL != "" {
		if err := m.relay().Validate(); err != nil {
			bad("mqtt.url", "%v", err)
		}
	}
}

func (m mqttSection) relay() mqtt.RelayConfig {
	rc := mqtt.DefaultRelayConfig(m.URL)
	rc.Prefix = m.Prefix
	return rc
}

// mqttListener is one way to the embedded broker.
type mqttListener struct {
	key, address string
	tls, ws      bool
}

func (m mqttSection) listeners() []mqttListener {
	return []mqttListener{
		{"mqtt.listen", m.Listen, false, false},
		{"mqtt.tls_listen", m.TLSListen, true, false},
		{"mqtt.ws_listen", m.WSListen, false, true},
		{"mqtt.wss_listen", m.WSSListen, true, true},
	}
}
