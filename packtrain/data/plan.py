"""What row r of batch i is, in closed form: batch = f(plan, seed, data_index), and no iterator position exists
anywhere.

A plan is an append-only list of segments. Inside a segment, rows are numbered from its start and dealt in blocks of
2,048 with an exact integer count per store, permuted inside the block; so the n-th draw of a store is known without
history and counts on from the store's exact total in all earlier segments. A store's n-th draw is a row of its epoch
n // rows, and epochs are shuffled on two levels: the packing's windows, then the rows of 64 windows together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from packtrain.core.errors import BadValue
from packtrain.data.keys import key64, permutation
from packtrain.data.recent import Recent

MIX_ROWS = 2048
GROUP_WINDOWS = 64
"""Windows shuffled together: 64 MiB of 16-bit tokens, which is what a node-local cache has to hold."""

I64 = npt.NDArray[np.int64]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One store's part of a segment: `count` rows of each 2,048."""

    store: str
    packing: str
    count: int
    rows: int
    """Rows of an epoch."""
    windows: int
    rows_per_window: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    from_index: int
    batch_rows: int
    length: int
    objective: str
    shares: tuple[Share, ...]


class Draws(NamedTuple):
    """Rows of a batch, an array each: which share of the segment, and which row of that store's packing."""

    shares: I64
    windows: I64
    rows: I64


def mixing_counts(weights: Sequence[float], names: Sequence[str]) -> list[int]:
    """Rows of each 2,048 per store, by largest remainder. Raises BadValue when a weight rounds to no row at all."""
    exact = [w * MIX_ROWS / sum(weights) for w in weights]
    counts = [int(x) for x in exact]
    order = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: MIX_ROWS - sum(counts)]:
        counts[i] += 1
    for name, count, weight in zip(names, counts, weights):
        if count == 0:
            raise BadValue(
                f"weight {weight:g} of {sum(weights):g} comes to no row in {MIX_ROWS}", where=f"data.stores: {name}",
                fix=f"raise it to {sum(weights) / MIX_ROWS:.3g} or more, or leave the store out",
            )
    return counts


class Plan:
    """The segments and everything derived from them. Pure: the same segments and seed give the same draws.

    `hash` covers the seed and all segments: stores, packings, counts, rows, length and objective.
    """

    def __init__(self, seed: int, segments: Sequence[Segment]) -> None:
        assert segments and segments[0].from_index == 0, "a plan begins at index 0"
        assert all(a.from_index < b.from_index for a, b in pairwise(segments)), "a plan only grows"
        self.seed = seed
        self.segments = tuple(segments)
        text = msgspec.json.encode(["plan 1", MIX_ROWS, GROUP_WINDOWS, seed, self.segments])
        self.hash = hashlib.sha256(text).hexdigest()
        self._mixes: Recent[tuple[I64, I64]] = Recent(8)
        self._drawn: Recent[Draws] = Recent(8)
        self._bases = [self._base(number) for number in range(len(segments))]
        self._shuffles: dict[tuple[int, int], Shuffle] = {}

    def segment_at(self, data_index: int) -> int:
        assert data_index >= 0
        return max(number for number, s in enumerate(self.segments) if s.from_index <= data_index)

    def draws(self, data_index: int, rows: range) -> Draws:
        """What stands in these rows of batch `data_index`; costs the same at any index."""
        number = self.segment_at(data_index)
        segment = self.segments[number]
        first = (data_index - segment.from_index) * segment.batch_rows
        blocks, places = np.divmod(first + np.arange(rows.start, rows.stop, rows.step), MIX_ROWS)
        found = Draws(*(np.empty_like(places) for _ in Draws._fields))
        for block in _kinds(blocks):
            in_block = blocks == block
            for mine, all_of_block in zip(found, self._block(number, block)):
                mine[in_block] = all_of_block[places[in_block]]
        return found

    def _block(self, number: int, block: int) -> Draws:
        """What stands in the 2,048 rows of a block: batches that follow each other ask for the same one."""

        def compute() -> Draws:
            shares, n = self.nth(number, block * MIX_ROWS + np.arange(MIX_ROWS))
            drawn = Draws(shares, np.empty_like(n), np.empty_like(n))
            for share in _kinds(shares):
                of_share = shares == share
                drawn.windows[of_share], drawn.rows[of_share] = self._shuffle(number, share).locate(n[of_share])
            return drawn

        return self._drawn.get((number, block), compute)

    def nth(self, number: int, rows: I64) -> tuple[I64, I64]:
        """Rows of a segment -> (share, how many draws of that store came before it in the whole plan) of each."""
        blocks, places = np.divmod(rows, MIX_ROWS)
        shares, ranks = np.empty_like(rows), np.empty_like(rows)
        for block in _kinds(blocks):
            in_block = blocks == block
            mixed, ranked = self._mix(number, block)
            shares[in_block], ranks[in_block] = mixed[places[in_block]], ranked[places[in_block]]
        counts = np.array([share.count for share in self.segments[number].shares])
        return shares, np.array(self._bases[number])[shares] + blocks * counts[shares] + ranks

    def _mix(self, number: int, block: int) -> tuple[I64, I64]:
        """For the 2,048 rows of a block: the share each is drawn from, and its rank among that share's rows."""

        def compute() -> tuple[I64, I64]:
            counts = [share.count for share in self.segments[number].shares]
            order = permutation(MIX_ROWS, key64(self.seed, "mix", number, block))
            shares = np.repeat(np.arange(len(counts)), counts)[order]
            ranks = np.zeros(MIX_ROWS, dtype=np.int64)
            for share, count in enumerate(counts):
                ranks[shares == share] = np.arange(count)
            return shares, ranks

        return self._mixes.get((number, block), compute)

    def _base(self, number: int) -> list[int]:
        """Per share, where its draws count on from: tokens drawn in all earlier segments, in rows of this length."""
        segment = self.segments[number]
        return [-(-self._tokens_before(number, share.store) // segment.length) for share in segment.shares]

    def _tokens_before(self, number: int, store: str) -> int:
        tokens = 0
        for k in range(number):
            segment = self.segments[k]
            for i, share in enumerate(segment.shares):
                if share.store == store:
                    tokens += segment.length * self.drawn(k, i)
        return tokens

    def drawn(self, number: int, share: int) -> int:
        """Rows drawn of a share in the whole of a segment that a later one has closed."""
        segment = self.segments[number]
        rows = (self.segments[number + 1].from_index - segment.from_index) * segment.batch_rows
        blocks, rest = divmod(rows, MIX_ROWS)
        shares, _ = self._mix(number, blocks)
        return blocks * segment.shares[share].count + int((shares[:rest] == share).sum())

    def _shuffle(self, number: int, share: int) -> Shuffle:
        if (number, share) not in self._shuffles:
            self._shuffles[number, share] = Shuffle(self.seed, self.segments[number].shares[share])
        return self._shuffles[number, share]


def _kinds(x: I64) -> set[int]:
    """The different values of a short array; numpy's own takes ten times as long there."""
    return set(x.tolist())


class Shuffle:
    """A store's n-th draws -> (windows, rows): every epoch is a permutation of all rows of the packing."""

    def __init__(self, seed: int, share: Share) -> None:
        self._seed, self._share = seed, share
        self._short = share.windows * share.rows_per_window - share.rows
        self._blocks: Recent[tuple[I64, int]] = Recent(2)
        self._groups: Recent[I64] = Recent(2)

    def locate(self, n: I64) -> tuple[I64, I64]:
        epochs, k = np.divmod(n, self._share.rows)
        windows, rows = np.empty_like(n), np.empty_like(n)
        for epoch in _kinds(epochs):
            of_epoch = epochs == epoch
            windows[of_epoch], rows[of_epoch] = self._in_epoch(epoch, k[of_epoch])
        return windows, rows

    def _in_epoch(self, epoch: int, k: I64) -> tuple[I64, I64]:
        order, last_at = self._block_order(epoch)
        groups = self._find(k, GROUP_WINDOWS, last_at)
        shuffled = np.empty_like(k)
        for group in _kinds(groups):
            of_group = groups == group
            start, inner = self._group(epoch, group, last_at)
            shuffled[of_group] = start + inner[k[of_group] - start]
        places = self._find(shuffled, 1, last_at)
        return order[places], shuffled - self._start(places, last_at)

    def _group(self, epoch: int, group: int, last_at: int) -> tuple[int, I64]:
        """First row of a group of windows, and the order of its rows."""
        start = self._start(group * GROUP_WINDOWS, last_at)
        stop = self._start(min((group + 1) * GROUP_WINDOWS, self._share.windows), last_at)
        key = "rows", self._share.store, epoch, group
        return start, self._groups.get((epoch, group), lambda: permutation(stop - start, key64(self._seed, *key)))

    def _block_order(self, epoch: int) -> tuple[I64, int]:
        """The windows in this epoch's order, and where the last window, which may be short, came to stand."""

        def compute() -> tuple[I64, int]:
            order = permutation(self._share.windows, key64(self._seed, "windows", self._share.store, epoch))
            return order, int(np.flatnonzero(order == self._share.windows - 1)[0])

        return self._blocks.get(epoch, compute)

    def _start(self, place: Any, last_at: int) -> Any:
        """First row of the window at this place (or these) of the epoch's order."""
        return place * self._share.rows_per_window - (place > last_at) * self._short

    def _find(self, k: I64, step: int, last_at: int) -> I64:
        """Which run of `step` windows rows k fall in; the one short window moves the edges by less than a window."""
        at = k // (step * self._share.rows_per_window)
        after = (at + 1) * step
        return at + ((after < self._share.windows) & (k >= self._start(after, last_at)))

