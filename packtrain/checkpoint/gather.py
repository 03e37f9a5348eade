"""Restores tensors over all ranks: each reads and checks its share of the blocks, and passes on what others want of it.

In:   an open checkpoint, the plan (`deal.py`), a fabric between the ranks.
Out:  for each tensor the boxes this rank wants, handed over as soon as they are whole and then let go.
Fails: on all ranks in the same exchange. Who finds damage raises it by tensor and file, the others raise the same kind
       of error with the number of that rank; nobody is left waiting in an exchange.

Every byte that is used was checked against the table of its part by the rank that read it, and what came over the
fabric once more against the checksum its sender put behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.blocks import as_damaged
from packtrain.checkpoint.deal import Cut, Deal, Stage
from packtrain.checkpoint.format import Box, PartTable
from packtrain.checkpoint.reader import Checkpoint, within
from packtrain.checkpoint.wants import flat_boxes
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable

CRC_BYTES = 4
"""Behind each window: its sender's checksum."""
WELL, DAMAGED, UNREADABLE, BROKEN = range(4)
"""How a rank stands, told with each exchange. BROKEN: by an error that is not about the checkpoint."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Boxes = dict[Box, np.ndarray[Any, Any]]
Held = Mapping[tuple[int, int], Bytes]
"""(part, block) -> its bytes, until they are passed on."""


class Fabric(Protocol):
    """Between the ranks of a restore. All call the same in the same order."""

    rank: int

    def swap(self, shift: int, window: Bytes, status: int) -> tuple[Bytes, Sequence[int]]:
        """`window` goes to rank + shift; returned is that of rank - shift, and how each rank stands."""
        ...

    def tell(self, status: int) -> Sequence[int]:
        """How each rank stands."""
        ...

    def share(self, data: bytes) -> Sequence[bytes]:
        """`data` goes to all; returned is that of each rank. Small: it is whole in the memory of all."""
        ...


class Alone:
    """A world of one."""

    rank = 0

    def swap(self, shift: int, window: Bytes, status: int) -> tuple[Bytes, Sequence[int]]:
        raise AssertionError("a world of one exchanges nothing")

    def tell(self, status: int) -> Sequence[int]:
        return [status]

    def share(self, data: bytes) -> Sequence[bytes]:
        return [data]


def gather(checkpoint: Checkpoint, deal: Deal, fabric: Fabric, place: Callable[[str, Boxes], None]) -> None:
    """`place(name, boxes)` for each tensor of which this rank wants an element.

    Raises CheckpointDamaged, CheckpointUnreadable and what `place` raised; on all ranks when on one.
    """
    stages = deal.share(fabric.rank)
    landing = _Landing(checkpoint.tables, stages, place)
    work = _Work(checkpoint.folder, deal, fabric, landing)
    with closing(checkpoint.blocks([(read.table, read.block) for stage in stages for read in stage.reads])) as blocks:
        for stage in stages:
            work.do(stage, blocks)
    work.check(fabric.tell(work.status()))


class _Work:
    """One rank's part. After an error it takes part in one more exchange, that which tells the others."""

    def __init__(self, folder: str, deal: Deal, fabric: Fabric, landing: _Landing) -> None:
        self._folder, self._deal, self._fabric, self._landing = folder, deal, fabric, landing
        self._failure: Exception | None = None

    def do(self, stage: Stage, blocks: Iterator[bytes]) -> None:
        held: dict[tuple[int, int], Bytes] = {}
        self._attempt(lambda: self._read(stage, blocks, held))
        for shift, windows in stage.rounds:
            leaving, coming = stage.sends.get(shift, []), stage.takes.get(shift, [])
            self._exchange(leaving, coming, held, shift, windows)

    def status(self) -> int:
        match self._failure:
            case None:
                return WELL
            case CheckpointDamaged():
                return DAMAGED
            case CheckpointUnreadable():
                return UNREADABLE
        return BROKEN

    def check(self, standing: Sequence[int]) -> None:
        """Raises when any rank does not stand well."""
        if self._failure is not None:
            raise self._failure
        for rank, status in enumerate(standing):
            if status == DAMAGED:
                raise as_damaged(f"rank {rank} found damage; the error there names tensor and file", self._folder)
            if status != WELL:
                what = "cannot read the checkpoint" if status == UNREADABLE else "failed while it was restoring"
                fix = f"see the error of rank {rank}"
                raise CheckpointUnreadable(f"rank {rank} {what}", where=self._folder, fix=fix)

    def _attempt(self, work: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                work()
            except Exception as error:  # of any kind: the others wait
                self._failure = error

    def _read(self, stage: Stage, blocks: Iterator[bytes], held: dict[tuple[int, int], Bytes]) -> None:
        passed_on = {(cut.table, cut.block) for cuts in stage.sends.values() for cut in cuts}
        for read in stage.reads:
            block = np.frombuffer(next(blocks), np.uint8)
            for cut in read.mine:
                self._landing.from_block(cut, block)
            if (read.table, read.block) in passed_on:
                held[read.table, read.block] = block

    def _exchange(
        self, leaving: Sequence[Cut], coming: Sequence[Cut], held: Held, shift: int, windows: int
    ) -> None:
        """All that goes to one rank in this stage, and all that comes from one."""
        size = self._deal.window_bytes[shift]
        out, into = (np.zeros(sum(cut.bytes for cut in cuts), np.uint8) for cuts in (leaving, coming))
        self._attempt(lambda: self._landing.pack(leaving, held, out))
        for start in range(0, windows * size, size):
            window, standing = self._fabric.swap(shift, _sealed(out[start : start + size], size), self.status())
            self.check(standing)
            arrived = into[start : start + size]
            self._attempt(partial(self._open, window, arrived, shift))
        self._attempt(lambda: self._landing.unpack(coming, into))

    def _open(self, window: Bytes, arrived: Bytes, shift: int) -> None:
        """Take what came out of its window."""
        arrived[...] = window[: len(arrived)]
        if fmt.crc32c(arrived) != int.from_bytes(window[-CRC_BYTES:].tobytes(), "little"):
            sender = (self._fabric.rank - shift) % self._deal.ranks
            raise CheckpointUnreadable(
                f"bytes changed on the way from rank {sender} to rank {self._fabric.rank}; on disk they are well",
                where=self._folder, fix="nothing at first: the restore is tried again; if it comes back, test the "
                "links between the nodes of these ranks",
            )


def _sealed(data: Bytes, size: int) -> Bytes:
    """A window of `size` bytes with `data` at its beginning and the checksum of that behind all."""
    window = np.zeros(size + CRC_BYTES, np.uint8)
    window[: len(data)] = data
    window[-CRC_BYTES:] = np.frombuffer(fmt.crc32c(data).to_bytes(CRC_BYTES, "little"), np.uint8)
    return window


class _Landing:
    """The boxes a rank wants, while they fill."""

    def __init__(
        self, tables: Sequence[PartTable], stages: Sequence[Stage], place: Callable[[str, Boxes], None]
    ) -> None:
        self._tables, self._place = tables, place
        self._boxes: dict[str, Boxes] = {}
        self._missing: dict[str, int] = defaultdict(int)
        """Bytes that the boxes of a tensor still wait for."""
        for stage in stages:
            own = (cut for read in stage.reads for cut in read.mine)
            for cut in (*own, *(cut for cuts in stage.takes.values() for cut in cuts)):
                self._missing[cut.tensor] += cut.bytes

    def from_block(self, cut: Cut, block: Bytes) -> None:
        target = self._target(cut)
        for piece in _pieces(cut, self._tables[cut.table]):
            target[piece.target] = piece.of(block)
        self._came(cut)

    def pack(self, cuts: Sequence[Cut], held: Held, out: Bytes) -> None:
        """These cuts one after the other, each in C order of its pieces."""
        at = 0
        for cut in cuts:
            block = held[cut.table, cut.block]
            for piece in _pieces(cut, self._tables[cut.table]):
                out[at : at + piece.bytes].reshape(piece.shape)[...] = piece.of(block)
                at += piece.bytes

    def unpack(self, cuts: Sequence[Cut], data: Bytes) -> None:
        """What `pack` made there."""
        at = 0
        for cut in cuts:
            target = self._target(cut)
            for piece in _pieces(cut, self._tables[cut.table]):
                target[piece.target] = data[at : at + piece.bytes].reshape(piece.shape)
                at += piece.bytes
            self._came(cut)

    def _target(self, cut: Cut) -> Bytes:
        """The bytes of its box; a last dim for those of an element."""
        boxes = self._boxes.setdefault(cut.tensor, {})
        shape, dtype = fmt.box_shape(cut.box), fmt.DTYPES[cut.placed.dtype][1]
        if cut.box not in boxes:
            boxes[cut.box] = np.empty(shape, dtype)
        return boxes[cut.box].reshape(-1).view(np.uint8).reshape(*shape, dtype.itemsize)

    def _came(self, cut: Cut) -> None:
        self._missing[cut.tensor] -= cut.bytes
        if not self._missing[cut.tensor]:
            self._place(cut.tensor, self._boxes.pop(cut.tensor))


class _Piece(NamedTuple):
    """A part of a cut that is a box in its block and a box in its target."""

    at: int
    """Where in the block the rows begin that hold it."""
    rows: tuple[int, ...]
    within: tuple[slice, ...]
    target: tuple[slice, ...]
    shape: tuple[int, ...]
    bytes: int

    def of(self, block: Bytes) -> Bytes:
        stop = self.at + int(np.prod(self.rows))
        return block[self.at : stop].reshape(self.rows)[self.within]


def _pieces(cut: Cut, table: PartTable) -> Iterator[_Piece]:
    placed, item = cut.placed, fmt.DTYPES[cut.placed.dtype][1].itemsize
    begin = cut.block * table.block_bytes - placed.offset
    start, stop = max(begin, 0), min(begin + table.block_bytes, placed.bytes)
    at = start - begin
    target = (*cut.box, (0, item))
    for box in flat_boxes((*fmt.box_shape(placed.box), item), start, stop):
        rows = (*((low + first, high + first) for (low, high), (first, _) in zip(box, placed.box)), box[-1])
        common = fmt.intersect(rows, target)
        if common is not None:
            shape, size = fmt.box_shape(common), fmt.volume(common)
            yield _Piece(at, fmt.box_shape(rows), within(common, rows), within(common, target), shape, size)
        at += fmt.volume(box)
