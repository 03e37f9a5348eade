"""Places where named bytes lie: a folder, or a bucket of an object store. One interface, so that what copies bytes
between tiers, clusters and providers never asks which kind it has.

Every operation ends by a deadline of ours, whatever the store does, and tells "there is no such name" apart from
everything else: an unmounted disk, a missing bucket or a proxy's 404 must never look like an empty store.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from packtrain.core.errors import BadValue, NameAbsent, NameTaken, StoreHeld, StoreRefused, StoreUnreachable
from packtrain.core.platform import File, Lock, Platform

PAGE_NAMES_MAX = 1000
TEMP = ".new-"
"""How the last part of a name begins that is not whole yet: no listing shows it, and nobody can ask for it."""
HOLD_TRIES = 3
_PART = re.compile(r"[A-Za-z0-9._=@+,-]{1,200}")
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTSUP, errno.EXDEV, errno.ELOOP)


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a store is and how to get in. Credentials are references, so this may stand in any spec or journal."""

    url: str
    """A path, `file:///path`, `s3://bucket/prefix`, `gs://...`, `az://container/prefix`, or `memory://` for tests."""
    endpoint: str = ""
    """`http(s)://host:port` of a store that is not its inventor's own."""
    region: str = ""
    key_id: str = ""
    """`env:NAME` or `file:PATH` of the access key id (s3) or the account (az). Empty: what the machine offers."""
    secret: str = ""
    """`env:NAME` or `file:PATH` of the secret key (s3), the account key (az) or the service account's JSON (gs)."""
    deadline_s: float = 30.0
    """After which an operation that moves no bulk is given up."""
    bytes_per_s_min: float = 256 * 1024.0
    """Bulk gets so much longer: a store slower than this is as good as gone."""


class Page(NamedTuple):
    """Some names with their sizes, in the store's order; `after`: hand it in for the next page, "" when it was the
    last."""

    names: tuple[tuple[str, int], ...]
    after: str


class Upload(ABC):
    """One large object on its way into a store, chunk by chunk: whole after `finish`, not visible at all before.

    Every call but `leave` may raise UploadLost: what has arrived is gone, and only another upload helps.
    Who begins one ends it with `finish` or `leave`.
    """

    in_order: bool
    """Chunks must come one after the other, from the first: this kind cannot resume inside an object."""
    shows: bool
    """It can be looked at before it is finished."""

    @abstractmethod
    def has(self, index: int, is_good: Callable[[bytes], bool]) -> bool:
        """Whether an earlier process left that chunk here; `is_good` judges its bytes where the kind shows them."""

    @abstractmethod
    def put(self, index: int, data: bytes) -> int:
        """How often it had to be sent until the store took it as it was. Safe from several threads where `in_order` is
        False; the same chunk may be put again."""

    def look(self, index: int) -> bytes:
        """What the store holds for that chunk, read back; only where it `shows`."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, replace: bool) -> None:
        """Make it visible under its name. Without `replace` NameTaken where the name is found taken."""

    def leave(self) -> None:
        """Go no further, now or when a `put` under way comes back; what has arrived stays for the next. Again: nothing.
        """
        return


DAMAGED_ON_THE_WAY = ("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "Md5Mismatch", "RequestTimeout")
"""What S3 and Azure call a request that did not arrive as it was sent: to be sent again."""


class Plan(NamedTuple):
    """How an object is cut: every chunk has `chunk_bytes` but the last."""

    name: str
    size: int
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        return max(1, -(-self.size // self.chunk_bytes))

    def span(self, index: int) -> tuple[int, int]:
        """(offset, size) of a chunk; an empty object has one of no bytes."""
        offset = index * self.chunk_bytes
        return offset, min(self.chunk_bytes, self.size - offset)


class Store(ABC):
    """Named bytes. Names are relative, like `checkpoints/step-1/part-r0.json`. Safe to use from several threads.

    Raises NameAbsent, NameTaken, StoreRefused, StoreUnreachable, where that is said StoreHeld, and nothing else.
    """

    url: str
    """For people and messages; holds no secret."""

    @abstractmethod
    def size(self, name: str) -> int: ...

    @abstractmethod
    def read(self, name: str, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size); fewer, or none, where the object ends before."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Create a small object that must not exist, durable afterwards.

        NameTaken: it exists; StoreUnreachable: it may have been created, so read it to learn whose it is.
        """

    @abstractmethod
    def upload(self, plan: Plan) -> Upload:
        """Begin a large object, or go on with one that an earlier process began with an equal plan.

        StoreHeld: somebody else is writing that name just now. A folder can tell, a bucket cannot.
        """

    @abstractmethod
    def list(self, prefix: str, after: str = "") -> Page:
        """At most PAGE_NAMES_MAX names under the folder `prefix` ("": all), those behind `after`."""

    @abstractmethod
    def erase(self, name: str) -> None:
        """Delete; no error when it is gone. Only purge.py may call this, and who made the name itself."""

    def settle(self, name: str) -> None:
        """Make a name that was found there as durable as one that was just created: what a killed process left may not
        be. A bucket answers with nothing that is not durable."""
        return

    def exists(self, name: str) -> bool:
        """False only where the store itself says that there is no such name."""
        try:
            self.size(name)
        except NameAbsent:
            return False
        return True

    def list_all(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Every (name, size) under a folder, page by page."""
        page = self.list(prefix)
        yield from page.names
        while page.after:
            page = self.list(prefix, page.after)
            yield from page.names


def check_name(name: str, where: str) -> str:
    """The name itself, where both kinds can hold it and it leads out of nothing; StoreRefused otherwise."""
    parts = name.split("/")
    bad = [part for part in parts if not _PART.fullmatch(part) or part in (".", "..")]
    if bad or parts[-1].startswith(TEMP) or len(name) > 1000:
        raise StoreRefused(
            f"{name!r} is no name for something in a store", where=where,
            fix="use letters, digits and ._=@+,- in parts of at most 200 characters with / between them",
        )
    return name


def require_free(store: Store, name: str) -> None:
    """NameTaken where `name` exists: a look before large objects, which no store creates exclusively part by part."""
    if store.exists(name):
        raise NameTaken("this name is taken", where=f"{store.url} {name}", fix="choose another name")


def secret_of(platform: Platform, reference: str) -> str:
    """What `env:NAME` or `file:PATH` refers to, without surrounding space; "" for "". Raises BadValue naming the
    reference, never what it holds."""
    kind, _, at = reference.partition(":")
    if not reference:
        return ""
    if kind == "env" and at:
        found = os.environ.get(at, "")
    elif kind == "file" and at:
        found = _file_secret(platform, at)
    else:  # it may be the secret itself: not repeated
        raise BadValue("a secret is given by reference", where="store", fix="write env:NAME or file:PATH")
    if not found.strip():
        raise BadValue(f"{reference} holds nothing", where="store", fix="set it, or leave the reference out")
    return found.strip()


def _file_secret(platform: Platform, path: str) -> str:
    try:
        return platform.read(path, 0, 1 << 16).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(f"file:{path} cannot be read", where="store", fix="see that the file is there") from error


def open_store(platform: Platform, config: StoreConfig) -> Store:
    """The store at `config.url`; nothing is asked of it yet. Raises BadValue, StoreRefused."""
    scheme, found, rest = config.url.partition("://")
    if not found or scheme == "file":
        return Folder(platform, _folder_named(rest if found else config.url))
    from packtrain.core.objects import open_objects  # only who has a bucket pays for importing its client

    return open_objects(platform, config)


def _folder_named(path: str) -> str:
    if path:
        return path
    raise BadValue("a store without a path", where="store", fix="give the path of a folder that exists")


# --- a folder ----------------------------------------------------------------------------------------


class Folder(Store):
    """A folder of any file system with hard links. What is created is fsynced, and so is its folder.

    A file system that hangs keeps the calling thread: no deadline helps against that inside a process, so bulk work
    on folders belongs into a process that can be abandoned (the carrier).
    """

    def __init__(self, platform: Platform, root: str) -> None:
        self._platform = platform
        self._root = root.rstrip("/") or "/"
        self.url = self._root

    def size(self, name: str) -> int:
        path = self._path(name)
        with _explained(self, path):
            return self._platform.size(path)

    def read(self, name: str, offset: int, size: int) -> bytes:
        path = self._path(name)
        with _explained(self, path):
            return self._platform.read(path, offset, size)

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name)
        temp = _temp(path, self._platform.token())
        try:
            with _explained(self, path):
                self._make_parent(path)
                self._platform.write_new(temp, data)
                self._platform.link(temp, path)
                self.sync_parents(path)
        finally:
            with suppress(OSError):
                self._platform.unlink(temp)

    def upload(self, plan: Plan) -> Upload:
        path = self._path(plan.name)
        with _explained(self, path):
            self._make_parent(path)
            return _FileUpload(self, self._platform, path, plan)

    def list(self, prefix: str, after: str = "") -> Page:
        top = self._path(prefix) if prefix else self._root
        try:
            with _explained(self, top):
                found = sorted(self._walk(top, prefix, after))
        except NameAbsent:
            found = []
        names = tuple(found[:PAGE_NAMES_MAX])
        return Page(names, names[-1][0] if len(found) > PAGE_NAMES_MAX else "")

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[tuple[str, int]]:
        for part in self._platform.listdir(folder):
            path, name = f"{folder}/{part}", f"{prefix}/{part}" if prefix else part
            if self._platform.is_dir(path):
                yield from self._walk(path, name, after)
            elif name > after and not part.startswith(TEMP):
                with suppress(FileNotFoundError):  # gone since it was listed
                    yield name, self._platform.size(path)

    def settle(self, name: str) -> None:
        path = self._path(name)
        with _explained(self, path):
            self.sync_parents(path)

    def erase(self, name: str) -> None:
        path = self._path(name)
        with suppress(NameAbsent), _explained(self, path):
            self._platform.unlink(path)
            self._platform.fsync_dir(posixpath.dirname(path))

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, check_name(name, self.url))

    def _make_parent(self, path: str) -> None:
        """The root itself is never made here: where it is missing, a disk is not mounted."""
        if not self._platform.is_dir(self._root):
            raise self._no_folder()
        self._platform.mkdir(posixpath.dirname(path))

    def sync_parents(self, path: str) -> None:
        """The name and every folder above it that may be new."""
        folder = path
        while folder != self._root:
            folder = posixpath.dirname(folder)
            self._platform.fsync_dir(folder)

    def explain(self, error: OSError, path: str) -> NameAbsent | NameTaken | StoreRefused | StoreUnreachable:
        if isinstance(error, FileExistsError):
            return NameTaken("this name is taken", where=path, fix="choose another name")
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return self._absence(path)
        if error.errno in _REFUSED:
            return StoreRefused(f"the folder refuses: {error.strerror}", where=path, fix="see who may write there")
        return StoreUnreachable(
            f"the disk refuses just now: {error}", where=path,
            fix="see that it is there, writable and not full; then try again",
        )

    def _absence(self, path: str) -> NameAbsent | StoreRefused | StoreUnreachable:
        """A name is absent only where the store's own folder is present."""
        try:
            present = self._platform.is_dir(self._root)
        except OSError:
            present = False
        if present:
            return NameAbsent("there is no such name", where=path, fix="see what is there with `packtrain ckpt ls`")
        return self._no_folder()

    def _no_folder(self) -> StoreRefused | StoreUnreachable:
        """What is missing may come back with its disk; a file in its place will not give way."""
        with suppress(OSError):
            if self._platform.exists(self._root):
                return StoreRefused("this is a file, not a folder", where=self._root, fix="give the path of a folder")
        return StoreUnreachable("this folder is not there", where=self._root, fix="mount the disk, or make it")


class _FileUpload(Upload):
    """Chunks are written into place in a temporary file beside the target, whose content tells what it has already.

    A lock beside it keeps others out from beginning to end: they would have the very file open that is renamed to the
    target, and write into it afterwards.
    """

    in_order, shows = False, True

    def __init__(self, folder: Folder, platform: Platform, path: str, plan: Plan) -> None:
        self._folder, self._platform, self._path, self._plan = folder, platform, path, plan
        self._temp = _temp(path, f"{plan.size}-{plan.chunk_bytes}")
        self._use = threading.Lock()
        self._users = 1
        """Calls under way, and the owner until it leaves."""
        self._left = False
        self._hold = _Hold(platform, path)
        try:
            self._file = self._open()
        except BaseException:
            self._hold.release()
            raise

    def _open(self) -> File:
        try:
            return self._platform.create(self._temp)
        except FileExistsError:
            return self._platform.reopen(self._temp)

    def has(self, index: int, is_good: Callable[[bytes], bool]) -> bool:
        return is_good(self.look(index))

    def put(self, index: int, data: bytes) -> int:
        with self._used(), _explained(self._folder, self._path):
            self._file.write_at(self._plan.span(index)[0], data)
        return 1

    def look(self, index: int) -> bytes:
        with _explained(self._folder, self._path):
            return self._platform.read(self._temp, *self._plan.span(index))

    def finish(self, replace: bool) -> None:
        try:
            with _explained(self._folder, self._path):
                self._sync()
                if not replace:
                    require_free(self._folder, self._plan.name)
                self._platform.replace(self._temp, self._path)
                self._folder.sync_parents(self._path)
        finally:
            self.leave()

    def _sync(self) -> None:
        """Where fsync fails nothing of the file is believed: Linux tells of bytes that never reached the disk once, to
        one descriptor, and goes on to show them from its cache. The next process begins anew.

        A disk that cannot even unlink any more forgets its cache before it is written again.
        """
        try:
            self._file.fsync()
        except OSError:
            with suppress(OSError):
                self._platform.unlink(self._temp)
            raise

    def leave(self) -> None:
        with self._use:
            again, self._left = self._left, True
        if not again:
            self._end_use()

    @contextmanager
    def _used(self) -> Iterator[None]:
        with self._use:
            if not self._users:
                raise StoreUnreachable("this upload was left", where=self._path, fix="begin it again")
            self._users += 1
        try:
            yield
        finally:
            self._end_use()

    def _end_use(self) -> None:
        """The last one out closes: a descriptor in use may not become another file's, nor the name another copier's."""
        with self._use:
            self._users -= 1
            last = not self._users
        if last:
            self._file.close()
            self._hold.release()


class _Hold:
    """A name of a folder that one process at a time writes to. Raises StoreHeld, OSError. A kill ends it."""

    def __init__(self, platform: Platform, path: str) -> None:
        self._platform, self._path = platform, _temp(path, "lock")
        self._lock = self._take(f"process {os.getpid()} on {platform.node()} ({platform.token()})")

    def _take(self, note: str) -> Lock:
        for _ in range(HOLD_TRIES):
            lock = self._platform.lock(self._path, note)
            if lock is None:
                break
            if self._note() == note:
                return lock
            lock.release()  # of a file whose name was taken away meanwhile, so it keeps nobody out
        raise StoreHeld(
            f"{self._note() or 'somebody'} is writing it", where=self._path,
            fix="let it end, then give the same command",
        )

    def _note(self) -> str:
        """What the file under the lock's name says, fit for a screen."""
        try:
            text = self._platform.read(self._path, 0, 200).decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "".join(c for c in text if c.isprintable())

    def release(self) -> None:
        """The name goes first, while nobody else can hold it."""
        with suppress(OSError):
            self._platform.unlink(self._path)
        self._lock.release()


@contextmanager
def _explained(folder: Folder, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise folder.explain(error, path) from error


def _temp(path: str, tag: str) -> str:
    """Beside the target, so on the same file system."""
    return f"{posixpath.dirname(path)}/{TEMP}{tag}-{posixpath.basename(path)}"
