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

const (
	// compactRun is how many neighbours of a kind make a merge worth it.
	compactRun = 4
	// compactDead is the share of dead rows, in parts of compactDeadOf, from which a segment is rewritten on its own.
	compactDead, compactDeadOf = 1, 3
	// compactGrowth is how many full files of a flush become one, and compactMinRows what is merged whatever their size.
	compactGrowth, compactMinRows = 4, 100_000
	// compactMaxBytes bounds a merged file: one that is read for the first time is read whole.
	compactMaxBytes = 128 << 20
	// retentionParts is into how many segments at least the rows within a table's retention are divided.
	retentionParts = 8
	// compactMaxRun bounds how many segments are open for one merge.
	compactMaxRun = 256
)

// planCompaction chooses neighbours to be replaced by one segment; nothing is worth it if there are none. segments are the active ones of a
// table in the order of their seqs. Only neighbours are merged, so that segments stay disjoint, and only such of one
// storage and layout. Best are those of about one size: a row is then rewritten a number of times that grows with the logarithm of the table.
func planCompaction(segments []segmentRow, t *managedTable) []segmentRow {
	var best []segmentRow
	for from := range segments {
		run := mergeable(segments[from:], t)
		if worthMerging(run) && len(run) > len(best) {
			best = run
		}
	}
	if best != nil {
		return best
	}
	for i := range segments {
		s := &segments[i]
		// Deletes are forgotten at the bottom only, where no older version of their rows is in any file: readers that know
		// nothing of dead rows would see it again.
		forgettable := i == 0 && t.forgetBelow != nil && s.maxSeq < *t.forgetBelow && manyOf(s.tombstones, s.rows)
		if s.layout != "" && (manyOf(s.deadCount, s.rows) || forgettable) {
			return segments[i : i+1]
		}
	}
	return nil
}

// mergeable is the longest run from the first segment on whose rows fit into one file and none of which is larger than all
// others together.
func mergeable(segments []segmentRow, t *managedTable) []segmentRow {
	var rows, bytes, largest int64
	fits := 0
	for i := range min(len(segments), compactMaxRun) {
		s := &segments[i]
		if s.layout == "" || s.layout != segments[0].layout || s.storage != segments[0].storage {
			break
		}
		live := s.rows - s.deadCount
		rows += live
		bytes += s.size * max(live, 1) / max(s.rows, 1)
		largest = max(largest, live)
		// Retention drops whole segments: none may span so much time that its oldest rows stay for much longer than they should.
		if t.keep != nil && s.maxSeq-segments[0].minSeq > (t.now-*t.keep)/retentionParts {
			break
		}
		if rows > min(max(t.maxPerFile*compactGrowth, compactMinRows), maxFileRows) || bytes > compactMaxBytes {
			break
		}
		if largest*2 <= rows {
			fits = i + 1
		}
	}
	return segments[:fits]
}

func manyOf(n, rows int64) bool { return n > 0 && n*compactDeadOf >= rows*compactDead }

func worthMerging(run []segmentRow) bool { return len(run) >= compactRun }
