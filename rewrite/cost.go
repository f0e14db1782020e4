package rewrite

// maxScanSteps bounds the bytes that PostgreSQL's scanner may look at more than once. It is reached by no text that
// anybody wrote: it takes a run of some ten thousand operator characters, or many of thousands.
const maxScanSteps = 128 << 20

// scansInTime reports whether the scanner's time for sql is about linear. It is not where operator characters stand in a
// row: at /*/*/*… or +++… the scanner takes all of the row, keeps the first characters and begins again with the rest. A
// megabyte of /* takes it ten minutes, in C, where nobody can interrupt it.
//
// The estimate does not know literals and comments, in which rows cost nothing. Rows that begin with -- are a comment
// wherever they would matter.
func scansInTime(sql string) bool {
	steps := 0
	for i := 0; i < len(sql); i++ {
		if !isOperatorByte(sql[i]) {
			continue
		}
		start, restarts := i, 0
		for ; i < len(sql) && isOperatorByte(sql[i]); i++ {
			if c := sql[i]; c == '+' || c == '-' || c == '/' && i+1 < len(sql) && sql[i+1] == '*' {
				restarts++
			}
		}
		if length := i - start; length >= 2 && sql[start:start+2] != "--" {
			steps += restarts * length
		}
	}
	return steps <= maxScanSteps
}

// isOperatorByte is op_chars of PostgreSQL's scan.l.
func isOperatorByte(c byte) bool {
	switch c {
	case '~', '!', '@', '#', '^', '&', '|', '`', '?', '+', '-', '*', '/', '%', '<', '>', '=':
		return true
	}
	return false
}
