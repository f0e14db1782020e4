package mqtt

import (
	"context"
	"time"

	"github.com/mochi-mqtt/server/v2/packets"
)

// watchRights disconnects clients that have lost the right to a topic that they are subscribed to by its name: silence would
// look as if nothing happened there. What a pattern brings is judged at delivery, and a pattern promises nothing.
func (b *Broker) watchRights(ctx context.Context, done chan<- struct{}) {
	defer close(done)
	const busiest = 100 * time.Millisecond
	ticker := time.NewTicker(max(b.cfg.RightsTTL, busiest))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, e := range b.router.exact() {
			allowed, err := b.rights.MaySubscribe(ctx, e.session.key.user, e.topic)
			if ctx.Err() != nil {
				return
			}
			if err != nil || allowed {
				continue
			}
			b.metrics.refused.WithLabelValues("subscription").Inc()
			b.log.Info().Str("user", e.session.key.user).Str("topic", e.topic).Msg("mqtt client disconnected: its right to subscribe was revoked")
			e.session.conn.end(packets.ErrNotAuthorized)
		}
	}
}
