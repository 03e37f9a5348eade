"""Writing what is large: past the page cache, by several threads, or into memory that is a file.

Direct writes (O_DIRECT) leave the page cache to the training job and tell at once when a disk is full or dead. Where a
file system refuses them the same bytes go through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

LOOK_S = 0.5
"""How often a thread that waits for work to end wakes."""
ALIGN_BYTES = 4096
"""What O_DIRECT asks of offset, length and address on every file system we know of."""


class Image(ABC):
    """A file written in places, by several threads at once."""

    @abstractmethod
    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of `data` from `offset` on or raise OSError; a hole below it reads as zeros."""

    @abstractmethod
    def fsync(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class DirectImage(Image):
    """A new file of known size on this machine's disk, direct where offset, address and size of what is written are
    aligned. The last bytes that fill no page go through the cache, by a descriptor of their own."""

    def __init__(self, path: str, size: int, mode: int) -> None:
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._cached = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
        self._direct = -1
        try:
            os.ftruncate(self._cached, size)  # writes that extend a file go one at a time on ext4 and XFS
            self._direct = _open_direct(path, flags)
        except OSError:
            self.close()
            raise

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        data = memoryview(data)
        whole = len(data) - len(data) % ALIGN_BYTES if self._direct >= 0 and offset % ALIGN_BYTES == 0 else 0
        done = _write_all(self._direct, offset, data[:whole], stop_at=errno.EINVAL) if whole else 0
        _write_all(self._cached, offset + done, data[done:])

    def fsync(self) -> None:
        os.fsync(self._cached)

    def close(self) -> None:
        for fd in (self._direct, self._cached):
            if fd >= 0:
                os.close(fd)
        self._direct = self._cached = -1


def _open_direct(path: str, flags: int) -> int:
    """-1 where the file system has no direct writes."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1


def _write_all(fd: int, offset: int, data: memoryview, stop_at: int | None = None) -> int:
    """Bytes written: all, or fewer where an error `stop_at` came."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            if error.errno != stop_at:
                raise
            break
    return done


class Mapped(ABC):
    """A file in memory that is written in place and outlives whoever writes it."""

    buffer: Any
    """Writable, as long as the file."""

    @abstractmethod
    def filled(self, start: int, stop: int) -> None:
        """Called after bytes [start, stop) were written into `buffer`: from here on they are the file's."""


class MappedFile(Mapped):
    """Mapped with mmap. Its pages are reserved when it is made: a full tmpfs is an error then, not a SIGBUS later."""

    def __init__(self, path: str, size: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            self.buffer = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def filled(self, start: int, stop: int) -> None:
        return None


def aligned(size: int) -> memoryview:
    """Memory for direct writes."""
    return memoryview(mmap.mmap(-1, size))


class Crew(ABC):
    """A few threads to hand work to."""

    @abstractmethod
    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin `work`, in any order with other work. The result waits for its end and raises what it raised."""

    @abstractmethod
    def close(self) -> None:
        """No more work comes. Does not wait: a thread in a dead file system must not hold anybody."""

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Threads(Crew):
    """Daemon threads: one that hangs does not keep its process from ending."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._run, daemon=True).start()

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def attempt() -> None:
            try:
                work()
                ended.put(None)
            except BaseException as error:
                ended.put(error)

        def wait() -> None:
            error = _taken(ended)
            if error is not None:
                raise error

        self._work.put(attempt)
        return wait

    def close(self) -> None:
        for _ in range(self._threads):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _taken(ended: queue.SimpleQueue[BaseException | None]) -> BaseException | None:
    """What comes first, waited for in turns: a Ctrl-C that finds this thread falling asleep is seen at its next look.
    """
    while True:
        with suppress(queue.Empty):
            return ended.get(timeout=LOOK_S)
