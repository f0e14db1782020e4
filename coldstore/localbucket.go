package coldstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// LocalBucket is a [Bucket] in a folder. An object is written to a temporary file beside its final place, synced, linked to
// its name (which fails if the name is taken) and made durable by syncing the folder. Files have mode 0600 and folders
// 0700. Nothing outside the folder is ever touched, also when symbolic links in it point outward. Errors do not say where the folder is:
// they are shown to clients.
type LocalBucket struct {
	base    string                      // absolute
	inside  string                      // the bucket's folder in base, "." for base itself; links must not lead out of base
	mayMake func(context.Context) error // nil if the folder is never made
}

// tempPrefix begins the names of files that are being written; no key can name one.
const tempPrefix = ".tmp-"

// OpenLocalBucket opens the bucket in a folder. The folder may be missing, also later; the bucket fails until it is there: a volume that
// is not mounted must not be replaced by an empty folder. See [LocalBucket.MakeFolderIf].
func OpenLocalBucket(folder string) (*LocalBucket, error) { return OpenLocalBucketIn(folder, ".") }

// OpenLocalBucketIn is OpenLocalBucket for a folder in another one, named from there. Symbolic links on the way must be relative and must
// not lead out of the other folder; it is looked at anew by every operation.
func OpenLocalBucketIn(parent, folder string) (*LocalBucket, error) {
	if !filepath.IsLocal(folder) {
		return nil, fmt.Errorf("cold storage folder: %s is not in its parent", folder)
	}
	base, err := filepath.Abs(parent)
	if err != nil {
		return nil, fmt.Errorf("cold storage folder: %w", err)
	}
	return &LocalBucket{base: base, inside: folder}, nil
}

// MakeFolderIf lets PutIfAbsent and MakeFolder make a missing folder when allowed returns nil, which it must not while objects
// are known that should be there. It is to be called before the bucket is used.
func (b *LocalBucket) MakeFolderIf(allowed func(context.Context) error) { b.mayMake = allowed }

// CheckFolder says what keeps the folder from being opened, nil if it is there; fs.ErrNotExist is matched if it is not.
func (b *LocalBucket) CheckFolder() error {
	root, err := b.openFolder()
	if err != nil {
		return err
	}
	return root.Close()
}

// MakeFolder makes the folder and its parents if they are missing. It returns what kept it from that, an error of the function given
// to MakeFolderIf as well, and fs.ErrNotExist if there is none.
func (b *LocalBucket) MakeFolder(ctx context.Context) error {
	err := b.CheckFolder()
	if !errors.Is(err, fs.ErrNotExist) || b.mayMake == nil {
		return err
	}
	if why := b.mayMake(ctx); why != nil {
		return fmt.Errorf("%w, and is not made: %w", err, why)
	}
	if err := b.makeFolder(); err != nil {
		return b.hide(fmt.Errorf("the cold storage folder cannot be made: %w", err))
	}
	return nil
}

func (b *LocalBucket) makeFolder() error {
	if err := makeDurably(b.base); err != nil {
		return err
	}
	base, err := os.OpenRoot(b.base)
	if err != nil {
		return err
	}
	return errors.Join(makeFolders(base, b.inside), base.Close())
}

// makeDurably makes a folder and its parents, each durable in its parent before the next.
func makeDurably(folder string) error {
	if info, err := os.Stat(folder); err == nil && info.IsDir() {
		return nil
	}
	parent := filepath.Dir(folder)
	if parent != folder {
		if err := makeDurably(parent); err != nil {
			return err
		}
	}
	root, err := os.OpenRoot(parent)
	if err != nil {
		return err
	}
	return errors.Join(makeFolders(root, filepath.Base(folder)), root.Close())
}

// openFolder opens the folder. It is not kept open, so that a folder that is moved away and back, or mounted again, is found.
func (b *LocalBucket) openFolder() (*os.Root, error) {
	root, err := os.OpenRoot(b.base)
	if err == nil && b.inside != "." {
		base := root
		root, err = base.OpenRoot(b.inside)
		_ = base.Close() // only a handle
	}
	if err != nil {
		var pathErr *fs.PathError
		if errors.As(err, &pathErr) {
			err = pathErr.Err
		}
		return nil, fmt.Errorf("the cold storage folder cannot be opened: %w", err)
	}
	return root, nil
}

// folderError is an error of the folder as a whole. It does not match what its text tells: a missing folder must not look like one
// missing object.
type folderError struct{ text string }

func (e folderError) Error() string { return e.text }

// Is says that nothing can have been stored.
func (e folderError) Is(target error) bool { return target == ErrNotStored }

// root opens the folder for one operation.
func (b *LocalBucket) root(ctx context.Context, op, key string) (*os.Root, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s %s: %w", op, key, err)
	}
	root, err := b.openFolder()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", op, key, folderError{err.Error()})
	}
	return root, nil
}

// hide takes the place of the folder out of an error's text. What the error matches stays.
func (b *LocalBucket) hide(err error) error {
	if err == nil {
		return nil
	}
	return &localError{b.base, err}
}

type localError struct {
	base string
	err  error
}

// Error leaves paths as from the folder on. In the texts of package os a path comes after the operation and a space, which no key has.
func (e *localError) Error() string {
	return strings.NewReplacer(" "+strings.TrimSuffix(e.base, "/")+"/", " ", " "+e.base+":", " the cold storage folder:").Replace(e.err.Error())
}

func (e *localError) Unwrap() error { return e.err }

// PutIfAbsent implements [Bucket].
func (b *LocalBucket) PutIfAbsent(ctx context.Context, key string, r io.Reader, size int64) (err error) {
	if err := CheckKey(key); err != nil {
		return err
	}
	if b.mayMake != nil {
		if err := b.MakeFolder(ctx); err != nil {
			return fmt.Errorf("put %s: %w", key, folderError{err.Error()})
		}
	}
	root, err := b.root(ctx, "put", key)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // only a handle; nothing is written through it
	defer func() {
		if err != nil {
			err = b.hide(fmt.Errorf("put %s: %w", key, err))
		}
	}()
	name := filepath.FromSlash(key)
	if err := makeFolders(root, filepath.Dir(name)); err != nil {
		return err
	}
	if _, err := root.Lstat(name); err == nil {
		return fs.ErrExist
	}
	temp := filepath.Join(filepath.Dir(name), tempPrefix+filepath.Base(name)+"-"+rand.Text())
	if err := writeFile(ctx, root, temp, r, size); err != nil {
		return errors.Join(err, ignoreMissing(root.Remove(temp)))
	}
	// A hard link, unlike a rename, never replaces what is there.
	linkErr := root.Link(temp, name)
	if err := errors.Join(linkErr, ignoreMissing(root.Remove(temp))); err != nil {
		return err
	}
	return syncFolder(root, filepath.Dir(name))
}

func writeFile(ctx context.Context, root *os.Root, name string, r io.Reader, size int64) (err error) {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// One byte more than expected is enough to see that there is too much.
	n, err := io.Copy(f, io.LimitReader(&contextReader{ctx, r}, size+1))
	if err != nil {
		return err
	}
	if n != size {
		return fmt.Errorf("the source does not have the announced %d bytes", size)
	}
	return f.Sync()
}

// makeFolders makes a folder and its parents, each durable in its parent before the next.
func makeFolders(root *os.Root, folder string) error {
	if folder == "." {
		return nil
	}
	if err := makeFolders(root, filepath.Dir(folder)); err != nil {
		return err
	}
	err := root.Mkdir(folder, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return syncFolder(root, filepath.Dir(folder))
}

func syncFolder(root *os.Root, folder string) error {
	f, err := root.Open(folder)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// open opens an object for reading and describes it.
func (b *LocalBucket) open(ctx context.Context, op, key string) (*localObject, ObjectInfo, error) {
	if err := CheckKey(key); err != nil {
		return nil, ObjectInfo{}, err
	}
	root, err := b.root(ctx, op, key)
	if err != nil {
		return nil, ObjectInfo{}, err
	}
	defer func() { _ = root.Close() }() // only a handle; nothing is written through it
	name := filepath.FromSlash(key)
	// Opening a pipe or a device could block or do harm; only then does the kind of file matter.
	if info, err := root.Stat(name); err == nil && !info.Mode().IsRegular() {
		return nil, ObjectInfo{}, fmt.Errorf("%s %s: not a regular file", op, key)
	}
	f, err := root.Open(name)
	if err != nil {
		return nil, ObjectInfo{}, b.hide(fmt.Errorf("%s %s: %w", op, key, err))
	}
	info, err := f.Stat()
	if err != nil {
		return nil, ObjectInfo{}, b.hide(errors.Join(fmt.Errorf("%s %s: %w", op, key, err), f.Close()))
	}
	return &localObject{f, b}, describe(key, info), nil
}

// localObject is an open object.
type localObject struct {
	file   *os.File
	bucket *LocalBucket
}

func (o *localObject) Read(p []byte) (int, error) {
	n, err := o.file.Read(p)
	return n, o.hide(err)
}

func (o *localObject) ReadAt(p []byte, off int64) (int, error) {
	n, err := o.file.ReadAt(p, off)
	return n, o.hide(err)
}

func (o *localObject) Close() error { return o.bucket.hide(o.file.Close()) }

// hide leaves io.EOF as it is: readers compare it.
func (o *localObject) hide(err error) error {
	if err == io.EOF { //nolint:errorlint // package os returns it unwrapped
		return err
	}
	return o.bucket.hide(err)
}

func describe(key string, info fs.FileInfo) ObjectInfo {
	return ObjectInfo{
		Key:       key,
		SizeBytes: info.Size(),
		Version:   fmt.Sprintf("%x-%x", info.ModTime().UnixNano(), info.Size()),
	}
}

// Get implements [Bucket].
func (b *LocalBucket) Get(ctx context.Context, key string) (io.ReadCloser, ObjectInfo, error) {
	f, info, err := b.open(ctx, "get", key)
	if err != nil {
		return nil, ObjectInfo{}, err
	}
	return struct {
		io.Reader
		io.Closer
	}{&contextReader{ctx, f}, f}, info, nil
}

// GetRange implements [Bucket].
func (b *LocalBucket) GetRange(ctx context.Context, key, version string, off, n int64) ([]byte, error) {
	f, info, err := b.open(ctx, "get range of", key)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read from
	if version != "" && info.Version != version {
		return nil, fmt.Errorf("get range of %s: %w", key, ErrChanged)
	}
	if off < 0 || n < 0 || off > info.SizeBytes-n {
		return nil, fmt.Errorf("get range of %s: %d bytes at %d of %d: %w", key, n, off, info.SizeBytes, io.ErrUnexpectedEOF)
	}
	data := make([]byte, n)
	if _, err := f.ReadAt(data, off); err != nil {
		return nil, fmt.Errorf("get range of %s: %w", key, err)
	}
	return data, nil
}

// Open implements [Opener].
func (b *LocalBucket) Open(ctx context.Context, key, version string) (ObjectReader, error) {
	f, info, err := b.open(ctx, "open", key)
	if err != nil {
		return nil, err
	}
	if version != "" && info.Version != version {
		return nil, errors.Join(fmt.Errorf("open %s: %w", key, ErrChanged), f.Close())
	}
	return f, nil
}

// Head implements [Bucket].
func (b *LocalBucket) Head(ctx context.Context, key string) (ObjectInfo, error) {
	f, info, err := b.open(ctx, "head", key)
	if err != nil {
		return ObjectInfo{}, err
	}
	return info, f.Close()
}

// List implements [Bucket].
func (b *LocalBucket) List(ctx context.Context, prefix string) ([]ObjectInfo, error) {
	root, err := b.root(ctx, "list", prefix)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }() // only a handle; nothing is written through it
	var objects []ObjectInfo
	err = fs.WalkDir(root.FS(), ".", func(key string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // removed while walking
			return nil
		case err != nil:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case key == ".":
			return nil
		case entry.IsDir():
			if inside := key + "/"; !strings.HasPrefix(inside, prefix) && !strings.HasPrefix(prefix, inside) {
				return fs.SkipDir
			}
			return nil
		case !entry.Type().IsRegular(), !strings.HasPrefix(key, prefix), strings.HasPrefix(path.Base(key), tempPrefix):
			return nil
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		objects = append(objects, describe(key, info))
		return nil
	})
	if err != nil {
		return nil, b.hide(fmt.Errorf("list %s: %w", prefix, err))
	}
	// The walk goes folder by folder, so "a/x" comes before "a-b"; keys are ordered as bytes.
	slices.SortFunc(objects, func(a, b ObjectInfo) int { return strings.Compare(a.Key, b.Key) })
	return objects, nil
}

// Delete implements [Bucket].
func (b *LocalBucket) Delete(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	root, err := b.root(ctx, "delete", key)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // only a handle; nothing is written through it
	name := filepath.FromSlash(key)
	folder, leftover := filepath.Dir(name), tempPrefix+filepath.Base(name)+"-"
	entries, err := fs.ReadDir(root.FS(), filepath.ToSlash(folder))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return b.hide(fmt.Errorf("delete %s: %w", key, err))
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), leftover) {
			err = errors.Join(err, ignoreMissing(root.Remove(filepath.Join(folder, entry.Name()))))
		}
	}
	err = errors.Join(err, ignoreMissing(root.Remove(name)))
	if err == nil {
		err = syncFolder(root, folder)
	}
	if err != nil {
		return b.hide(fmt.Errorf("delete %s: %w", key, err))
	}
	return nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// contextReader ends a long copy when its context ends.
type contextReader struct {
	ctx context.Context //nolint:containedctx // lives for one call
	r   io.Reader
}

func (r *contextReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}
