package proxy

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/koldproxy/koldproxy"
)

// statementTimeout is statement_timeout in seconds, asked for without operators: those could be somebody else's.
const statementTimeout = "SELECT pg_catalog.date_part('epoch', pg_catalog.current_setting('statement_timeout')::pg_catalog.interval)"

var errTimedOut = koldproxy.Errorf(koldproxy.CodeQueryCanceled, "canceling statement due to statement timeout")

// bound returns a context that ends when the statement has taken as long as the session's statement_timeout allows: PostgreSQL
// does not count the time in which a demand is met, and this does. It also keeps PostgreSQL from counting that time as the session's
// idleness, without a transaction: the server leaves off when the next message arrives, and a Flush is one that it waits behind.
// failed is as with ask.
func (c *conversation) bound(ctx context.Context) (bounded context.Context, stop context.CancelFunc, failed []byte, err error) {
	var st step
	st.sql(statementTimeout)
	if c.way != waySaved {
		st.sync()
	}
	st.flush()
	if err := c.session.toServer(st.messages); err != nil {
		return nil, nil, nil, err
	}
	row, failed, err := c.swallow(st.answers)
	if failed != nil && err == nil && c.way != waySaved {
		_, _, err = c.swallow("Z")
	}
	if failed != nil || err != nil {
		return nil, nil, failed, err
	}
	seconds, err := strconv.ParseFloat(string(row), 64)
	if err != nil {
		return nil, nil, nil, &failure{sideServer, "protocol", fmt.Errorf("statement_timeout: %w", err)}
	}
	if seconds <= 0 {
		return ctx, func() {}, nil, nil
	}
	bounded, stop = context.WithDeadlineCause(ctx, c.began.Add(time.Duration(seconds*float64(time.Second))), errTimedOut)
	return bounded, stop, nil, nil
}
