"""Blocks of a checkpoint's images, each checked against its table before anybody sees a byte of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.format import PartTable
from packtrain.core.bulk import Crew
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable
from packtrain.core.platform import Platform

CACHE_BYTES = 64 << 20
AHEAD, AHEAD_BYTES, READERS = 16, 64 << 20, 3
"""Blocks loaded before they are asked for, at most; no more once they have so many bytes; and by how many threads:
enough that the disk goes on working while a tensor is placed."""

Key = tuple[str, int]
Block = tuple[PartTable, int]
"""A part and the number of one of its blocks."""


class Blocks:
    """Verified blocks of one checkpoint's images, the most recently used ones kept."""

    def __init__(
        self, platform: Platform, folder: str, bytes_max: int = CACHE_BYTES, ahead_bytes: int = AHEAD_BYTES
    ) -> None:
        self._platform = platform
        self._folder = folder
        self._bytes_max, self._ahead_bytes = bytes_max, ahead_bytes
        self._kept: OrderedDict[Key, bytes] = OrderedDict()
        self._bytes = 0
        self._wanted: Iterator[Block] = iter(())
        self._coming: dict[Key, Callable[[], bytes]] = {}
        self._coming_bytes = 0
        self._crew: Crew

    @contextmanager
    def ahead(self, order: Iterable[Block]) -> Iterator[None]:
        """Inside, blocks are loaded and checked by threads before they are asked for, if that is in this order."""
        seen = OrderedDict(((table.file, index), (table, index)) for table, index in order)
        self._wanted = iter(seen.values())
        with self._platform.crew(READERS) as crew:
            self._crew = crew
            self._load_ahead()
            try:
                yield
            finally:
                self._wanted = iter(())
                for wait in self._coming.values():
                    with suppress(Exception):
                        wait()
                self._coming.clear()
                self._coming_bytes = 0

    def _load_ahead(self) -> None:
        while len(self._coming) < AHEAD and self._coming_bytes < self._ahead_bytes:
            block = next(self._wanted, None)
            if block is None:
                return
            self._coming[block[0].file, block[1]] = self._started(*block)
            self._coming_bytes += block[0].block_bytes

    def _started(self, table: PartTable, index: int) -> Callable[[], bytes]:
        loaded: list[bytes] = []
        wait = self._crew.start(lambda: loaded.append(self._load(table, index)))

        def take() -> bytes:
            wait()
            return loaded[0]

        return take

    def get(self, table: PartTable, index: int) -> bytes:
        """Raises CheckpointDamaged naming the file when the block is short or its crc differs."""
        key = (table.file, index)
        block = self._kept.get(key)
        if block is None:
            block = self.fresh(table, index)
            self._keep(key, block)
        self._kept.move_to_end(key)
        return block

    def fresh(self, table: PartTable, index: int) -> bytes:
        """Not one that was kept: from the disk, in the last moment or a few blocks ahead."""
        coming = self._coming.pop((table.file, index), None)
        if coming is not None:
            self._coming_bytes -= table.block_bytes
        self._load_ahead()
        return self._load(table, index) if coming is None else coming()

    def _load(self, table: PartTable, index: int) -> bytes:
        start = index * table.block_bytes
        size = min(table.block_bytes, table.bytes - start)
        block = read_stored(self._platform, f"{self._folder}/{table.file}", start, size)
        if len(block) != size or fmt.crc32c(block) != table.crc32c[index]:
            found = "crc32c differs" if len(block) == size else f"only {len(block)} of {size} bytes are there"
            raise as_damaged(f"bytes {start}..{start + size} of {table.file}: {found}", f"{self._folder}/{table.file}")
        return block

    def _keep(self, key: tuple[str, int], block: bytes) -> None:
        self._kept[key] = block
        self._bytes += len(block)
        while self._bytes > self._bytes_max and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped)

    def span(self, table: PartTable, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Bytes [start, stop) of an image, as uint8; a view into one block where they lie in one."""
        first, last = start // table.block_bytes, (stop - 1) // table.block_bytes
        if first == last:
            at = first * table.block_bytes
            return np.frombuffer(self.get(table, first), np.uint8, count=stop - start, offset=start - at)
        out = np.empty(stop - start, np.uint8)
        for index in range(first, last + 1):
            at = index * table.block_bytes
            low, high = max(start, at), min(stop, at + table.block_bytes)
            out[low - start : high - start] = np.frombuffer(self.get(table, index), np.uint8)[low - at : high - at]
        return out


def read_stored(platform: Platform, path: str, offset: int, size: int) -> bytes:
    try:
        return platform.read(path, offset, size)
    except FileNotFoundError as error:
        raise as_damaged(f"cannot be read: {error}", path) from error
    except OSError as error:
        raise as_unreadable(error, path) from error


def as_unreadable(error: OSError, path: str) -> CheckpointUnreadable:
    return CheckpointUnreadable(
        f"the disk refuses to read it now: {error}", where=path, fix="see that the disk is mounted, well and readable"
    )


def as_damaged(what: str, where: str) -> CheckpointDamaged:
    return CheckpointDamaged(what, where=where, fix=fmt.DAMAGED_FIX)
