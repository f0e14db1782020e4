package rewrite

import (
	"strings"

	"github.com/koldproxy/koldproxy"
)

const (
	grantSubscribeGrammar  = "GRANT SUBSCRIBE ON TOPIC 'filter' [, ...] TO role [, ...]"
	revokeSubscribeGrammar = "REVOKE SUBSCRIBE ON TOPIC 'filter' [, ...] FROM role [, ...]"
)

// grantSubscribe replaces
//
//	GRANT SUBSCRIBE ON TOPIC 'filter' [, …] TO role [, …]
//	REVOKE SUBSCRIBE ON TOPIC 'filter' [, …] FROM role [, …]
//
// by a call. Without the filter PostgreSQL would read a privilege on a table named topic.
func (r *rewriter) grantSubscribe(s statementRange, statement *Statement) *koldproxy.Error {
	tag, procedure, grammar, toOrFrom := "GRANT", "grant_subscribe", grantSubscribeGrammar, tTo
	if r.is(s.from, tRevoke) {
		tag, procedure, grammar, toOrFrom = "REVOKE", "revoke_subscribe", revokeSubscribeGrammar, tFrom
	}
	r.customAnyway(s.from)
	p := r.parser(s, s.from+4, grammar)
	q := r.quoter()
	var filters, roles []string
	for more := true; more; more = p.take(tComma) {
		filters = append(filters, q.literal(p.literal()))
	}
	p.expect(toOrFrom)
	for more := true; more; more = p.take(tComma) {
		roles = append(roles, p.role())
	}
	if err := p.finish(); err != nil {
		return err
	}
	r.replace(s, "CALL koldstore."+procedure+"(filters => ARRAY["+strings.Join(filters, ", ")+
		"]::pg_catalog.text[], roles => ARRAY["+strings.Join(roles, ", ")+"]::pg_catalog.name[])")
	statement.Tag = tag
	return nil
}

// role reads a role as PostgreSQL's GRANT has it and returns an expression of its name. The name public stands for
// PUBLIC there as it does here.
func (p *parser) role() string {
	p.take(tGroup) // a noise word
	switch {
	case p.take(tCurrentUser), p.take(tCurrentRole):
		return "CURRENT_USER"
	case p.take(tSessionUser):
		return "SESSION_USER"
	}
	return p.quoter().literal(p.nextName(p.isRoleName(p.i)))
}
