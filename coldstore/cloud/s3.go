package cloud

import (
	"context"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"gocloud.dev/blob"
	"gocloud.dev/blob/s3blob"
)

func openS3(ctx context.Context, p place, c Credentials, o Options) (*Bucket, error) {
	load := []func(*config.LoadOptions) error{
		// Many stores that speak S3 refuse the checksums that the library sends by default. Segments carry their own, which is
		// compared after every upload.
		config.WithRequestChecksumCalculation(aws.RequestChecksumCalculationWhenRequired),
		config.WithResponseChecksumValidation(aws.ResponseChecksumValidationWhenRequired),
	}
	if p.region != "" {
		load = append(load, config.WithRegion(p.region))
	}
	if c.AccessKeyID != "" || c.SecretAccessKey != "" {
		load = append(load, config.WithCredentialsProvider(credentials.NewStaticCredentialsProvider(c.AccessKeyID, c.SecretAccessKey, c.SessionToken)))
	}
	cfg, err := config.LoadDefaultConfig(ctx, load...)
	if err != nil {
		return nil, err
	}
	client := s3.NewFromConfig(cfg, func(options *s3.Options) {
		options.UsePathStyle = p.pathStyle
		if p.endpoint != "" {
			options.BaseEndpoint = aws.String(p.endpoint)
		}
	})
	blobs, err := s3blob.OpenBucket(ctx, client, p.bucket, &s3blob.Options{RequestChecksumCalculation: aws.RequestChecksumCalculationWhenRequired})
	if err != nil {
		return nil, err
	}
	return newBucket(blobs, p.prefix, s3Dialect, o), nil
}

var s3Dialect = dialect{
	onlyVersion: func(version string) func(as func(any) bool) error {
		return func(as func(any) bool) error {
			var in *s3.GetObjectInput
			if as(&in) {
				in.IfMatch = aws.String(version)
			}
			return nil
		}
	},
	versionRead: func(r *blob.Reader) string {
		var out s3.GetObjectOutput
		r.As(&out)
		return aws.ToString(out.ETag)
	},
	versionList: func(o *blob.ListObject) string {
		var out types.Object
		o.As(&out)
		return aws.ToString(out.ETag)
	},
}
