"""Which bytes of which blocks are wanted by whom: the boxes of tensors against the blocks of files. Pure, in columns.

    want    the bytes of one block that lie in one box which one rank wants.

What is passed on between ranks are wants, not blocks: of rows cut by columns each rank gets its columns. An element's
bytes are counted as a last dim of its tensor, so a block may end inside of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.format import Box, PartTable, PlacedBox

Wanted = Mapping[str, Mapping[Box, Sequence[int]]]
"""Tensor -> box -> ranks that want it."""
Stored = dict[str, list[tuple[int, PlacedBox]]]
"""Tensor -> what the parts hold of it, each with the number of its part."""
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Wants(NamedTuple):
    """Columns, one row a want. `block` counts through all parts; `placed` and `box` are places in lists of a tensor."""

    block: Ints
    tensor: Ints
    placed: Ints
    box: Ints
    rank: Ints
    bytes: Ints

    def rows(self, which: Any) -> Wants:
        return Wants(*(column[which] for column in self))


def stored(tables: Sequence[PartTable], wanted: Wanted) -> Stored:
    """Of each wanted tensor what the parts hold; tensors as they follow each other in the files."""
    found: Stored = {}
    for part, table in enumerate(tables):
        for placed in sorted(table.boxes, key=lambda placed: placed.offset):
            if placed.tensor in wanted and placed.bytes:
                found.setdefault(placed.tensor, []).append((part, placed))
    return found


def find_wants(tables: Sequence[PartTable], held: Stored, boxes: Mapping[str, Sequence[Box]], wanted: Wanted) -> Wants:
    """All wants, tensor after tensor as `held` has them. `boxes`: of each tensor those with an element."""
    found = [Wants(*[np.zeros(0, np.int64)] * len(Wants._fields))]
    first = first_blocks(tables)
    steps = np.array([table.block_bytes for table in tables], np.int64)
    for number, (name, pieces) in enumerate(held.items()):
        if boxes[name]:
            pairs = _pairs(pieces, boxes[name], steps)
            block, pair, size = _in_blocks(pairs)
            holders = [sorted(wanted[name][box]) for box in boxes[name]]
            row, rank = _held_by(pairs.box[pair], holders)
            pair, number_of = pair[row], first[pairs.part[pair[row]]] + block[row]
            found.append(Wants(
                number_of, np.full(len(row), number), pairs.placed[pair], pairs.box[pair], rank, size[row]
            ))
    return Wants(*(np.concatenate(column) for column in zip(*found)))


def first_blocks(tables: Sequence[PartTable]) -> Ints:
    """Of each part the number of its first block when blocks are counted through all parts; last how many there are."""
    return np.cumsum([0, *(len(table.crc32c) for table in tables)])


class _Pairs(NamedTuple):
    """A stored box and a wanted one that have elements in common, one row a pair; `low` and `high` say which, counted
    from the corner of the stored one."""

    placed: Ints
    box: Ints
    part: Ints
    offset: Ints
    step: Ints
    """Bytes of a block of that part."""
    shape: Ints
    low: Ints
    high: Ints


def _pairs(pieces: Sequence[tuple[int, PlacedBox]], boxes: Sequence[Box], steps: Ints) -> _Pairs:
    item = fmt.DTYPES[pieces[0][1].dtype][1].itemsize
    held = np.array([(*placed.box, (0, item)) for _, placed in pieces], np.int64)
    asked = np.array([(*box, (0, item)) for box in boxes], np.int64)
    low = np.maximum(held[:, None, :, 0], asked[None, :, :, 0])
    high = np.minimum(held[:, None, :, 1], asked[None, :, :, 1])
    placed, box = np.nonzero((low < high).all(axis=2))
    origin = held[placed, :, 0]
    part = np.array([part for part, _ in pieces], np.int64)[placed]
    offset = np.array([piece.offset for _, piece in pieces], np.int64)[placed]
    shape = held[placed, :, 1] - origin
    return _Pairs(placed, box, part, offset, steps[part], shape, low[placed, box] - origin, high[placed, box] - origin)


def _in_blocks(pairs: _Pairs) -> tuple[Ints, Ints, Ints]:
    """Blocks of its part that hold bytes of a pair, and beside each the pair's row and how many bytes."""
    strides = _strides(pairs.shape)
    first = pairs.offset + (pairs.low * strides).sum(axis=1)
    last = pairs.offset + ((pairs.high - 1) * strides).sum(axis=1)
    pair, block = ranges(first // pairs.step, last // pairs.step + 1)
    begin = block * pairs.step[pair] - pairs.offset[pair]
    whole = pairs.shape[pair].prod(axis=1)
    below = [
        _before(np.clip(at, 0, whole), strides[pair], pairs.low[pair], pairs.high[pair])
        for at in (begin, begin + pairs.step[pair])
    ]
    size = below[1] - below[0]
    some = size > 0
    return block[some], pair[some], size[some]


def _held_by(box: Ints, holders: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """For each row all ranks that want its box: the row's number, and the rank."""
    counts = np.array([len(ranks) for ranks in holders])
    row, nth = ranges(np.zeros(len(box), np.int64), counts[box])
    every = np.array([rank for ranks in holders for rank in ranks], np.int64)
    return row, every[(np.cumsum(counts) - counts)[box[row]] + nth]


def _strides(shape: Ints) -> Ints:
    """Elements from one index to the next, for each row of shapes."""
    after = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return np.concatenate([after, np.ones((len(shape), 1), np.int64)], axis=1)


def ranges(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """All numbers from start to stop of each row, one after the other, and beside each the number of its row."""
    counts = stop - start
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) + start[row]


def _before(x: Ints, strides: Ints, low: Ints, high: Ints) -> Ints:
    """How many elements of the box [low, high) come before element x of the array it lies in, in C order."""
    count, inside, rest = np.zeros(len(x), np.int64), np.ones(len(x), bool), x
    for dim in range(strides.shape[1]):
        digit, rest = np.divmod(rest, strides[:, dim])
        after = (high[:, dim + 1 :] - low[:, dim + 1 :]).prod(axis=1)
        count += np.where(inside, np.clip(digit - low[:, dim], 0, high[:, dim] - low[:, dim]) * after, 0)
        inside &= (low[:, dim] <= digit) & (digit < high[:, dim])
    return count


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a C-ordered array, as boxes that follow each other."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start, stop),)]
    stride = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, stride), divmod(stop, stride)
    if first == last:
        return [((first, first + 1), *rest) for rest in flat_boxes(shape[1:], head, tail)]
    found: list[Box] = []
    if head:
        found += [((first, first + 1), *rest) for rest in flat_boxes(shape[1:], head, stride)]
        first += 1
    if first < last:
        found.append(((first, last), *fmt.whole(shape[1:])))
    return found + [((last, last + 1), *rest) for rest in flat_boxes(shape[1:], 0, tail)]
