"""Flat files guarded by a crc32c per 1 MiB block: each block is checked the first time it is read, and refused by
name."""

from __future__ import annotations

import mmap
import os

import google_crc32c
import numpy as np
import numpy.typing as npt

from packtrain.core.errors import StoreDamaged
from packtrain.core.platform import Platform

BLOCK_BYTES = 1 << 20


class BlockWriter:
    """Appends to a new file and keeps the crc of each block as it goes; memory: 4 bytes a block."""

    def __init__(self, platform: Platform, path: str) -> None:
        self._file = platform.create(path)
        self._room = BLOCK_BYTES
        self._crc = 0
        self._crcs: list[int] = []
        self.bytes = 0

    def write(self, array: npt.NDArray[np.generic]) -> None:
        view = memoryview(array.tobytes())
        self._file.write(view)
        self.bytes += len(view)
        while len(view):
            part, view = view[: self._room], view[self._room :]
            self._crc = google_crc32c.extend(self._crc, bytes(part))
            self._room -= len(part)
            if self._room == 0:
                self._crcs.append(self._crc)
                self._crc, self._room = 0, BLOCK_BYTES

    def finish(self) -> npt.NDArray[np.uint32]:
        """Make it durable, close it, and return one crc a block."""
        if self._room < BLOCK_BYTES:
            self._crcs.append(self._crc)
        self._file.fsync()
        self._file.close()
        return np.array(self._crcs, dtype="<u4")


class BlockFile:
    """A memory-mapped array of `count` items of `dtype` at `path`, with the crc of each block."""

    def __init__(self, path: str, dtype: str, count: int, crcs: npt.NDArray[np.uint32]) -> None:
        self.path = path
        self._crcs = crcs
        self._checked = np.zeros(len(crcs), dtype=bool)
        self._item_bytes = np.dtype(dtype).itemsize
        expected = count * self._item_bytes
        actual = os.stat(path).st_size
        if actual != expected or len(crcs) != -(-expected // BLOCK_BYTES):
            raise StoreDamaged(
                f"the file has {actual} bytes where its card says {expected}", where=path, fix="restore it from a copy"
            )
        self._bytes = map_bytes(path)
        self._array = self._bytes.view(dtype)

    def __len__(self) -> int:
        return len(self._array)

    def read(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Items [start, stop), a read-only view; raises StoreDamaged naming the file and block that does not check."""
        assert 0 <= start <= stop <= len(self._array), (start, stop, len(self._array))
        if start < stop:
            first = start * self._item_bytes // BLOCK_BYTES
            last = (stop * self._item_bytes - 1) // BLOCK_BYTES
            if not self._checked[first : last + 1].all():
                for block in range(first, last + 1):
                    self._check(block)
        return self._array[start:stop]

    def checked(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
        """All items, once the blocks of these ranges are known to be whole. Raises StoreDamaged as `read` does."""
        first, last = starts * self._item_bytes // BLOCK_BYTES, (stops * self._item_bytes - 1) // BLOCK_BYTES
        between = (last - first).max(initial=0) > 1
        if between or not (self._checked[first].all() and self._checked[last].all()):
            for start, stop in zip(starts.tolist(), stops.tolist()):
                self.read(start, stop)
        return self._array

    def verify(self) -> list[str]:
        """Check every block again, whatever was read before; one line for each that is damaged."""
        self._checked[:] = False
        damage = []
        for block in range(len(self._crcs)):
            try:
                self._check(block)
            except StoreDamaged as error:
                damage.append(f"{error.where}: {error.what}")
        return damage

    def _check(self, block: int) -> None:
        if self._checked[block]:
            return
        data = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        crc = google_crc32c.value(data.tobytes())
        if crc != int(self._crcs[block]):
            raise StoreDamaged(
                f"block {block} has checksum {crc:08x} where {int(self._crcs[block]):08x} was written",
                where=f"{self.path}, bytes {block * BLOCK_BYTES} to {block * BLOCK_BYTES + len(data)}",
                fix="restore the file from a copy, or build the store again with `packtrain data build`",
            )
        self._checked[block] = True


def map_bytes(path: str) -> npt.NDArray[np.uint8]:
    """The file's bytes, memory-mapped read-only (an empty file cannot be mapped and gives an empty array)."""
    if os.stat(path).st_size == 0:
        return np.zeros(0, dtype=np.uint8)
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
