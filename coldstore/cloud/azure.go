package cloud

import (
	"context"
	"errors"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	azblob "github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/blob"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"
	"gocloud.dev/blob"
	"gocloud.dev/blob/azureblob"
)

func openAzure(ctx context.Context, p place, c Credentials, o Options) (*Bucket, error) {
	account := c.AccountName
	if account == "" {
		account = p.account
	}
	if account == "" {
		return nil, errors.New("the storage account is missing: name it in the URL (?account=…), in the config of a registered storage or in its credential account_name")
	}
	endpoint := p.endpoint
	if endpoint == "" {
		endpoint = "https://" + account + ".blob.core.windows.net"
	}
	client, err := azureClient(strings.TrimRight(endpoint, "/")+"/"+p.bucket, account, c)
	if err != nil {
		return nil, err
	}
	blobs, err := azureblob.OpenBucket(ctx, client, nil)
	if err != nil {
		return nil, err
	}
	return newBucket(blobs, p.prefix, azureDialect, o), nil
}

func azureClient(url, account string, c Credentials) (*container.Client, error) {
	switch {
	case c.AccountKey != "":
		key, err := container.NewSharedKeyCredential(account, c.AccountKey)
		if err != nil {
			return nil, errors.New("the account key is not base64")
		}
		return container.NewClientWithSharedKeyCredential(url, key, nil)
	case c.SASToken != "":
		return container.NewClientWithNoCredential(url+"?"+strings.TrimPrefix(c.SASToken, "?"), nil)
	default:
		identity, err := azidentity.NewDefaultAzureCredential(nil)
		if err != nil {
			return nil, err
		}
		return container.NewClient(url, identity, nil)
	}
}

var azureDialect = dialect{
	wantsReader: true,
	onlyVersion: func(version string) func(as func(any) bool) error {
		return func(as func(any) bool) error {
			var options *azblob.DownloadStreamOptions
			if as(&options) {
				tag := azcore.ETag(version)
				options.AccessConditions = &azblob.AccessConditions{ModifiedAccessConditions: &azblob.ModifiedAccessConditions{IfMatch: &tag}}
			}
			return nil
		}
	},
	versionRead: func(r *blob.Reader) string {
		var response azblob.DownloadStreamResponse
		if !r.As(&response) || response.ETag == nil {
			return ""
		}
		return string(*response.ETag)
	},
	versionList: func(o *blob.ListObject) string {
		var item container.BlobItem
		if !o.As(&item) || item.Properties == nil || item.Properties.ETag == nil {
			return ""
		}
		return string(*item.Properties.ETag)
	},
}
