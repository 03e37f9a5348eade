"""A disk in memory that forgets what was not synced: files and directories as POSIX lets a power cut leave them.

File *content* is durable up to its last fsync. A directory *entry* (created, linked, renamed, removed) is durable once
its directory was fsynced; until then each change may survive a power cut or not, independently of the others, which is
more than journalling file systems do and exactly what POSIX promises. Errors are the errnos Linux gives.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from packtrain.core.fake_schedule import Choices, FakeClock

WALL_START_S = 1_750_000_000
UNDO_KEPT = 8
NAME_BYTES_MAX = 255


Kind = Literal[
    "fail", "crash", "power_cut", "delay", "lost_reply", "tear", "stale", "duplicate", "late", "lose", "later"
]


@dataclass(frozen=True, slots=True)
class Fault:
    """What strikes one operation. Build it with the functions below."""

    kind: Kind
    errno: int = errno.EIO
    seconds: float = 0.0
    share: float = 0.5
    after: int = 0
    then: Literal["fail", "crash", "power_cut"] = "fail"


def fail(code: int = errno.EIO) -> Fault:
    """Not done; raises OSError."""
    return Fault("fail", errno=code)


def crash() -> Fault:
    """The process dies before the operation; what it did before stays in the kernel (kill -9)."""
    return Fault("crash")


def power_cut() -> Fault:
    """Every process on this disk dies before the operation; `FakeDisk.after_power_cut` says what is left."""
    return Fault("power_cut")


def delay(seconds: float) -> Fault:
    """Done, after `seconds` of virtual time."""
    return Fault("delay", seconds=seconds)


def lost_reply(code: int = errno.EIO) -> Fault:
    """Done, but raises OSError."""
    return Fault("lost_reply", errno=code)


def tear(share: float = 0.5, then: Literal["fail", "crash", "power_cut"] = "fail", code: int = errno.EIO) -> Fault:
    """A write (or send) does its first `share`, then fails or dies. Other operations are not done."""
    return Fault("tear", share=share, then=then, errno=code)


def stale(changes: int = 1) -> Fault:
    """A listing or lookup shows the directory as it was `changes` changes ago (a network file system's cache)."""
    return Fault("stale", after=changes)


def duplicate(after: int = 0) -> Fault:
    """Done twice (a retransmitted request): at once, the caller sees the second result; or `after` operations on."""
    return Fault("duplicate", after=after)


def late(after: int = 1, code: int = errno.ETIMEDOUT) -> Fault:
    """Raises OSError now and is done `after` operations later, when the caller no longer expects it."""
    return Fault("late", after=after, errno=code)


def lose() -> Fault:
    """Not done, yet reported as done: a lost message, an fsync that lies. Only where nothing is returned."""
    return Fault("lose")


def later(after: int = 1, seconds: float = 0.0) -> Fault:
    """Reported as done, done `after` operations (or `seconds`) later: messages overtake each other."""
    return Fault("later", after=after, seconds=seconds)


class FileNode:
    """An inode: content, how much of it is durable, how many names it has."""

    __slots__ = ("data", "links", "listener", "modified_ns", "synced")

    def __init__(self, now_ns: int, data: bytes = b"", synced: int = 0) -> None:
        self.data = bytearray(data)
        self.synced = synced
        self.links = 0
        self.modified_ns = now_ns
        self.listener: Any = None
        """What is bound here when this is a unix socket."""


class DirNode:
    """A directory: entries as seen now, as durable, and the last few changes for stale views."""

    __slots__ = ("modified_ns", "names", "synced", "undo")

    def __init__(self, now_ns: int) -> None:
        self.names: dict[str, FileNode | DirNode] = {}
        self.synced: dict[str, FileNode | DirNode] = {}
        self.undo: deque[tuple[str, FileNode | DirNode | None]] = deque(maxlen=UNDO_KEPT)
        self.modified_ns = now_ns

    def seen(self, changes_ago: int) -> dict[str, FileNode | DirNode]:
        """The entries as they were `changes_ago` changes before now."""
        if not changes_ago:
            return self.names
        names: dict[str, FileNode | DirNode | None] = dict(self.names)
        for name, node in list(reversed(self.undo))[:changes_ago]:
            names[name] = node
        return {name: node for name, node in names.items() if node is not None}


Node = FileNode | DirNode
Change = tuple[DirNode, str, Node | None]


def os_error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


@lru_cache(maxsize=4096)
def full(path: str) -> str:
    """`path` seen from the root, which is where fake processes stand."""
    return posixpath.normpath(posixpath.join("/", path))


@dataclass
class FakeDisk:
    """One disk, shared by the processes (`FakePlatform`) that stand on it.

    It has no lock of its own: one thread at a time, which is what a `Baton` sees to.
    """

    seed: object = 0
    capacity_bytes: int = 1 << 40
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.root = DirNode(0)
        self.root.names["tmp"] = self.root.synced["tmp"] = DirNode(0)
        self.dark = False
        """After a power cut: every process on it is dead."""
        self.operations = 0
        self.trace: list[tuple[str, str, str]] = []
        """(process, operation, path) of everything done, in order."""
        self.boots: dict[str, int] = {}
        self.booted_ns = 0
        """When the nodes around it were switched on."""
        self.processes = 0
        self.locks: dict[FileNode, Any] = {}
        self.used_bytes = 0
        self._pending: list[list[Change]] = []
        self._later: list[tuple[int, Callable[[], object]]] = []

    # --- names ---

    def find(self, path: str, changes_ago: int = 0) -> Node:
        """The node at `path`; ENOENT or ENOTDIR otherwise."""
        if full(path) == "/":
            return self.root
        folder, name = self.parent(path)
        node = _entry(folder.seen(changes_ago), name, path)
        if node is None:
            raise os_error(errno.ENOENT, path)
        return node

    def parent(self, path: str) -> tuple[DirNode, str]:
        """The directory `path` lies in and its last name."""
        *folders, name = full(path).strip("/").split("/")
        here: Node = self.root
        for part in folders:
            if not isinstance(here, DirNode):
                raise os_error(errno.ENOTDIR, path)
            node = _entry(here.names, part, path)
            if node is None:
                raise os_error(errno.ENOENT, path)
            here = node
        if not isinstance(here, DirNode):
            raise os_error(errno.ENOTDIR, path)
        return here, name

    def find_dir(self, path: str, changes_ago: int = 0) -> DirNode:
        node = self.find(path, changes_ago)
        if not isinstance(node, DirNode):
            raise os_error(errno.ENOTDIR, path)
        return node

    def find_file(self, path: str, changes_ago: int = 0) -> FileNode:
        node = self.find(path, changes_ago)
        if isinstance(node, DirNode):
            raise os_error(errno.EISDIR, path)
        return node

    # --- changes of names ---

    def mkdir(self, path: str) -> None:
        here = "/"
        for part in full(path).strip("/").split("/"):
            here = posixpath.join(here, part)
            folder, name = self.parent(here)
            node = _entry(folder.names, name, path)
            if node is None:
                self._change((folder, name, DirNode(self.clock.now_ns)))
            elif isinstance(node, FileNode):
                raise os_error(errno.EEXIST if here == full(path) else errno.ENOTDIR, path)

    def mkdir_new(self, path: str) -> None:
        folder, name = self.parent(path)
        if _entry(folder.names, name, path) is not None:
            raise os_error(errno.EEXIST, path)
        self._change((folder, name, DirNode(self.clock.now_ns)))

    def create(self, path: str) -> FileNode:
        folder, name = self.parent(path)
        if _entry(folder.names, name, path) is not None:
            raise os_error(errno.EEXIST, path)
        node = FileNode(self.clock.now_ns)
        self._change((folder, name, node))
        return node

    def link(self, source: str, target: str) -> None:
        node = self.find(source)
        folder, name = self.parent(target)
        if _entry(folder.names, name, target) is not None:
            raise os_error(errno.EEXIST, target)
        if isinstance(node, DirNode):
            raise os_error(errno.EPERM, source)
        self._change((folder, name, node))

    def replace(self, source: str, target: str) -> None:
        from_folder, from_name = self.parent(source)
        to_folder, to_name = self.parent(target)
        node = _entry(from_folder.names, from_name, source)
        if node is None:
            raise os_error(errno.ENOENT, source)
        old = _entry(to_folder.names, to_name, target)
        if isinstance(node, DirNode) and (full(target) + "/").startswith(full(source) + "/") and node is not old:
            raise os_error(errno.EINVAL, target)
        if isinstance(old, DirNode) and (full(source) + "/").startswith(full(target) + "/") and node is not old:
            raise os_error(errno.ENOTEMPTY, target)
        if node is old:
            return
        self._check_replaceable(node, old, target)
        self._change((from_folder, from_name, None), (to_folder, to_name, node))

    @staticmethod
    def _check_replaceable(node: Node, old: Node | None, target: str) -> None:
        if old is None:
            return
        if isinstance(old, FileNode):
            if isinstance(node, DirNode):
                raise os_error(errno.ENOTDIR, target)
        elif isinstance(node, FileNode):
            raise os_error(errno.EISDIR, target)
        elif old.names:
            raise os_error(errno.ENOTEMPTY, target)

    def remove_file(self, path: str) -> None:
        self.find_file(path)
        folder, name = self.parent(path)
        self._change((folder, name, None))

    def remove_dir(self, path: str) -> None:
        if self.find_dir(path).names:
            raise os_error(errno.ENOTEMPTY, path)
        folder, name = self.parent(path)
        self._change((folder, name, None))

    def _change(self, *changes: Change) -> None:
        """One atomic change of names; pending until a directory it touches is fsynced."""
        for folder, name, node in changes:
            old = folder.names.get(name)
            folder.undo.append((name, old))
            folder.modified_ns = self.clock.now_ns
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
            self._count_links(node, old)
        self._pending.append(list(changes))

    def _count_links(self, node: Node | None, old: Node | None) -> None:
        if isinstance(node, FileNode):
            self.used_bytes += 0 if node.links else len(node.data)
            node.links += 1
        if isinstance(old, FileNode):
            old.links -= 1
            self.used_bytes -= 0 if old.links else len(old.data)

    def fsync_dir(self, path: str) -> None:
        folder = self.find_dir(path)
        keys: set[tuple[int, str]] = set()
        kept: list[list[Change]] = []
        durable: list[list[Change]] = []
        for changes in reversed(self._pending):
            mine = {(id(where), name) for where, name, _ in changes}
            if any(where is folder for where, _, _ in changes) or mine & keys:
                keys |= mine
                durable.append(changes)
            else:
                kept.append(changes)
        self._pending = kept[::-1]
        for changes in reversed(durable):
            _apply(changes)

    # --- content ---

    def append(self, node: FileNode, data: bytes, path: str) -> None:
        """ENOSPC after what fits, as write(2) does it."""
        fits = data[: max(0, self.capacity_bytes - self.used_bytes)]
        node.data += fits
        node.modified_ns = self.clock.now_ns
        self.used_bytes += len(fits) if node.links else 0
        if len(fits) < len(data):
            raise os_error(errno.ENOSPC, path)

    def write_at(self, node: FileNode, offset: int, data: bytes, path: str) -> None:
        """From `offset` on nothing counts as synced any more: a power cut may leave it old, new or torn."""
        if not data:
            return
        size = len(node.data)
        if max(0, offset + len(data) - size) > self.capacity_bytes - self.used_bytes:
            raise os_error(errno.ENOSPC, path)
        node.data[size:] = bytes(max(0, offset - size))
        node.data[offset : offset + len(data)] = data
        node.synced = min(node.synced, offset)
        node.modified_ns = self.clock.now_ns
        self.used_bytes += (len(node.data) - size) if node.links else 0

    def overwrite(self, node: FileNode, data: bytes) -> None:
        self.used_bytes += (len(data) - len(node.data)) if node.links else 0
        node.data[:] = data
        node.synced = 0
        node.modified_ns = self.clock.now_ns

    def touch(self, path: str) -> None:
        self.find_file(path).modified_ns = self.clock.now_ns

    def resize(self, node: FileNode, size: int, path: str) -> None:
        """Longer by zeros, which take room at once, or shorter."""
        more = size - len(node.data)
        if more > self.capacity_bytes - self.used_bytes:
            raise os_error(errno.ENOSPC, path)
        node.data[size:] = bytes(max(0, more))
        node.synced = min(node.synced, size)
        self.used_bytes += more if node.links else 0

    # --- later, and the end of the world ---

    def defer(self, operations: int, do: Callable[[], object]) -> None:
        """Do it before the operation that many operations from now; its errors go nowhere."""
        self._later.append((self.operations + operations, do))

    def run_deferred(self, all_of_them: bool = False) -> None:
        if not self._later:
            return
        due = [do for when, do in self._later if all_of_them or when < self.operations]
        self._later = [item for item in self._later if not all_of_them and item[0] >= self.operations]
        for do in due:
            try:
                do()
            except OSError:
                continue

    def sync_all(self) -> None:
        """Make everything durable: how a test sets the scene."""
        for changes in self._pending:
            _apply(changes)
        self._pending.clear()
        self._each_file(self.root, lambda node: setattr(node, "synced", len(node.data)))

    def _each_file(self, folder: DirNode, do: Callable[[FileNode], None]) -> None:
        for node in folder.names.values():
            if isinstance(node, DirNode):
                self._each_file(node, do)
            else:
                do(node)

    def power_off(self) -> None:
        """Every process on this disk is dead from here on."""
        self.dark = True
        self._later.clear()

    def after_power_cut(self, choices: Choices) -> FakeDisk:
        """The disk as it may be found at the next boot: each unsynced change of a name was kept or lost, each unsynced
        piece of content lost, kept, cut in the middle or turned to NULs; `choices` decides which."""
        self.power_off()
        for changes in self._pending:
            if choices.pick(2):
                _apply(changes)
        disk = FakeDisk(self.seed, self.capacity_bytes, self.clock)
        disk.booted_ns = self.clock.now_ns
        disk.boots = {name: boots + 1 for name, boots in self.boots.items()}
        disk.processes, disk.trace, disk.operations = self.processes, self.trace, self.operations
        disk.root = _revive_dir(self.root, choices, {}, self.clock.now_ns)
        disk._each_file(disk.root, disk._count_revived)
        return disk

    def _count_revived(self, node: FileNode) -> None:
        self.used_bytes += 0 if node.links else len(node.data)
        node.links += 1


def _entry(names: dict[str, Node], name: str, path: str) -> Node | None:
    """What `name` stands for; a name nothing could have is an error of its own."""
    if len(os.fsencode(name)) > NAME_BYTES_MAX:
        raise os_error(errno.ENAMETOOLONG, path)
    return names.get(name)


def _apply(changes: list[Change]) -> None:
    for folder, name, node in changes:
        if node is None:
            folder.synced.pop(name, None)
        else:
            folder.synced[name] = node


def _revive_dir(old: DirNode, choices: Choices, known: dict[int, FileNode], now_ns: int) -> DirNode:
    new = DirNode(now_ns)
    for name, node in old.synced.items():
        if isinstance(node, DirNode):
            new.names[name] = _revive_dir(node, choices, known, now_ns)
            continue
        if id(node) not in known:
            data = _revive_content(node, choices)
            known[id(node)] = FileNode(node.modified_ns, data, len(data))
        new.names[name] = known[id(node)]
    new.synced = dict(new.names)
    return new


def _revive_content(node: FileNode, choices: Choices) -> bytes:
    safe, loose = bytes(node.data[: node.synced]), bytes(node.data[node.synced :])
    if not loose:
        return safe
    outcomes = (b"", loose, loose[: len(loose) // 2], bytes(len(loose)))
    return safe + outcomes[choices.pick(len(outcomes))]
