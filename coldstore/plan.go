package coldstore

// dueRows decides how many of excess rows, those that the policy would let go, a flush takes: whole chunks of minFlush rows,
// and half a chunk more if there is one, so that neither a trickle makes a file for each row nor a remainder waits for long.
// Above maxPerFile a file is worth writing in any case. Zero means that nothing is due.
func dueRows(excess, minFlush, maxPerFile int64) int64 {
	minFlush, maxPerFile = max(minFlush, 1), max(maxPerFile, 1)
	if excess <= 0 {
		return 0
	}
	n := excess / minFlush * minFlush
	if half := (minFlush + 1) / 2; n > 0 && excess-n >= half {
		n += half
	}
	if n < maxPerFile && excess >= maxPerFile {
		n = maxPerFile
	}
	return n
}
