package mqtt

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// hooks is what mochi asks while it handles the packets of a client. Unless a comment says otherwise, a method is called
// in the goroutine that reads that client's connection, and may wait.
type hooks struct {
	mochi.HookBase
	broker *Broker
}

// ID names the hook.
func (h *hooks) ID() string { return "koldproxy" }

// Provides lists the methods that mochi is to call.
func (h *hooks) Provides(method byte) bool {
	switch method {
	case mochi.OnPacketRead, mochi.OnConnect, mochi.OnConnectAuthenticate, mochi.OnSessionEstablish, mochi.OnSessionEstablished,
		mochi.OnACLCheck, mochi.OnSubscribed, mochi.OnUnsubscribed, mochi.OnPublish:
		return true
	}
	return false
}

// OnPacketRead sees every packet before mochi acts on it.
func (h *hooks) OnPacketRead(cl *mochi.Client, pk packets.Packet) (packets.Packet, error) {
	c := connOf(cl)
	switch pk.FixedHeader.Type {
	case packets.Connect:
		if c.connected {
			return pk, nil // which is an error that mochi deals with
		}
		return h.prepare(c, pk), nil
	case packets.Publish:
		if code := h.mayPublish(&pk); code != packets.CodeSuccess {
			h.broker.metrics.refused.WithLabelValues("publish").Inc()
			h.broker.log.Info().Str("user", c.user).Stringer("remote", c.RemoteAddr()).Msg("mqtt client disconnected: it may not publish")
			return pk, h.disconnect(cl, code)
		}
	case packets.Subscribe:
		filters := make([]string, len(pk.Filters))
		for i := range pk.Filters {
			filters[i] = pk.Filters[i].Filter
		}
		if h.broker.router.filters(c.session, filters) > h.broker.cfg.MaxSubscriptions {
			h.broker.metrics.refused.WithLabelValues("subscription").Inc()
			h.broker.log.Info().Str("user", c.user).Stringer("remote", c.RemoteAddr()).Msg("mqtt client disconnected: too many subscriptions")
			return pk, h.disconnect(cl, packets.ErrQuotaExceeded)
		}
	}
	return pk, nil
}

// prepare keeps what CONNECT says and gives mochi a simpler one: a clean session under a name of its own. So mochi never
// finds another session to take over, which it does with a race, and never keeps one after its connection.
func (h *hooks) prepare(c *conn, pk packets.Packet) packets.Packet {
	c.connected = true
	c.connect = connectInfo{
		clientID:  strings.Clone(pk.Connect.ClientIdentifier),
		keepalive: time.Duration(pk.Connect.Keepalive) * time.Second,
		clean:     pk.Connect.Clean,
	}
	name := strconv.FormatUint(h.broker.clients.Add(1), 10)
	pk.Connect.ClientIdentifier = name
	pk.Connect.Clean = true
	pk.Connect.WillProperties.WillDelayInterval = 0 // the session ends with its connection, and then the will is due
	pk.Properties.TopicAliasMaximum = 0             // mochi announces aliases in packets that it then drops
	return pk
}

// mayPublish judges a PUBLISH packet, or a will dressed up as one. mochi checks neither wills nor MQTT 5 topic aliases.
func (h *hooks) mayPublish(pk *packets.Packet) packets.Code {
	switch {
	case !h.broker.cfg.ClientPublish, strings.HasPrefix(pk.TopicName, "$"):
		return packets.ErrNotAuthorized
	case pk.Properties.TopicAliasFlag:
		return packets.ErrTopicAliasInvalid
	case pk.FixedHeader.Qos > 0:
		return packets.ErrQosNotSupported
	}
	return packets.CodeSuccess
}

// disconnect tells an MQTT 5 client the reason and returns the error that ends its connection. It has to be this one: mochi
// takes any other error of OnPacketRead for consent.
func (h *hooks) disconnect(cl *mochi.Client, code packets.Code) error {
	if cl.Properties.ProtocolVersion >= 5 {
		_ = cl.WritePacket(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Disconnect}, ReasonCode: code.Code}) // a courtesy
	}
	return packets.ErrRejectPacket
}

// OnConnect decides about a CONNECT packet. The login happens here and not in OnConnectAuthenticate because only here it
// can be answered with a reason.
func (h *hooks) OnConnect(cl *mochi.Client, pk packets.Packet) error {
	c := connOf(cl)
	v5 := pk.ProtocolVersion >= 5
	if c.connect.clientID == "" {
		if !v5 && !c.connect.clean {
			return h.reject(cl, packets.ErrClientIdentifierNotValid) // [MQTT-3.1.3-8]
		}
		cl.Properties.Props.AssignedClientID = "koldproxy-" + cl.ID
	}
	if pk.Properties.AuthenticationMethod != "" {
		return h.reject(cl, packets.ErrBadAuthenticationMethod)
	}
	if pk.Connect.WillFlag {
		will := packets.Packet{TopicName: pk.Connect.WillTopic}
		if code := h.mayPublish(&will); code != packets.CodeSuccess {
			h.broker.metrics.refused.WithLabelValues("publish").Inc()
			h.broker.log.Info().Stringer("remote", c.RemoteAddr()).Msg("mqtt client refused: its will may not be published")
			return h.reject(cl, code)
		}
	}
	user := string(pk.Connect.Username)
	err := h.broker.login(c.ctx, user, string(pk.Connect.Password))
	switch {
	case err == nil:
		c.user = user
		return nil
	case errors.Is(err, ErrRefused):
		h.broker.metrics.refused.WithLabelValues("login").Inc()
		h.broker.log.Info().Str("user", clip(user)).Stringer("remote", c.RemoteAddr()).Err(err).Msg("mqtt login refused")
		return h.reject(cl, packets.ErrBadUsernameOrPassword)
	default:
		h.broker.metrics.refused.WithLabelValues("login_unavailable").Inc()
		h.broker.log.Warn().Str("user", user).Stringer("remote", c.RemoteAddr()).Err(err).Msg("mqtt login cannot be checked")
		return h.reject(cl, packets.ErrServerUnavailable)
	}
}

// reject answers CONNECT with a reason and returns it as the error that ends the connection.
func (h *hooks) reject(cl *mochi.Client, code packets.Code) error {
	answer := code
	if code == packets.ErrNotAuthorized && cl.Properties.ProtocolVersion < 5 {
		answer = packets.Err3NotAuthorized // mochi's table has no entry for it
	}
	_ = h.broker.server.SendConnack(cl, answer, false, nil) // the connection ends anyway
	return code
}

// OnConnectAuthenticate lets in whom OnConnect has let in.
func (h *hooks) OnConnectAuthenticate(cl *mochi.Client, _ packets.Packet) bool {
	return connOf(cl).user != ""
}

// OnSessionEstablish notes the client before mochi puts it into its maps.
func (h *hooks) OnSessionEstablish(cl *mochi.Client, _ packets.Packet) { connOf(cl).client = cl }

// OnSessionEstablished starts the session, after CONNACK.
func (h *hooks) OnSessionEstablished(cl *mochi.Client, pk packets.Packet) {
	c := connOf(cl)
	clientID := c.connect.clientID
	if clientID == "" {
		clientID = cl.Properties.Props.AssignedClientID
	}
	h.broker.enter(c, &session{
		broker:    h.broker,
		conn:      c,
		key:       sessionKey{c.user, clientID},
		version:   pk.ProtocolVersion,
		maxPacket: int(pk.Properties.MaximumPacketSize),
		queue:     make(chan delivery, h.broker.cfg.SubscriberQueue),
		ending:    make(chan struct{}),
		stopped:   make(chan struct{}),
	})
	h.broker.log.Debug().Str("user", c.user).Stringer("remote", c.RemoteAddr()).Msg("mqtt client logged in")
}

// OnACLCheck is asked for a filter at SUBSCRIBE, and by mochi's own delivery of what clients publish to each other (from
// the publisher's goroutine) for an ordinary topic, which is no question of rights.
func (h *hooks) OnACLCheck(cl *mochi.Client, filter string, write bool) bool {
	if write {
		return h.broker.cfg.ClientPublish && !strings.HasPrefix(filter, "$")
	}
	_, pattern, kind := parseFilter(filter)
	switch kind {
	case filterOrdinary, filterPattern: // what a pattern brings is judged topic by topic
		return true
	case filterExact:
		c := connOf(cl)
		allowed, err := h.broker.rights.MaySubscribe(c.ctx, c.user, pattern)
		if err != nil {
			h.broker.log.Warn().Str("user", c.user).Str("topic", pattern).Err(err).Msg("right to subscribe cannot be checked")
		}
		return allowed && err == nil
	default:
		return false
	}
}

// OnSubscribed notes what was granted, just before SUBACK is sent: what is published after a client has seen SUBACK is for
// that client too.
func (h *hooks) OnSubscribed(cl *mochi.Client, pk packets.Packet, codes []byte) {
	c := connOf(cl)
	for i, sub := range pk.Filters {
		if i >= len(codes) || codes[i] > packets.CodeGrantedQos2.Code {
			h.broker.metrics.refused.WithLabelValues("subscription").Inc()
			h.broker.log.Info().Str("user", c.user).Stringer("remote", c.RemoteAddr()).Str("filter", clip(sub.Filter)).Msg("mqtt subscription refused")
			continue
		}
		filter := strings.Clone(sub.Filter) // it shares memory with the packet
		group, pattern, _ := parseFilter(filter)
		h.broker.router.subscribe(c.session, filter, subscription{group: group, pattern: pattern, identifier: sub.Identifier})
	}
}

// OnUnsubscribed forgets subscriptions; also called once with all of them when the client leaves.
func (h *hooks) OnUnsubscribed(cl *mochi.Client, pk packets.Packet) {
	c := connOf(cl)
	for _, sub := range pk.Filters {
		h.broker.router.unsubscribe(c.session, sub.Filter)
	}
}

// OnPublish stands behind OnPacketRead: whatever way a client's message came, it is not about a topic that begins with $.
func (h *hooks) OnPublish(_ *mochi.Client, pk packets.Packet) (packets.Packet, error) {
	if strings.HasPrefix(pk.TopicName, "$") {
		return pk, packets.ErrRejectPacket
	}
	return pk, nil
}

// connOf returns the connection of a client of this broker; there are no others.
func connOf(cl *mochi.Client) *conn { return cl.Net.Conn.(*conn) }

// clip shortens what a client sent for a log.
func clip(s string) string {
	const enough = 128
	if len(s) <= enough {
		return s
	}
	return s[:enough] + "…"
}

// maxRoleBytes is the length of the longest name of a role. PostgreSQL cuts longer ones off, and so would let in one name
// as another.
const maxRoleBytes = 63

// login asks PostgreSQL about a user and password, a few at a time.
func (b *Broker) login(ctx context.Context, user, password string) error {
	switch {
	case user == "" || password == "":
		return errAnonymous
	case len(user) > maxRoleBytes || !utf8.ValidString(user) || strings.ContainsRune(user+password, 0):
		return errBadName
	}
	ctx, cancel := context.WithTimeout(ctx, b.cfg.LoginTimeout)
	defer cancel()
	select {
	case b.logins <- struct{}{}:
		defer func() { <-b.logins }()
	case <-ctx.Done():
		return ctx.Err()
	}
	return b.auth.Login(ctx, user, password)
}

var (
	errAnonymous = refusal("user and password are needed")
	errBadName   = refusal("a user or password that PostgreSQL cannot have")
)

// refusal is an [ErrRefused] with a reason.
type refusal string

func (r refusal) Error() string        { return string(r) }
func (r refusal) Is(target error) bool { return target == ErrRefused }
