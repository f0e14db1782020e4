package statuspage

import (
	"encoding/json"
	"time"
)

// snapshot is what the page shows of one database at one moment.
type snapshot struct {
	Name        string
	Err         string // why it could not be read; everything below is empty then
	Applier     applier
	Tables      []table
	Streams     []stream
	Jobs        []job
	Quarantined int64
}

// applier is the answer of koldstore.async_mirror_status().
type applier struct {
	Slot          string     `json:"slot_name"`
	Running       bool       `json:"running"`
	Healthy       bool       `json:"healthy"`
	Gap           string     `json:"gap"`
	AppliedLSN    string     `json:"applied_lsn"`
	LagBytes      *int64     `json:"lag_bytes"`
	RetainedBytes *int64     `json:"retained_bytes"`
	WALStatus     string     `json:"wal_status"`
	Watermark     int64      `json:"watermark"`
	Epoch         int64      `json:"epoch"`
	RowsApplied   int64      `json:"rows_applied"`
	AppliedAt     *time.Time `json:"applied_at"`
}

// table is one managed table. HotRows is the server's estimate.
type table struct {
	Name      string
	State     string
	Reason    *string
	HotRows   int64
	HotBytes  int64
	ColdRows  int64
	ColdBytes int64
	Segments  int64
	Floor     int64
	Storage   string
}

// stream is one change stream. Lag is in events of live push, nil where this instance does not push.
type stream struct {
	Schema, Name string
	Title        string // the qualified name as SQL spells it
	Table        *string
	Predicate    *string
	State        string
	Reason       *string
	Consumers    int64
	Lag          *int64
	Events       int64
	EventsLost   int64
	Retention    *string
}

// job is a seed, a flush or anything else that takes its time.
type job struct {
	Type     string
	Table    *string
	Status   string
	Progress json.RawMessage
	Error    *string
	Created  time.Time
	Started  *time.Time
	Ended    *time.Time
}

// Open says whether the job is still to be done.
func (j job) Open() bool { return j.Status == "queued" || j.Status == "running" }

// Share is how much of the job is done, from 0 to 1, or -1 if it does not say.
func (j job) Share() float64 {
	var p map[string]any
	if json.Unmarshal(j.Progress, &p) != nil {
		return -1
	}
	done, ok1 := p["rows"].(float64)
	total, ok2 := p["total"].(float64)
	if !ok1 || !ok2 || total <= 0 {
		return -1
	}
	return min(done/total, 1)
}

// event is one line of a stream's log. Key and Doc are JSON text.
type event struct {
	ID, Op   string
	Key, Doc string
	At       time.Time
}
