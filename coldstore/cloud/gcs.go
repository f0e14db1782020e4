package cloud

import (
	"context"
	"strconv"

	"cloud.google.com/go/storage"
	"gocloud.dev/blob"
	"gocloud.dev/blob/gcsblob"
	"google.golang.org/api/option"

	"github.com/koldproxy/koldproxy/coldstore"
)

func openGCS(ctx context.Context, p place, c Credentials, o Options) (*Bucket, error) {
	options := []option.ClientOption{storage.WithJSONReads()}
	if p.endpoint != "" {
		options = append(options, option.WithEndpoint(p.endpoint))
	}
	switch {
	case c.ServiceAccount == anonymous:
		options = append(options, option.WithoutAuthentication())
	case c.ServiceAccount != "":
		options = append(options, option.WithAuthCredentialsJSON(option.ServiceAccount, []byte(c.ServiceAccount)))
	}
	client, err := storage.NewClient(ctx, options...)
	if err != nil {
		return nil, err
	}
	// Creating under a condition is as safe to repeat as a read.
	client.SetRetry(storage.WithPolicy(storage.RetryAlways))
	blobs, err := gcsblob.OpenBucket(ctx, nil, p.bucket, &gcsblob.Options{Client: client})
	if err != nil {
		return nil, err
	}
	return newBucket(blobs, p.prefix, gcsDialect, o), nil
}

// anonymous, as the service account, means no credentials at all: for stores that stand in for Google's.
const anonymous = "anonymous"

var gcsDialect = dialect{
	onlyVersion: func(version string) func(as func(any) bool) error {
		return func(as func(any) bool) error {
			generation, err := strconv.ParseInt(version, 10, 64)
			if err != nil {
				return coldstore.ErrChanged
			}
			var object **storage.ObjectHandle
			if as(&object) {
				*object = (*object).If(storage.Conditions{GenerationMatch: generation})
			}
			return nil
		}
	},
	versionRead: func(r *blob.Reader) string {
		var reader *storage.Reader
		if !r.As(&reader) {
			return ""
		}
		return strconv.FormatInt(reader.Attrs.Generation, 10)
	},
	versionList: func(o *blob.ListObject) string {
		var attrs storage.ObjectAttrs
		o.As(&attrs)
		return strconv.FormatInt(attrs.Generation, 10)
	},
}
