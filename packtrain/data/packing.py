"""Which tokens stand in which row: computed once per (store, length, objective) from the documents' lengths, then kept.

The store is cut into windows of at least 2**19 tokens, an exact number of rows each (>= 1 MiB, so that a remote read
is worth its latency). Inside a window, documents are cut at the window's edges and at `length`; the pieces fill rows
largest first (first-fit decreasing, arXiv:2404.10830 on why documents should be cut as little as possible), and where
nothing fits any more the longest piece left is cut to fill the row. So every row is full except at most the last of
the store, and every token is a target exactly once an epoch.

A piece is (start, n): targets are tokens [start, start + n) of the store, inputs the tokens one before. The input
before a document's first token is the end-of-document token, and its last target is the end-of-document token, so the
bytes of a document are predicted exactly once each. A later piece of a cut document has its true predecessor as first
input.

File: pieces as uint32 pairs (start inside the window, n), then per window the offset of its first piece (uint64,
windows + 1) and the crc32c of its pieces (uint32), then a trailer that ends with the SHA-256 of all after the pieces.
This hash is what `plan_hash` covers.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator

import google_crc32c
import numpy as np
import numpy.typing as npt

from packtrain.core.errors import BadValue, StoreDamaged
from packtrain.core.platform import Platform
from packtrain.data.blocks import map_bytes
from packtrain.data.recent import Recent
from packtrain.data.store import Store

I64 = npt.NDArray[np.int64]

VERSION = 1
WINDOW_TOKENS = 1 << 19
TRAILER = struct.Struct("<8s32sQQQ32s")
MAGIC = b"PTPACK01"

WINDOWS_KEPT = 128
"""Windows whose pieces stay decoded; a shuffle group reads 64 at a time."""


def pack_window(lengths: list[int], row: int) -> tuple[list[tuple[int, int, int]], int]:
    """Fill rows of `row` tokens with runs of these lengths; -> ([(run, offset in it, n)] row after row, number of
    cuts).

    Every row but the last is exactly full. Runs longer than a row give whole rows first.
    """
    pool = _Pool()
    out: list[tuple[int, int, int]] = []
    cuts = 0
    for run, n in enumerate(lengths):
        whole = n // row
        out += [(run, i * row, row) for i in range(whole)]
        cuts += max(0, -(-n // row) - 1)
        if n % row:
            pool.add(n % row, (run, whole * row))
    gap = row
    while size := pool.largest(gap) or pool.largest(row):
        run, offset = pool.take(size)
        n = min(size, gap)
        out.append((run, offset, n))
        if n < size:
            pool.add(size - n, (run, offset + n))
            cuts += 1
        gap = gap - n or row
    return out, cuts


class _Pool:
    """Pieces by length, last in first out; the largest that fits is found by the highest bit of a mask."""

    def __init__(self) -> None:
        self._by_length: dict[int, list[tuple[int, int]]] = {}
        self._mask = 0

    def add(self, n: int, piece: tuple[int, int]) -> None:
        self._by_length.setdefault(n, []).append(piece)
        self._mask |= 1 << n

    def largest(self, limit: int) -> int:
        """The largest length held that is at most `limit`; 0 when there is none."""
        return max(0, (self._mask & ((1 << (limit + 1)) - 1)).bit_length() - 1)

    def take(self, n: int) -> tuple[int, int]:
        pieces = self._by_length[n]
        piece = pieces.pop()
        if not pieces:
            self._mask ^= 1 << n
        return piece


def window_rows(length: int) -> int:
    """Rows of a window: at least 2**19 tokens, an exact number of rows."""
    return -(-WINDOW_TOKENS // length)


def pack_store(store: Store, length: int) -> Iterator[tuple[npt.NDArray[np.uint32], int]]:
    """Window after window: pieces [n, 2] (start inside the window, number of targets) and cuts inside the window."""
    starts = store.document_starts
    size = window_rows(length) * length
    for first in range(0, len(store), size):
        last = min(first + size, len(store))
        inner = starts[np.searchsorted(starts, first, "right") : np.searchsorted(starts, last, "left")].astype(np.int64)
        edges = np.concatenate([[first], inner, [last]]) - first
        pieces, cuts = pack_window(np.diff(edges).tolist(), length)
        yield np.array([(edges[run] + offset, n) for run, offset, n in pieces], dtype="<u4").reshape(-1, 2), cuts


def _write(platform: Platform, path: str, key: bytes, packed: Iterator[tuple[npt.NDArray[np.uint32], int]]) -> None:
    """Stream the packing to a temporary name and rename it: hosts that race write the same bytes."""
    temp = f"{path}.new-{platform.token()}"
    offsets, crcs, cuts = [0], [], 0
    with platform.create(temp) as file:
        for pieces, window_cuts in packed:
            data = pieces.tobytes()
            file.write(data)
            offsets.append(offsets[-1] + len(pieces))
            crcs.append(google_crc32c.value(data))
            cuts += window_cuts
        tables = np.array(offsets, "<u8").tobytes() + np.array(crcs, "<u4").tobytes()
        body = tables + TRAILER.pack(MAGIC, key, len(crcs), offsets[-1], cuts, b"")[:-32]
        file.write(body + hashlib.sha256(body).digest())
        file.fsync()
    platform.replace(temp, path)


class Packing:
    """The rows of one store at one length, all full but the last. `hash` names every piece of it.

    `rows`, `windows`, `rows_per_window` (the last window may have fewer), `cuts`: documents cut, window edges left out.
    Raises StoreDamaged; BadValue when the packing is not there and cannot be written.
    """

    def __init__(self, platform: Platform, store: Store, length: int, objective: str) -> None:
        self.length = length
        self.rows = -(-len(store) // length)
        self.rows_per_window = window_rows(length)
        self.window_tokens = self.rows_per_window * length
        self.windows = -(-self.rows // self.rows_per_window)
        key = hashlib.sha256(json.dumps([VERSION, WINDOW_TOKENS, store.hash, length, objective]).encode()).digest()
        self.path = os.path.join(store.folder, "packing", f"{key.hex()[:16]}.bin")
        if not platform.exists(self.path):
            self._compute(platform, store, key)
        self._open(key)
        self._recent: Recent[tuple[I64, list[int]]] = Recent(WINDOWS_KEPT)

    def row(self, window: int, row: int) -> I64:
        """The pieces of a row [n, 2]: start in the store, and number of targets. Raises StoreDamaged."""
        pieces, firsts = self._window(window)
        return pieces[firsts[row] : firsts[row + 1]]

    def _compute(self, platform: Platform, store: Store, key: bytes) -> None:
        try:
            platform.mkdir(os.path.dirname(self.path))
            _write(platform, self.path, key, pack_store(store, self.length))
        except OSError as error:
            raise BadValue(
                f"the packing of this store cannot be written: {error.strerror}", where=self.path,
                fix="make the store's folder writable with room for 2% of its size; it is written once per length",
            ) from error

    def _open(self, key: bytes) -> None:
        data = map_bytes(self.path)
        table_bytes = (self.windows + 1) * 8 + self.windows * 4
        body = data[-(table_bytes + TRAILER.size) :]
        sealed = len(data) >= table_bytes + TRAILER.size
        if not sealed or hashlib.sha256(body[:-32].tobytes()).digest() != body[-32:].tobytes():
            raise self._damaged("its tables do not match their hash")
        magic, kept_key, windows, n_pieces, self.cuts, digest = TRAILER.unpack(body[-TRAILER.size :].tobytes())
        if (magic, kept_key, windows) != (MAGIC, key, self.windows) or len(data) != n_pieces * 8 + len(body):
            raise self._damaged("it belongs to another store, or its length is wrong")
        self.hash = digest.hex()
        self._pieces = data[: n_pieces * 8].view("<u4").reshape(-1, 2)
        self._offsets = np.frombuffer(body[: (self.windows + 1) * 8].tobytes(), "<u8")
        self._crcs = np.frombuffer(body[(self.windows + 1) * 8 : table_bytes].tobytes(), "<u4")

    def _window(self, window: int) -> tuple[I64, list[int]]:
        """Pieces with starts in the store, and which of them is the first of each row."""

        def compute() -> tuple[I64, list[int]]:
            raw = self._pieces[int(self._offsets[window]) : int(self._offsets[window + 1])]
            if google_crc32c.value(raw.tobytes()) != int(self._crcs[window]):
                raise self._damaged(f"the pieces of window {window} do not match their checksum")
            pieces = raw.astype(np.int64)
            pieces[:, 0] += window * self.window_tokens
            ends = np.cumsum(pieces[:, 1])
            rows = np.arange(-(-int(ends[-1]) // self.length) + 1) * self.length
            return pieces, np.searchsorted(ends, rows, "right").tolist()

        return self._recent.get(window, compute)

    def _damaged(self, what: str) -> StoreDamaged:
        return StoreDamaged(
            f"the packing cannot be used: {what}", where=self.path,
            fix="delete this file; the next run computes it again from the documents' lengths",
        )
