"""Which process reads which block of a checkpoint, and passes on which bytes to whom: a pure plan.

In:   the parts' tables, and for each tensor which ranks want which boxes of it.
Out:  for each block that anybody wants one reader among those who want it (where not all ranks can read every part:
      among those who can, and who want it if any such does), and an order of work that all ranks share.
Every rank computes the whole plan from the same input and so the same plan; nothing is agreed by messages.

    want    the bytes of one block that one rank wants of one box (`wants.py`).
    stage   blocks that are read before the next exchange; no reader holds more than Bounds.stage_bytes of them.
    lane    all wants of one stage with one reader and one taker. Lanes of one shift (taker - reader, modulo the
            number of ranks) are sent together, in windows of one size.

Work grows with the wants: 1,000 ranks and 100,000 blocks of which each is wanted by 8 take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.format import Box, PartTable, PlacedBox
from packtrain.checkpoint.wants import Ints, Wanted, find_wants, first_blocks, ranges, stored


class Bounds(NamedTuple):
    """What keeps the memory of a restore small."""

    run_blocks: int = 2
    """Neighbours of a file that are dealt to one reader together."""
    stage_bytes: int = 8 << 20
    """That a reader holds for others."""
    window_bytes: int = 8 << 20
    """Of one exchange. The design allows 64 MiB; an exchange makes some copies of it, which are to fit in 256 MiB."""
    step_bytes: int = 64 << 10
    """Windows are a multiple of it."""


class Cut(NamedTuple):
    """One want: what of `placed` lies in block `block` of part `table` and in `box`, `bytes` in all."""

    tensor: str
    box: Box
    placed: PlacedBox
    table: int
    block: int
    bytes: int


@dataclass(frozen=True)
class Read:
    """A block this rank reads, and what of it this rank itself wants."""

    table: int
    block: int
    mine: list[Cut]


@dataclass(frozen=True)
class Stage:
    """One rank's work between two exchanges. `rounds`, the same for all ranks: (shift, exchanges of one window)."""

    reads: list[Read]
    sends: dict[int, list[Cut]]
    takes: dict[int, list[Cut]]
    rounds: list[tuple[int, int]]


class Deal:
    """The plan for `ranks` ranks."""

    def __init__(
        self, tables: Sequence[PartTable], wanted: Wanted, ranks: int, bounds: Bounds = Bounds(),  # noqa: B008
        readers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`readers`: of each part the ranks that can read it, at least one; None: all can."""
        self.ranks = ranks
        self._stored = stored(tables, wanted)
        self._boxes = {name: [box for box in wanted[name] if fmt.volume(box)] for name in self._stored}
        wants = find_wants(tables, self._stored, self._boxes, wanted)
        blocks, at = np.unique(wants.block, return_inverse=True)
        first = first_blocks(tables)
        self._part = np.searchsorted(first, blocks, side="right") - 1
        self._index = blocks - first[self._part]
        self._bytes = _sizes(tables, self._part, self._index)
        pairs = np.unique(at * ranks + wants.rank)
        tensor = _first_of(wants.tensor, at, len(blocks))
        able = pairs if readers is None else _able(pairs, self._part, readers, ranks)
        self._reader = _readers(able // ranks, able % ranks, self._part, tensor, self._bytes, ranks, bounds)
        self._order = _interleaved(self._part, self._index, tensor)
        shared = np.bincount(at[self._reader[at] != wants.rank], minlength=len(blocks)) > 0
        self._stage = _stages(self._order, self._reader, np.where(shared, self._bytes, 0), ranks, bounds)
        turn = np.argsort(self._order)
        """Of each block, when its turn is."""
        rows = np.argsort(turn[at], kind="stable")
        self._wants, self._at = wants.rows(rows), at[rows]
        self._from = self._reader[self._at]
        self.window_bytes, self._rounds = self._exchanges(bounds)

    def read_bytes(self, rank: int | None = None) -> int:
        """What one rank reads, or all together, images alone."""
        return int(self._bytes.sum() if rank is None else self._bytes[self._reader == rank].sum())

    def sent_bytes(self, rank: int) -> int:
        """What one rank passes on, padding aside."""
        return int(self._wants.bytes[(self._from == rank) & (self._wants.rank != rank)].sum())

    def share(self, rank: int) -> list[Stage]:
        """The work of one rank, in order."""
        wants = self._wants
        stages = [Stage([], {}, {}, rounds) for rounds in self._rounds]
        mine = self._cuts((wants.rank == rank) & (self._from == rank))
        reads = {
            block: Read(int(self._part[block]), int(self._index[block]), [])
            for block in self._order[self._reader[self._order] == rank].tolist()
        }
        for block, read in reads.items():
            stages[self._stage[block]].reads.append(read)
        for row, cut in mine:
            reads[int(self._at[row])].mine.append(cut)
        for row, cut in self._cuts((wants.rank != rank) & (self._from == rank)):
            shift = int(wants.rank[row] - rank) % self.ranks
            stages[self._stage[self._at[row]]].sends.setdefault(shift, []).append(cut)
        for row, cut in self._cuts((wants.rank == rank) & (self._from != rank)):
            shift = int(rank - self._from[row]) % self.ranks
            stages[self._stage[self._at[row]]].takes.setdefault(shift, []).append(cut)
        return stages

    def _cuts(self, which: Any) -> list[tuple[int, Cut]]:
        """Those wants, by the number of their row."""
        names, found = list(self._stored), []
        for row in np.flatnonzero(which):
            block, name = self._at[row], names[self._wants.tensor[row]]
            _, placed = self._stored[name][self._wants.placed[row]]
            box, size = self._boxes[name][self._wants.box[row]], int(self._wants.bytes[row])
            found.append((int(row), Cut(name, box, placed, int(self._part[block]), int(self._index[block]), size)))
        return found

    def _largest_lanes(self) -> dict[tuple[int, int], int]:
        """(stage, shift) -> bytes of its largest lane."""
        away = self._from != self._wants.rank
        stage, giver, taker = (column[away] for column in (self._stage[self._at], self._from, self._wants.rank))
        lanes, lane = np.unique((stage * self.ranks + giver) * self.ranks + taker, return_inverse=True)
        sizes = np.bincount(lane, weights=self._wants.bytes[away], minlength=len(lanes)).astype(np.int64)
        shifts = (lanes % self.ranks - lanes // self.ranks % self.ranks) % self.ranks
        largest: dict[tuple[int, int], int] = {}
        for at, shift, size in zip((lanes // self.ranks**2).tolist(), shifts.tolist(), sizes.tolist()):
            largest[at, shift] = max(largest.get((at, shift), 0), size)
        return largest

    def _exchanges(self, bounds: Bounds) -> tuple[dict[int, int], list[list[tuple[int, int]]]]:
        """Bytes of a window for each shift, and the rounds of each stage."""
        largest, windows = self._largest_lanes(), dict[int, int]()
        for (_, shift), size in largest.items():
            whole = -(-size // bounds.step_bytes) * bounds.step_bytes
            windows[shift] = max(windows.get(shift, 0), min(whole, bounds.window_bytes))
        rounds: list[list[tuple[int, int]]] = [[] for _ in range(int(self._stage.max(initial=-1)) + 1)]
        for (at, shift), size in sorted(largest.items()):
            rounds[at].append((shift, -(-size // windows[shift])))
        return windows, rounds


# --- leaves ------------------------------------------------------------------------------------------


def _sizes(tables: Sequence[PartTable], part: Ints, index: Ints) -> Ints:
    step = np.array([table.block_bytes for table in tables], np.int64)[part]
    return np.minimum(step, np.array([table.bytes for table in tables], np.int64)[part] - index * step)


def _first_of(tensor: Ints, at: Ints, blocks: int) -> Ints:
    """Of each block the first tensor in it."""
    found = np.full(blocks, np.iinfo(np.int64).max)
    np.minimum.at(found, at, tensor)
    return found


def _able(pairs: Ints, part: Ints, readers: Sequence[Sequence[int]], ranks: int) -> Ints:
    """Of these (block, rank), as block * ranks + rank, those that can read; of blocks without one all that can."""
    can = np.zeros((len(readers), ranks), bool)
    for number, those in enumerate(readers):
        can[number, list(those)] = True
    kept = pairs[can[part[pairs // ranks], pairs % ranks]]
    block, rank = np.nonzero(can[part] & (np.bincount(kept // ranks, minlength=len(part)) == 0)[:, None])
    return np.union1d(kept, block * ranks + rank)


def _readers(block: Ints, rank: Ints, part: Ints, tensor: Ints, sizes: Ints, ranks: int, bounds: Bounds) -> Ints:
    """Of each block its reader. `block`, `rank`: who may read what, sorted. What the same ranks may read of a tensor is
    dealt to them in contiguous runs, to each what lifts it to the level of the others.
    """
    counts = np.bincount(block, minlength=len(sizes))
    start = np.cumsum(counts) - counts
    reader = rank[start]
    load = np.bincount(reader, weights=np.where(counts == 1, sizes, 0), minlength=ranks)
    shared = np.flatnonzero(counts > 1)
    group = _groups(shared, rank, part, counts, start)
    order = np.lexsort((shared, group, tensor[shared]))
    shared, key = shared[order], np.stack([tensor[shared], group])[:, order]
    ends = np.flatnonzero((key[:, 1:] != key[:, :-1]).any(axis=0)) + 1
    for alike in np.split(shared, ends):
        takers = rank[start[alike[0]] : start[alike[0]] + counts[alike[0]]] if len(alike) else alike
        length = max(1, bounds.run_blocks * len(takers))
        for run in (alike[at : at + length] for at in range(0, len(alike), length)):
            reader[run] = takers[_levelled(load[takers], sizes[run])]
            np.add.at(load, reader[run], sizes[run])
    return reader


def _groups(shared: Ints, rank: Ints, part: Ints, counts: Ints, start: Ints) -> Ints:
    """Of each of these blocks a number that those have in common which the same ranks want."""
    if not len(shared):
        return shared
    here, before = shared[1:], shared[:-1]
    alike = (part[here] == part[before]) & (counts[here] == counts[before])
    row, nth = ranges(np.zeros(len(here), np.int64), np.where(alike, counts[here], 0))
    differ = np.bincount(row, rank[start[here[row]] + nth] != rank[start[before[row]] + nth], minlength=len(here))
    new = np.concatenate([[True], ~alike | (differ > 0)])
    known: dict[bytes, int] = {}
    numbers = [
        known.setdefault(rank[start[first] : start[first] + counts[first]].tobytes(), len(known))
        for first in shared[new].tolist()
    ]
    return np.array(numbers, np.int64)[np.cumsum(new) - 1]


def _levelled(load: np.ndarray[Any, Any], sizes: Ints) -> Ints:
    """Which of the takers reads each of these blocks: contiguous, and sums of load as equal as can be."""
    total = sizes.sum()
    sorted_load = np.sort(load)
    levels = (total + np.cumsum(sorted_load)) / np.arange(1, len(load) + 1)
    level = levels[np.flatnonzero(levels > sorted_load)[-1]]
    ends = np.cumsum(np.maximum(0, level - load))
    middles = np.cumsum(sizes) - sizes / 2
    return np.minimum(np.searchsorted(ends, middles), len(load) - 1)


def _interleaved(part: Ints, index: Ints, tensor: Ints) -> Ints:
    """Blocks in the order of work: by tensor, so that tensors are finished one by one, and in it all parts side by
    side, so that the readers of each have work.
    """
    group = np.stack([part, tensor])
    new = np.concatenate([[True], (group[:, 1:] != group[:, :-1]).any(axis=0)])[: len(part)]
    begin = index[np.maximum.accumulate(np.where(new, np.arange(len(part)), 0))]
    return np.lexsort((part, index - begin, tensor))


def _stages(order: Ints, reader: Ints, held_bytes: Ints, ranks: int, bounds: Bounds) -> Ints:
    """Of each block its stage: a new one where a reader would hold more than it may for others."""
    stage, now, held = np.zeros(len(order), np.int64), 0, [0] * ranks
    for block, who, size in zip(order.tolist(), reader[order].tolist(), held_bytes[order].tolist()):
        if held[who] and held[who] + size > bounds.stage_bytes:
            now, held = now + 1, [0] * ranks
        held[who] += size
        stage[block] = now
    return stage
