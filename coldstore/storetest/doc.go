// Package storetest checks implementations of coldstore.Bucket, as testing/fstest does for file systems, and makes buckets
// fail on purpose.
//
// [TestBucket] is the conformance suite: an implementation passes it or is none. [Faults] wraps a bucket and makes its n-th
// operation fail, before or after it took effect, so that callers can be tried at every step.
package storetest
