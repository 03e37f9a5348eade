"""Which documents are held out: whole documents in order of content hash, until 5% of the bytes or 0.5 MB are reached.

Near-duplicates (`minhash.py`) stay on one side: a document brings its whole cluster, the documents linked to it
through pairs that share over half their shingles. A cluster larger than the limit by itself is passed over, so that
less than twice the limit is ever held out. Where every cluster is larger (a corpus of a few documents) the first in
order of content hash is held out that has at most half of the bytes, and at most four limits or 4 MiB.

Memory stays flat because only clusters of documents near the front of the order are ever built: their band keys are
looked for in the whole corpus, round after round until nothing new joins, and a cluster that outgrows what may be
held out grows no further. Content hashes are in no way related to content, so the front of the order is a fair
sample.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from packtrain.data.dedup import hash_range
from packtrain.data.keys import U64
from packtrain.data.minhash import near, shingles
from packtrain.data.recent import Recent
from packtrain.data.spool import Spool

POOL_CAPS = 4
"""Documents of so many times what may be held out are clustered at a time."""
POOLS_MAX = 32
FEW_DOCUMENTS_BYTES = 4 << 20
XZ_PRESET = 9 | lzma.PRESET_EXTREME

Scan = Callable[[U64], Iterable[tuple[int, npt.NDArray[np.int64]]]]
"""Band keys -> (part, rows of its records that have one of them)."""


class HeldDocument(msgspec.Struct, frozen=True, order=True):
    """Ordered by content hash."""

    high: int
    low: int
    part: int
    row: int
    document: int
    bytes: int


class Split(msgspec.Struct, frozen=True, kw_only=True):
    limit_bytes: int
    held: tuple[HeldDocument, ...]
    clusters: int
    """Clusters held out; a document without near-duplicates is one by itself."""
    passed_over: int
    """Clusters before the last one held out that were too large for it."""


class ScanTask(msgspec.Struct, frozen=True, kw_only=True):
    spool: str
    first: int
    last: int
    keys: bytes


def scan_parts(task: ScanTask) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Which records of parts [first, last) have one of the keys (sorted, distinct)."""
    spool = Spool(task.spool)
    keys = np.frombuffer(task.keys, dtype="<u8")
    found = []
    for part in range(task.first, task.last):
        rows = np.flatnonzero(np.isin(spool.bands(part), keys).any(axis=1))
        if len(rows):
            found.append((part, rows.astype(np.int64)))
    return found


def split(spool: Spool, ranges: int, total_bytes: int, limit: int, scan: Scan) -> Split:
    """Choose what is held out of a spool whose distinct documents have `total_bytes`. Deterministic; see the module."""
    if limit <= 0:
        return Split(limit_bytes=0, held=(), clusters=0, passed_over=0)
    clusters, passed_over = _walk(spool, ranges, scan, cap=limit, limit=limit)
    if not clusters:
        few = min(total_bytes // 2, max(4 * limit, FEW_DOCUMENTS_BYTES))
        clusters, passed_over = _walk(spool, ranges, scan, cap=few, limit=1)
    held = sorted(document for cluster in clusters for document in cluster)
    return Split(limit_bytes=limit, held=tuple(held), clusters=len(clusters), passed_over=passed_over)


def _walk(spool: Spool, ranges: int, scan: Scan, cap: int, limit: int) -> tuple[list[list[HeldDocument]], int]:
    """Clusters of at most `cap` bytes in order of their first content hash until `limit` bytes; and how many were
    larger."""
    documents = _in_hash_order(spool, ranges)
    clusters = Clusters(spool, cap)
    taken: list[list[HeldDocument]] = []
    held = passed_over = 0
    decided: set[int] = set()
    for _ in range(POOLS_MAX):
        pool = list(_pool(documents, POOL_CAPS * cap, cap))
        clusters.grow(pool, scan)
        for document in pool:
            root = clusters.root(document)
            if root in decided:
                continue
            decided.add(root)
            if clusters.bytes[root] > cap:
                passed_over += 1
                continue
            taken.append(clusters.members(root))
            held += clusters.bytes[root]
            if held >= limit:
                return taken, passed_over
        if not pool:
            break
    return taken, passed_over


def _in_hash_order(spool: Spool, ranges: int) -> Iterator[HeldDocument]:
    """All distinct documents; one range of hashes is in memory at a time."""
    for number in range(ranges):
        found, repeats = hash_range(spool, number, ranges)
        for r in found[~repeats]:
            yield HeldDocument(*(int(r[name]) for name in HeldDocument.__struct_fields__))


def _pool(documents: Iterator[HeldDocument], pool_bytes: int, cap: int) -> Iterator[HeldDocument]:
    """The next documents, until those that might be held out have `pool_bytes`."""
    n = 0
    while n < pool_bytes and (document := next(documents, None)):
        yield document
        n += document.bytes if document.bytes <= cap else 0


class Clusters:
    """Union-find over documents near the front of the order and everything linked to them."""

    def __init__(self, spool: Spool, cap: int) -> None:
        self._spool, self._cap = spool, cap
        self._number: dict[tuple[int, int], int] = {}
        self._documents: list[HeldDocument] = []
        self._shingles: list[U64] = []
        self._parent: list[int] = []
        self.bytes: dict[int, int] = {}
        """Of each cluster, by its root."""
        self._texts: Recent[bytes] = Recent(4)

    def root(self, document: HeldDocument) -> int:
        return self._find(self._number[document.high, document.low])

    def members(self, root: int) -> list[HeldDocument]:
        return [d for i, d in enumerate(self._documents) if self._find(i) == root]

    def grow(self, pool: Sequence[HeldDocument], scan: Scan) -> None:
        """Add the pool and all that is linked to it, except beyond clusters that are too large already."""
        frontier = [self._add(d, self._shingles_of(d)) for d in pool if (d.high, d.low) not in self._number]
        while frontier := [i for i in frontier if self.bytes[self._find(i)] <= self._cap]:
            owners = self._owners(frontier)
            before = len(self._documents)
            for part, rows in scan(np.array(sorted(owners), dtype=np.uint64)):
                for row in rows.tolist():
                    self._meet(part, row, owners)
            frontier = list(range(before, len(self._documents)))

    def _owners(self, frontier: Sequence[int]) -> dict[int, list[int]]:
        """Band key -> the documents of the frontier that have it."""
        owners: dict[int, list[int]] = {}
        for i in frontier:
            d = self._documents[i]
            for key in self._spool.bands(d.part)[d.row].tolist():
                if key:
                    owners.setdefault(key, []).append(i)
        return owners

    def _meet(self, part: int, row: int, owners: dict[int, list[int]]) -> None:
        """A record that shares a key with the frontier: join it to each document there it truly is near to."""
        keys = self._spool.bands(part)[row].tolist()
        candidates = {i for key in keys for i in owners.get(key, ()) if self.bytes[self._find(i)] <= self._cap}
        record = self._spool.records(part)[row]
        name = (int(record["high"]), int(record["low"]))
        known = self._number.get(name)
        candidates -= {known} if known is not None else set()
        if not candidates:
            return
        document = HeldDocument(*name, part, row, int(record["document"]), int(record["bytes"]))
        mine = self._shingles[known] if known is not None else self._shingles_of(document)
        for i in sorted(candidates):
            if near(mine, self._shingles[i]):
                known = self._add(document, mine) if known is None else known
                self._join(known, i)

    def _add(self, document: HeldDocument, its_shingles: U64) -> int:
        number = len(self._documents)
        self._number[document.high, document.low] = number
        self._documents.append(document)
        self._shingles.append(its_shingles)
        self._parent.append(number)
        self.bytes[number] = document.bytes
        return number

    def _find(self, i: int) -> int:
        while self._parent[i] != i:
            self._parent[i] = self._parent[self._parent[i]]
            i = self._parent[i]
        return i

    def _join(self, a: int, b: int) -> None:
        a, b = sorted((self._find(a), self._find(b)))
        if a != b:
            self._parent[b] = a
            self.bytes[a] += self.bytes.pop(b)

    def _shingles_of(self, document: HeldDocument) -> U64:
        if document.bytes > self._cap:
            return np.zeros(0, dtype=np.uint64)  # too large already: never compared
        return shingles(text_of(self._spool, document, self._texts))


def text_of(spool: Spool, document: HeldDocument, kept: Recent[bytes]) -> bytes:
    """The document's text; `kept` holds the texts of the parts read last."""
    texts = kept.get(document.part, lambda: spool.texts(document.part))
    record = spool.records(document.part)[document.row]
    return texts[int(record["offset"]) : int(record["offset"]) + int(record["bytes"])]


def xz_bits_per_byte(texts: Sequence[bytes]) -> tuple[float, float]:
    """What `xz -9e` takes per byte of the documents: each by itself, and all as one stream."""
    n = sum(map(len, texts))
    files = sum(len(lzma.compress(text, preset=XZ_PRESET)) for text in texts)
    stream = len(lzma.compress(b"".join(texts), preset=XZ_PRESET))
    return 8 * files / n, 8 * stream / n
