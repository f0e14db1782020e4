package cold_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
)

// localFolder is a folder that outlives the test that asked for it.
func localFolder() (string, error) { return os.MkdirTemp("", "koldproxy-gateway-*") }

// s3Client sends signed requests without a body.
func s3Client(ctx context.Context, endpoint string) (func(method, path string) error, error) {
	empty := sha256.Sum256(nil)
	return func(method, path string) error {
		req, err := http.NewRequestWithContext(ctx, method, endpoint+path, http.NoBody)
		if err != nil {
			return err
		}
		hash := hex.EncodeToString(empty[:])
		req.Header.Set("X-Amz-Content-Sha256", hash)
		c := aws.Credentials{AccessKeyID: accessKey, SecretAccessKey: secretKey}
		if err := v4.NewSigner().SignHTTP(ctx, c, req, hash, "s3", "us-east-1", time.Now()); err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode >= http.StatusMultipleChoices {
			return fmt.Errorf("%s %s: %s", method, path, resp.Status)
		}
		return nil
	}, nil
}
