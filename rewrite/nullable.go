package rewrite

import "strings"

// findNullable notes for each key whether it is a column of a table that the server can be asked about: the only table of
// FROM, without an outer join that could make NULLs, by the name under which PostgreSQL finds it. In CREATE VIEW and its
// like nothing is noted, because what they keep outlives a rename of the column.
func (r *rewriter) findNullable(s statementRange, f *frame, at int, keys []orderKey) {
	from, to, ok := f.find(tFrom, at)
	if !ok || r.is(s.from, tCreate) {
		return
	}
	table, alias, ok := r.onlyTable(from, to)
	if !ok || !strings.Contains(table, ".") && r.commonTables(s)[alias.table] {
		return
	}
	for i := range keys {
		k := &keys[i]
		qualifier, ok := alias.name, true
		if k.first != k.last {
			qualifier, ok = r.name(k.last - 2)
			ok = ok && k.first == k.last-2
		}
		if ok && clip(qualifier) == alias.name {
			k.table = table
		}
	}
}

// createsView reports whether a statement keeps its text for others to come.
func (r *rewriter) createsView(s statementRange) bool {
	if !r.is(s.from, tCreate) {
		return false
	}
	for i := s.from + 1; i < s.to && !r.is(i, tAs) && !r.is(i, tOpen); i++ {
		if r.is(i, tView) {
			return true
		}
	}
	return false
}

// tableNames are the folded names of a table in FROM: its own, and the one that qualifies its columns.
type tableNames struct{ table, name string }

// onlyTable reads the tokens [from, to) as [ONLY] table [*] [[AS] alias]. sql is the table as typed.
func (r *rewriter) onlyTable(from, to int) (sql string, names tableNames, ok bool) {
	if r.is(from, tOnly) {
		from++
	}
	end := from + 1
	for end+1 < to && r.is(end, tDot) {
		end += 2
	}
	if !r.isColumnReference(from, min(end, to)) {
		return "", names, false
	}
	var out strings.Builder
	for i := from; i < end; i++ {
		if r.is(i, tUnicodeIdent) {
			return "", names, false
		}
		out.WriteString(r.text(i))
	}
	names.table, _ = r.name(end - 1)
	names.table = clip(names.table)
	names.name = names.table
	if r.is(end, tStar) && end < to {
		end++
	}
	if end < to && r.is(end, tAs) {
		end++
	}
	if end == to-1 && r.isColumnName(end) {
		alias, known := r.name(end)
		names.name, ok = clip(alias), known
		return out.String(), names, ok
	}
	return out.String(), names, end == to
}

// commonTables are the names that a WITH of the statement may define. They hide tables of the same name.
func (r *rewriter) commonTables(s statementRange) map[string]bool {
	if r.ctes != nil && r.ctesOf == s.from {
		return r.ctes
	}
	r.ctes, r.ctesOf = make(map[string]bool), s.from
	for i := s.from + 1; i < s.to-1; i++ {
		if (r.is(i-1, tWith) || r.is(i-1, tRecursive) || r.is(i-1, tComma)) && (r.is(i+1, tAs) || r.is(i+1, tOpen) || r.is(i+1, tUescape)) {
			if name, ok := r.name(i); ok {
				r.ctes[clip(name)] = true
			}
		}
	}
	return r.ctes
}
