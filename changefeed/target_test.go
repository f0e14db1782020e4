package changefeed_test

import "testing"

func TestStreamReportsPutExitAndDelete(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(`CREATE TABLE orders (id int PRIMARY KEY, total int, status text)`, `INSERT INTO orders VALUES (1, 5000, 'paid')`)
	h.stream("big", "orders", "total > 1000 AND status <> 'draft'", "pre_image", "true")
	h.exec(
		`INSERT INTO orders VALUES (2, 10, 'paid'), (3, 2000, 'draft'), (4, 2000, 'paid')`,
		`UPDATE orders SET total = 6000 WHERE id = 1`, // was there before the stream
		`UPDATE orders SET status = 'paid' WHERE id = 3`,
		`UPDATE orders SET total = 1 WHERE id = 4`,
		`DELETE FROM orders WHERE id = 4`,
		`UPDATE orders SET status = NULL WHERE id = 3`,
		`DELETE FROM orders WHERE id IN (1, 2)`,
	)
	h.fence()
	h.expect(`SELECT op, k, doc, coalesce(old::text, '-') FROM _stream_big ORDER BY id`,
		`put 4 {"id": 4, "total": 2000, "status": "paid"} -`,
		`put 1 {"id": 1, "total": 6000, "status": "paid"} {"id": 1, "total": 5000, "status": "paid"}`,
		`put 3 {"id": 3, "total": 2000, "status": "paid"} {"id": 3, "total": 2000, "status": "draft"}`,
		`exit 4 {"id": 4, "total": 1, "status": "paid"} {"id": 4, "total": 2000, "status": "paid"}`,
		`exit 3 {"id": 3, "total": 2000, "status": null} {"id": 3, "total": 2000, "status": "paid"}`,
		`delete 1 {"id": 1, "total": 6000, "status": "paid"} {"id": 1, "total": 6000, "status": "paid"}`,
	)
	h.expect(`SELECT events, events_lost FROM koldstore.stream_status`, `6 0`)
}
