package proxy

import (
	"crypto/rand"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"

	"github.com/koldproxy/koldproxy"
)

// What is staged is in a setting of the session, which every function that a statement calls can read and write, those that run as
// another role included. Therefore it is sealed: nobody but koldproxy can make an answer, and the server opens it for roles alone that
// may have it (migrations/sql/006_demands.sql). An answer takes three lines:
//
//	{"demand": {…}, "nonce": hex, "box": hex, "at": microseconds since 1970}    the head, ASCII
//	mac, in hexadecimal
//	box, in base64
//
// "box" in the head is the SHA-512 of the box, "at" the server's time of the moment, which makes an answer useless to transactions that
// begin later than a minute after it. With the two secrets of koldstore.stage_secret, and numbers big endian:
//
//	key = SHA-512(secret ‖ backend pid, 32 bits ‖ table, 64 bits ‖ kind ‖ nonce)
//	box = answer ⊕ SHA-512(key ‖ 0, 32 bits) ‖ SHA-512(key ‖ 1) ‖ …
//	mac = SHA-512(seal ‖ SHA-512(seal ‖ backend pid, 32 bits ‖ head))

const nonceBytes = 16

// pass is the server's word that a session's current role may have an answer.
type pass struct {
	PID    int32  `json:"pid"`
	Secret string `json:"secret"` // tells which secrets are in force
	At     int64  `json:"at"`     // the server's time, in microseconds

	received time.Time
}

// sealed is an answer to a demand in a box that is closed. It is immutable.
type sealed struct {
	pass  pass
	seal  []byte
	head  sealedHead
	boxed []byte // in base64
}

type sealedHead struct {
	Demand json.RawMessage `json:"demand"`
	Nonce  string          `json:"nonce"`
	Box    string          `json:"box"`
	At     int64           `json:"at"`
}

// seal closes an answer in, which it overwrites. demand is in its canonical form.
func seal(p pass, secret, seal []byte, demand, answer json.RawMessage) (sealed, error) {
	nonce := make([]byte, nonceBytes)
	_, _ = rand.Read(nonce) // never fails
	return sealWith(nonce, p, secret, seal, demand, answer)
}

func sealWith(nonce []byte, p pass, secret, seal []byte, demand, answer json.RawMessage) (sealed, error) {
	d, err := koldproxy.ParseDemand(demand)
	if err != nil {
		return sealed{}, fmt.Errorf("seal: %w", err)
	}
	id := append([]byte(nil), secret...)
	id = binary.BigEndian.AppendUint32(id, uint32(p.PID))
	id = binary.BigEndian.AppendUint64(id, uint64(d.Table))
	key := sha512.Sum512(append(append(id, d.Kind...), nonce...))
	box := ascii(answer) // means the same in every encoding of a database
	input := append(append(make([]byte, 0, len(key)+4), key[:]...), 0, 0, 0, 0)
	for at := 0; at < len(box); at += sha512.Size {
		binary.BigEndian.PutUint32(input[len(key):], uint32(at/sha512.Size))
		block := sha512.Sum512(input)
		part := box[at:min(at+sha512.Size, len(box))]
		subtle.XORBytes(part, part, block[:])
	}
	sum := sha512.Sum512(box)
	return sealed{
		pass: p, seal: seal, boxed: base64.StdEncoding.AppendEncode(nil, box),
		head: sealedHead{Demand: demand, Nonce: hex.EncodeToString(nonce), Box: hex.EncodeToString(sum[:])},
	}, nil
}

// lines are what is staged now.
func (s sealed) lines(now time.Time) []byte {
	h := s.head
	h.At = s.pass.At + now.Sub(s.pass.received).Microseconds()
	head, _ := json.Marshal(h) // of a canonical demand and short words
	inner := sha512.Sum512(append(binary.BigEndian.AppendUint32(append([]byte(nil), s.seal...), uint32(s.pass.PID)), head...))
	mac := sha512.Sum512(append(append([]byte(nil), s.seal...), inner[:]...))
	out := append(make([]byte, 0, len(head)+2*len(mac)+len(s.boxed)+2), head...)
	out = hex.AppendEncode(append(out, '\n'), mac[:])
	return append(append(out, '\n'), s.boxed...)
}
