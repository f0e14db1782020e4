// Package cloud opens buckets of S3 and what speaks its protocol, of Google Cloud Storage and of Azure Blob Storage as
// [coldstore.Bucket]. It is the only importer of the clouds' libraries.
//
//   - [Open] opens one by URL: s3://bucket/prefix, gs://bucket/prefix, azblob://container/prefix.
//   - [Credentials] come from where the cloud's own tools find them (environment, files, instance role) unless given.
//   - [Secrets] resolves references in stored credentials, and decides which may be used.
//
// An object is created with the store's own put-if-absent (If-None-Match, ifGenerationMatch=0), read as the version that was
// verified (If-Match), and never replaced. Requests are repeated by the libraries; when the answer to a put was lost, the
// repeated one finds the key taken: that is fs.ErrExist, and the caller reads back and compares, as a fresh key is nobody
// else's. Every wait is bounded: a transfer that stands still for [Options.Timeout] ends with an error.
package cloud
