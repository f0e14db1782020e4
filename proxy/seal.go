package proxy

import (
	"bytes"
	"crypto/rand"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
)

// What is staged is in a setting of the session, where every function that a statement calls can read it, those that run as
// another role included. Therefore it is sealed with a key that the server gives to the roles alone that may have the
// answer, and koldstore.unseal opens it (migrations/sql/003_feed.sql). An answer takes two lines:
//
//	{"demand": {…}, "nonce": hex, "mac": hex}
//	box, in base64
//
// The box is the answer combined with SHA-512(key ‖ nonce ‖ counter), counter being 32 bits wide and counting from 0 for
// each 64 bytes. The mac is SHA-512(key ‖ SHA-512(key ‖ nonce ‖ box)).

const nonceBytes = 16

// seal makes the two lines.
func seal(key []byte, demand, answer json.RawMessage) ([]byte, error) {
	nonce := make([]byte, nonceBytes)
	_, _ = rand.Read(nonce) // never fails
	return sealWith(key, nonce, demand, answer)
}

func sealWith(key, nonce []byte, demand, answer json.RawMessage) ([]byte, error) {
	box := ascii(answer) // means the same in every encoding of a database
	box = append(make([]byte, 0, len(box)), box...)
	input := append(append(append(make([]byte, 0, len(key)+len(nonce)+4), key...), nonce...), 0, 0, 0, 0)
	for at := 0; at < len(box); at += sha512.Size {
		binary.BigEndian.PutUint32(input[len(input)-4:], uint32(at/sha512.Size))
		block := sha512.Sum512(input)
		part := box[at:min(at+sha512.Size, len(box))]
		subtle.XORBytes(part, part, block[:])
	}
	inner := sha512.New()
	for _, b := range [][]byte{key, nonce, box} {
		inner.Write(b)
	}
	mac := sha512.Sum512(append(append([]byte(nil), key...), inner.Sum(nil)...))

	var compact bytes.Buffer // on one line
	if err := json.Compact(&compact, ascii(demand)); err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	head, err := json.Marshal(struct {
		Demand json.RawMessage `json:"demand"`
		Nonce  string          `json:"nonce"`
		MAC    string          `json:"mac"`
	}{compact.Bytes(), hex.EncodeToString(nonce), hex.EncodeToString(mac[:])})
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	out := append(make([]byte, 0, len(head)+base64.StdEncoding.EncodedLen(len(box))+2), head...)
	return base64.StdEncoding.AppendEncode(append(out, '\n'), box), nil
}
