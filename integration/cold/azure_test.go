package cold_test

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"

	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/coldstore/cloud"
	"github.com/koldproxy/koldproxy/coldstore/storetest"
)

// The account that every Azurite has; its key is in Microsoft's documentation.
const (
	azuriteAccount = "devstoreaccount1"
	azuriteKey     = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==" //nolint:gosec // no secret
)

// azurite runs Microsoft's own emulator of Azure's blobs, in memory, and gives its endpoint. It is not part of this repository:
// `npm install azurite` brings it.
func azurite(t *testing.T) string {
	t.Helper()
	if os.Getenv("KOLDPROXY_TEST_LONG") == "" {
		t.Skip("starts a program of its own; set KOLDPROXY_TEST_LONG=1")
	}
	program, err := exec.LookPath("azurite-blob")
	if err != nil {
		t.Skip("azurite-blob is not in PATH: npm install azurite")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	host, port, err := net.SplitHostPort(ln.Addr().String())
	ok(t, err)
	ok(t, ln.Close())
	cmd := exec.CommandContext(t.Context(), program, "--blobHost", host, "--blobPort", port, "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
	cmd.Dir = t.TempDir()
	ok(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if conn, err := net.Dial("tcp", net.JoinHostPort(host, port)); err == nil {
			ok(t, conn.Close())
			return "http://" + net.JoinHostPort(host, port) + "/" + azuriteAccount
		}
		if time.Now().After(deadline) {
			t.Fatal("azurite-blob does not answer")
		}
	}
}

func TestAzureKeepsTheContract(t *testing.T) {
	endpoint := azurite(t)
	key, err := container.NewSharedKeyCredential(azuriteAccount, azuriteKey)
	ok(t, err)
	open := func(t *testing.T) coldstore.Bucket {
		t.Helper()
		name := "conformance-" + strconv.FormatInt(buckets.Add(1), 10)
		client, err := container.NewClientWithSharedKeyCredential(endpoint+"/"+name, key, nil)
		ok(t, err)
		_, err = client.Create(t.Context(), nil)
		ok(t, err)
		where := fmt.Sprintf("azblob://%s/some/prefix?account=%s&endpoint=%s", name, azuriteAccount, url.QueryEscape(endpoint))
		return openCloud(t, where, cloud.Credentials{AccountKey: azuriteKey})
	}
	storetest.TestBucket(t, open)
	t.Run("a table is flushed and read", func(t *testing.T) {
		f := newFixture(t, open(t))
		tab := f.manage("messages", "id bigint PRIMARY KEY, body text", "max_rows_per_file = 1000")
		f.exec("INSERT INTO messages SELECT i, 'body ' || i FROM generate_series(1, 2500) i")
		tab.capture("true")
		tab.mustFlush()
		report, err := f.store.Verify(t.Context(), tab.oid)
		ok(t, err)
		if !report.OK || len(report.Problems) > 0 {
			t.Errorf("%+v", report)
		}
	})
}
