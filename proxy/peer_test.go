package proxy

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/pires/go-proxyproto"
)

func TestParseSources(t *testing.T) {
	t.Parallel()
	from, err := parseSources([]string{"10.0.0.0/8", "192.0.2.7", "2001:db8::/32", "unix"})
	if err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]bool{
		"10.1.2.3:1": true, "11.0.0.1:1": false, "192.0.2.7:9": true, "192.0.2.8:9": false, "[2001:db8::5]:1": true, "[::1]:1": false,
		"[::ffff:10.1.2.3]:1": true,
	} {
		p := peerOf(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(address)))
		if got := from.include(p); got != want {
			t.Errorf("%s: %t", address, got)
		}
	}
	if !from.include(peer{}) || (sources{}).include(peer{}) {
		t.Error("Unix sockets are not as listed")
	}
	for _, bad := range []string{"10.0.0.1/8", "localhost", "10.0.0.0/33", ""} {
		if _, err := parseSources([]string{bad}); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func proxyHeader(t *testing.T, version byte, source string) []byte {
	t.Helper()
	from := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(source))
	to := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 5432}
	if from.IP.To4() == nil {
		to.IP = net.IPv6loopback
	}
	b, err := proxyproto.HeaderProxyFromAddrs(version, from, to).Format()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// clientAddress logs in behind a header and returns the application_name that the server knows, which ends with who
// koldproxy thinks the client is.
func (p *proxied) clientAddress(t *testing.T, header []byte, piece int, parameters ...string) (name string, answers []string) {
	t.Helper()
	w, cfg := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
	defer w.conn.Close()
	w.sendMore(joined(header, startupPacketFor(append([]string{"user", cfg.User, "database", "postgres"}, parameters...)...)), piece)
	message, err := next(w.in, 64<<10, w.in.more(64<<10))
	if err != nil {
		return "", []string{ending(err)}
	}
	if message[0] != msgAuth {
		return "", w.until('Z', 1)
	}
	w.login(t, cfg.Password)
	w.send(t, parseMessage(t, `Q "SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()"`), 0)
	got := w.until('Z', 1)
	if len(got) < 2 {
		return "", got
	}
	return strings.TrimPrefix(got[1], "D "), got
}

func TestProxyProtocol(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) {
		c.ProxyProtocolFrom, c.ApplicationNameAddHost = []string{"127.0.0.0/8"}, true
	})
	local, err := (&proxyproto.Header{Version: 2, Command: proxyproto.LOCAL, TransportProtocol: proxyproto.UNSPEC}).Format()
	if err != nil {
		t.Fatal(err)
	}
	withTLV := &proxyproto.Header{
		Version: 2, Command: proxyproto.PROXY, TransportProtocol: proxyproto.TCPv4,
		SourceAddr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9), Port: 7}, DestinationAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1},
	}
	if err := withTLV.SetTLVs([]proxyproto.TLV{{Type: proxyproto.PP2_TYPE_AUTHORITY, Value: []byte(strings.Repeat("x", 2000))}}); err != nil {
		t.Fatal(err)
	}
	tlv, err := withTLV.Format()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		header []byte
		want   string // how the name ends; empty: refused
	}{
		{"version 1", proxyHeader(t, 1, "192.0.2.1:1000"), `192.0.2.1:1000"`},
		{"version 1, IPv6", proxyHeader(t, 1, "[2001:db8::1]:1000"), `[2001:db8::1]:1000"`},
		{"version 1, unknown", []byte("PROXY UNKNOWN\r\n"), ""},
		{"version 2", proxyHeader(t, 2, "192.0.2.1:1000"), `192.0.2.1:1000"`},
		{"version 2, IPv6", proxyHeader(t, 2, "[2001:db8::1]:1000"), `[2001:db8::1]:1000"`},
		{"version 2 with more in it", tlv, `192.0.2.9:7"`},
		{"a health check of the load balancer", local, "127.0.0.1:"},
		{"none", nil, ""},
		{"damaged", []byte("PROXY TCP4 nonsense\r\n"), ""},
		{"without end", []byte("PROXY " + strings.Repeat("x", 200)), ""},
		{"version 2 of another kind", append(slices.Clone(proxyV2), 0x2f, 0xff, 0, 0), ""},
		{"version 2 with an impossible length", append(slices.Clone(proxyV2), 0x21, 0x11, 0xff, 0xff), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, piece := range []int{0, 1} {
				name, answers := p.clientAddress(t, c.header, piece)
				switch {
				case c.name == "version 1, unknown":
					if !strings.Contains(name, "127.0.0.1:") {
						t.Errorf("in pieces of %d: %q, %q", piece, name, answers)
					}
				case c.want == "" && !slices.Equal(answers, []string{"end"}):
					t.Errorf("in pieces of %d: not refused but %q", piece, answers)
				case !strings.Contains(name, c.want):
					t.Errorf("in pieces of %d: %q, want %q; %q", piece, name, c.want, answers)
				}
			}
		})
	}
}

func TestProxyProtocolFromElsewhere(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) {
		c.ProxyProtocolFrom, c.ApplicationNameAddHost = []string{"192.0.2.0/24"}, true
	})
	for _, version := range []byte{1, 2} {
		if _, answers := p.clientAddress(t, proxyHeader(t, version, "192.0.2.1:1000"), 0); !slices.Equal(answers, []string{"end"}) {
			t.Errorf("version %d: %q", version, answers)
		}
	}
	if got := p.counted(t, "koldproxy_proxy_refused_total", reasonProxyProtocol); got != 2 {
		t.Errorf("%v refused", got)
	}
	if name, _ := p.clientAddress(t, nil, 0); !strings.Contains(name, "127.0.0.1:") {
		t.Errorf("without a header: %q", name)
	}
}

func TestApplicationNameAddHost(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) {
		c.ProxyProtocolFrom, c.ApplicationNameAddHost = []string{"127.0.0.1"}, true
	})
	header := proxyHeader(t, 2, "192.0.2.1:1000")
	for _, c := range []struct {
		parameters []string
		want       string
	}{
		{nil, `"192.0.2.1:1000"`},
		{[]string{"application_name", "app"}, `"app - 192.0.2.1:1000"`},
		{[]string{"application_name", "old", "application_name", "new"}, `"new - 192.0.2.1:1000"`},
		{[]string{"application_name", strings.Repeat("x", 100)}, `"` + strings.Repeat("x", 46) + ` - 192.0.2.1:1000"`},
		{[]string{"options", "-c application_name=hidden"}, `"hidden"`},
	} {
		if name, answers := p.clientAddress(t, header, 0, c.parameters...); name != c.want {
			t.Errorf("%.60q: %s, want %s (%q)", c.parameters, name, c.want, answers)
		}
	}
	almost := startupPacket{raw: startupPacketFor("user", strings.Repeat("x", 9980)), code: 3 << 16}
	if got := almost.withClientAddress(peer{}); len(got.raw) > maxStartup {
		t.Errorf("the packet has become %d bytes long", len(got.raw))
	}
}

func TestConnectionsPerAddress(t *testing.T) {
	t.Parallel()
	p := startProxy(t, func(c *Config, _ *Deps) {
		c.ProxyProtocolFrom, c.MaxConnectionsPerAddress = []string{"127.0.0.1"}, 2
	})
	enter := func(source string) (*wire, string) {
		w, cfg := dialOnly(t, p.dsn(t, p.cluster.DSN("postgres", "", "")))
		w.send(t, joined(proxyHeader(t, 2, source), startupPacketFor("user", cfg.User, "database", "postgres")), 0)
		message, err := next(w.in, 64<<10, w.in.more(64<<10))
		if err != nil {
			return w, err.Error()
		}
		return w, showMessage(message)
	}
	first, got := enter("[2001:db8::1]:1")
	if got[0] != 'R' {
		t.Fatalf("the first: %s", got)
	}
	if _, got = enter("[2001:db8::2]:1"); got[0] != 'R' {
		t.Errorf("the second: %s", got)
	}
	want := `E S="FATAL" V="FATAL" C="53300" M="sorry, too many clients of your address already" D="koldproxy allows 2 for 2001:db8::/64."`
	if _, got = enter("[2001:db8::3]:1"); got != want {
		t.Errorf("the third: %s", got)
	}
	if _, got = enter("192.0.2.1:1"); got[0] != 'R' {
		t.Errorf("one from elsewhere: %s", got)
	}
	_ = first.conn.Close()
	for ctx := within(t); ; { // its place is free when its server connection has ended
		if _, got = enter("[2001:db8::3]:1"); got[0] == 'R' {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("after the first has left: %s", got)
		}
	}
	if got := p.counted(t, "koldproxy_proxy_refused_total", "address"); got < 1 {
		t.Errorf("%v refused", got)
	}
}

func FuzzIdentify(f *testing.F) {
	f.Add([]byte("PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\nrest"))
	f.Add(append(append([]byte(nil), proxyV2...), 0x21, 0x11, 0, 12, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0, 2, 'r'))
	from, err := parseSources([]string{"unix"})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		client, server := net.Pipe()
		go func() {
			_, _ = client.Write(b)
			_ = client.Close()
		}()
		in := &stream{conn: server, buf: make([]byte, startupBuffer)}
		if _, err := identify(in, peer{}, from); err == nil && len(in.buffered()) > len(b) {
			t.Errorf("%d bytes are left of %d", len(in.buffered()), len(b))
		}
		_ = server.Close()
	})
}
