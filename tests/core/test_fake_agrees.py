"""The fake disk does what the real one does: the same operations, results and errnos, in any order."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.platform import File, LocalPlatform, Lock, Platform

MEMORY = "/dev/shm"
"""A disk whose fsync costs nothing, where there is one."""
NAMES = ["a", "b", "d", "d/a", "d/b", "d/e", "d/e/a", "a/x", "gone/x", "n" * 300]
PATHS = st.sampled_from(NAMES)
LOCKED = ["holder", ".", "d/holder", "gone/holder"]
"""Nobody writes a lock's file otherwise: it holds the note."""
DATA = st.sampled_from([b"", b"x", b"hello world"])
OPS = st.one_of(
    st.tuples(st.sampled_from(["mkdir", "size", "exists", "is_dir", "listdir", "unlink", "rmdir", "fsync_dir"]), PATHS),
    st.tuples(st.sampled_from(["link", "replace"]), PATHS, PATHS),
    st.tuples(st.sampled_from(["write_new", "write_replacing"]), PATHS, DATA),
    st.tuples(st.just("read"), PATHS, st.integers(0, 12), st.integers(-1, 12)),
    st.tuples(st.just("create"), PATHS),
    st.tuples(st.just("append"), st.integers(0, 3), DATA),
    st.tuples(st.just("reopen"), PATHS),
    st.tuples(st.just("map_file"), PATHS, st.sampled_from([b"x", b"hello world"])),
    st.tuples(st.just("write_at"), st.integers(0, 3), st.integers(0, 20), DATA),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(st.just("lock"), st.sampled_from(LOCKED), st.sampled_from(["me", "somebody"])),
    st.tuples(st.just("release"), st.integers(0, 3)),
)


class Hands:
    """One platform, and the files and locks held open on it."""

    def __init__(self, platform: Platform, root: str) -> None:
        self.platform, self.root = platform, root
        self.files: list[File] = []
        self.locks: list[Lock] = []

    def do(self, op: str, *arguments: Any) -> Any:
        """The result, or the name of the errno."""
        try:
            return self._do(op, *arguments)
        except OSError as error:
            assert error.errno is not None
            return errno.errorcode[error.errno]

    def _do(self, op: str, *arguments: Any) -> Any:
        if op == "write_at":
            which, offset, data = arguments
            return self.files[which].write_at(offset, data) if which < len(self.files) else None
        if op in ("append", "close", "release"):
            return self._held(op, *arguments)
        paths = [f"{self.root}/{argument}" if argument in NAMES + LOCKED else argument for argument in arguments]
        if op == "map_file":
            return self._mapped(*paths)
        method: Callable[..., Any] = getattr(self.platform, op)
        result = method(*paths)
        if op in ("create", "reopen"):
            self.files.append(result)
        elif op == "lock" and result is not None:
            self.locks.append(result)
        elif op == "size" and self.platform.is_dir(paths[0]):
            return "a folder: its size is the file system's own affair"
        else:
            return result
        return "held"

    def _held(self, op: str, which: int, data: bytes = b"") -> Any:
        held: list[Any] = self.locks if op == "release" else self.files
        if which >= len(held):
            return None
        if op == "append":
            held[which].write(data)
            return held[which].fsync()
        return held[which].release() if op == "release" else held[which].close()

    def _mapped(self, path: str, data: bytes) -> None:
        mapped = self.platform.map_file(path, len(data))
        mapped.buffer[:] = data
        mapped.filled(0, len(data))

    def let_go(self) -> None:
        for file in self.files:
            file.close()
        for lock in self.locks:
            lock.release()


def tree(hands: Hands, path: str = "") -> dict[str, Any]:
    here = f"{hands.root}{path}"
    found: dict[str, Any] = {}
    for name in hands.platform.listdir(here):
        below = f"{path}/{name}"
        folder = hands.platform.is_dir(f"{hands.root}{below}")
        found[below] = tree(hands, below) if folder else hands.platform.read(f"{hands.root}{below}")
    return found


@settings(max_examples=250)
@given(st.lists(OPS, min_size=5, max_size=30))
@example([("mkdir", "d/e"), ("replace", "d", "d/e"), ("replace", "d/e", "d"), ("replace", "d", "d")])
@example([("write_new", "a", b"x"), ("link", "a", "b"), ("replace", "a", "b"), ("unlink", "a"), ("link", "b", "b")])
@example([("create", "a"), ("write_at", 0, 3, b"x"), ("append", 0, b"hello world"), ("reopen", "a"), ("close", 1)])
@example([("create", "a"), ("unlink", "a"), ("append", 0, b"x"), ("close", 0), ("append", 0, b"x"), ("link", "d", "b")])
@example([("mkdir", "d"), ("link", "d", "b"), ("write_new", "a", b"x"), ("replace", "a", "d"), ("replace", "d", "a")])
@example([("lock", "holder", "a"), ("lock", "holder", "x"), ("release", 0), ("lock", "holder", ""), ("lock", ".", "x")])
@example([("lock", "holder", "a"), ("release", 0), ("lock", "holder", "b"), ("release", 0), ("lock", "holder", "c")])
def test_same_operations_same_results(ops: list[tuple[Any, ...]]) -> None:
    """Any sequence of file operations gives the same results, errors and tree on both platforms."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as root:
        disk = FakeDisk()
        fake = Hands(FakePlatform(disk), root)
        fake.platform.mkdir(root)
        real = Hands(LocalPlatform(), root)
        try:
            for op in ops:
                assert fake.do(*op) == real.do(*op), op
            assert tree(fake) == tree(real)
        finally:
            real.let_go()
