package cold_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fsouza/fake-gcs-server/fakestorage"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"

	"github.com/koldproxy/koldproxy/coldstore"
	"github.com/koldproxy/koldproxy/coldstore/cloud"
	"github.com/koldproxy/koldproxy/coldstore/storetest"
)

const (
	accessKey = "koldproxy-test"
	secretKey = "koldproxy-test-secret"
)

var s3Credentials = cloud.Credentials{AccessKeyID: accessKey, SecretAccessKey: secretKey}

// gateway runs versitygw's S3 gateway over a folder: a complete S3, with signatures checked. There can be one in a process.
var gateway = sync.OnceValues(func() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	addr := ln.Addr().String()
	if err := ln.Close(); err != nil {
		return "", err
	}
	folder, err := localFolder()
	if err != nil {
		return "", err
	}
	sidecar, err := localFolder()
	if err != nil {
		return "", err
	}
	store, err := meta.NewSideCar(sidecar)
	if err != nil {
		return "", err
	}
	backend, err := posix.New(folder, store, posix.PosixOpts{SideCarDir: sidecar})
	if err != nil {
		return "", err
	}
	failed := make(chan error, 1)
	go func() {
		failed <- embedgw.RunVersityGW(context.Background(), backend, &embedgw.Config{
			RootUserAccess: accessKey, RootUserSecret: secretKey, Ports: []string{addr}, Quiet: true,
			MaxConnections: 1000, MaxRequests: 1000, MultipartMaxParts: 10000, KeepAlive: true,
		})
	}()
	for range 100 {
		if conn, err := net.Dial("tcp", addr); err == nil {
			return "http://" + addr, conn.Close()
		}
		select {
		case err := <-failed:
			return "", fmt.Errorf("gateway ended: %w", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return "", fmt.Errorf("no gateway at %s", addr)
})

var buckets atomic.Int64

// s3URL makes a bucket at an endpoint and gives its URL.
func s3URL(t testing.TB, endpoint, name string) string {
	t.Helper()
	ok(t, createBucket(t.Context(), endpoint, name))
	return fmt.Sprintf("s3://%s/some/prefix?region=us-east-1&use_path_style=true&endpoint=%s", name, url.QueryEscape(endpoint))
}

func openCloud(t testing.TB, where string, c cloud.Credentials) *cloud.Bucket {
	t.Helper()
	b, err := cloud.Open(t.Context(), where, c, cloud.Options{Timeout: 20 * time.Second})
	ok(t, err)
	t.Cleanup(func() { _ = b.Close() })
	return b
}

func TestS3GatewayKeepsTheContract(t *testing.T) {
	endpoint, err := gateway()
	ok(t, err)
	storetest.TestBucket(t, func(t *testing.T) coldstore.Bucket {
		t.Helper()
		return openCloud(t, s3URL(t, endpoint, fmt.Sprintf("conformance-%d", buckets.Add(1))), s3Credentials)
	})
}

func fakeS3(t testing.TB) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(gofakes3.New(s3mem.New()).Server())
	t.Cleanup(server.Close)
	return server
}

func TestFakeS3KeepsTheContract(t *testing.T) {
	server := fakeS3(t)
	storetest.TestBucket(t, func(t *testing.T) coldstore.Bucket {
		t.Helper()
		return openCloud(t, s3URL(t, server.URL, fmt.Sprintf("conformance-%d", buckets.Add(1))), s3Credentials)
	})
}

func TestGoogleCloudStorageKeepsTheContract(t *testing.T) {
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{Scheme: "http", Host: "127.0.0.1", PublicHost: "127.0.0.1"})
	ok(t, err)
	t.Cleanup(server.Stop)
	storetest.TestBucket(t, func(t *testing.T) coldstore.Bucket {
		t.Helper()
		name := fmt.Sprintf("conformance-%d", buckets.Add(1))
		server.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: name})
		return openCloud(t, "gs://"+name+"/some/prefix?endpoint="+url.QueryEscape(server.URL()+"/storage/v1/"), cloud.Credentials{ServiceAccount: "anonymous"})
	})
}

func TestABucketThatDoesNotExistIsNoMissingObject(t *testing.T) {
	server := fakeS3(t)
	b := openCloud(t, "s3://nowhere?region=us-east-1&use_path_style=true&endpoint="+url.QueryEscape(server.URL), s3Credentials)
	_, headErr := b.Head(t.Context(), "k")
	for name, err := range map[string]error{"head": headErr, "delete": b.Delete(t.Context(), "k")} {
		if err == nil || !strings.Contains(err.Error(), "bucket") || strings.Contains(err.Error(), "file does not exist") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWrongCredentialsAreRefusedAndNotShown(t *testing.T) {
	endpoint, err := gateway()
	ok(t, err)
	where := s3URL(t, endpoint, fmt.Sprintf("private-%d", buckets.Add(1)))
	b := openCloud(t, where, cloud.Credentials{AccessKeyID: accessKey, SecretAccessKey: "not-the-secret"})
	err = coldstore.RoundTrip(t.Context(), b)
	if err == nil || strings.Contains(err.Error(), "not-the-secret") {
		t.Errorf("round trip: %v", err)
	}
}

// createBucket makes a bucket as any client would.
func createBucket(ctx context.Context, endpoint, name string) error {
	client, err := s3Client(ctx, endpoint)
	if err != nil {
		return err
	}
	return client(http.MethodPut, "/"+name)
}
