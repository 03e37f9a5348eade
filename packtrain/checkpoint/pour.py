"""One image from a buffer into a new file: each byte is read once, checksummed, hashed and written.

The bytes whose checksums are taken are the bytes that are written, whatever the buffer's owner does meanwhile: a chunk
is copied first. Hashing goes in order and holds its thread; copies, checksums and writes run beside it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.core.bulk import Image, aligned
from packtrain.core.platform import Platform

CHUNK_BYTES = 4 * fmt.BLOCK_BYTES
WRITERS = 2


class Poured(NamedTuple):
    """What was written: SHA-256 of all of it, crc32c of each block."""

    sha256: str
    crcs: list[int]


Read = Callable[[int, memoryview], None]
"""Fill the view with the bytes from that offset on, or raise."""


def pour(platform: Platform, read: Read, target: str, size: int, check: Callable[[], None]) -> Poured:
    """Write a new file of `size` bytes, durable when this returns. `check` is called before each chunk and may raise.

    `read` is called by one thread at a time, in order. Raises OSError of the target, and whatever `read` and `check`
    raise; no thread works on the file any more then.
    """
    digest, crcs = hashlib.sha256(), [0] * fmt.block_count(size, fmt.BLOCK_BYTES)
    with platform.create_image(target, size) as image, platform.crew(1 + WRITERS) as crew, _Ring(size) as ring:

        def copy_from(offset: int) -> memoryview:
            check()
            chunk = ring.next(min(CHUNK_BYTES, size - offset))
            ring.lend(crew.start(partial(read, offset, chunk)))
            return chunk

        coming = copy_from(0) if size else memoryview(b"")
        for offset in range(0, size, CHUNK_BYTES):
            chunk = coming
            ring.take_back()
            ring.lend(crew.start(_written(image, offset, chunk, crcs)))
            if offset + CHUNK_BYTES < size:
                coming = copy_from(offset + CHUNK_BYTES)
            digest.update(chunk)
        ring.wait()
        image.fsync()
    return Poured(digest.hexdigest(), crcs)


class _Ring:
    """A few buffers that go round: filled, written by somebody, filled again."""

    def __init__(self, size: int) -> None:
        self._free = deque(aligned(min(CHUNK_BYTES, max(size, 1))) for _ in range(WRITERS + 1))
        self._lent: deque[Callable[[], None]] = deque()

    def next(self, size: int) -> memoryview:
        """The first `size` bytes of one that nobody uses. Raises what went wrong with the one it waited for."""
        if len(self._lent) == len(self._free):
            self._lent.popleft()()
        self._free.rotate(-1)
        return self._free[-1][:size]

    def lend(self, wait: Callable[[], None]) -> None:
        """The last one given is in use until `wait` returns."""
        self._lent.append(wait)

    def take_back(self) -> None:
        """The one lent last, when its user is done. Raises what went wrong with it."""
        self._lent.pop()()

    def wait(self) -> None:
        while self._lent:
            self._lent.popleft()()

    def __enter__(self) -> _Ring:
        return self

    def __exit__(self, *exc: object) -> None:
        """Whatever happened, nobody uses a buffer or the file behind it any more: its descriptor may be closed."""
        while self._lent:
            with suppress(Exception):
                self._lent.popleft()()


def _written(image: Image, offset: int, chunk: memoryview, crcs: list[int]) -> Callable[[], None]:
    def work() -> None:
        data = np.frombuffer(chunk, np.uint8)
        for at in range(0, len(chunk), fmt.BLOCK_BYTES):
            crcs[(offset + at) // fmt.BLOCK_BYTES] = fmt.crc32c(data[at : at + fmt.BLOCK_BYTES])
        image.write_at(offset, chunk)

    return work
