"""Exact deduplication by 128-bit content hashes, a range of hashes at a time, so that memory is bounded whatever the
corpus.

Of equal documents the first in reading order is kept. Each range leaves two files of the documents to drop, both sorted
by part: repeats of another part's documents, and repeats within a part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from packtrain.core.platform import LocalPlatform
from packtrain.data.blocks import map_bytes
from packtrain.data.signed import read_card, seal
from packtrain.data.spool import RECORD, Records, Spool

FOUND = np.dtype([("part", "<u4"), ("row", "<u4"), *((name, RECORD[name]) for name in RECORD.names or ())])
"""A record with the part it is in and its row among the part's records."""
DROP, AGAIN = ".drop", ".again"
BYTES_A_RECORD = 4 * FOUND.itemsize
"""Memory a record costs while its range is sorted: itself, its sorted copy, sort keys and order."""


class RangeCard(msgspec.Struct, frozen=True, kw_only=True):
    documents: int
    bytes: int
    dropped_documents: int
    dropped_bytes: int


class RangeTask(msgspec.Struct, frozen=True, kw_only=True):
    spool: str
    folder: str
    number: int
    count: int


class Range(NamedTuple):
    """`found`: of each part, the first record of each hash, sorted by hash then reading order; `repeats`: which of them
    come again."""

    found: Records
    repeats: npt.NDArray[np.bool_]


def hash_range(spool: Spool, number: int, count: int, in_part: Callable[[Records], None] = lambda again: None) -> Range:
    """One of `count` equal ranges of hashes. `in_part` is given the repeats within each part, part after part: a row
    that is there a hundred million times costs the memory of one a part.
    """
    low = np.uint64((number << 64) // count)
    high = np.uint64(((number + 1 << 64) // count) - 1)
    pieces = [np.zeros(0, dtype=FOUND)]
    for part in range(len(spool)):
        records = spool.records(part)
        first, last = np.searchsorted(records["high"], low, "left"), np.searchsorted(records["high"], high, "right")
        piece = np.zeros(int(last - first), dtype=FOUND)
        for name in RECORD.names or ():
            piece[name] = records[name][first:last]
        piece["part"] = part
        piece["row"] = np.arange(first, last)
        again = _repeats(piece)
        in_part(piece[again])
        pieces.append(piece[~again])
    found = np.concatenate(pieces)
    found = found[np.lexsort((found["document"], found["part"], found["low"], found["high"]))]
    return Range(found, _repeats(found))


def _repeats(found: Records) -> npt.NDArray[np.bool_]:
    """Which have the hash of the record before them."""
    repeats = np.zeros(len(found), dtype=bool)
    repeats[1:] = (found["high"][1:] == found["high"][:-1]) & (found["low"][1:] == found["low"][:-1])
    return repeats


def drop_repeats(task: RangeTask) -> RangeCard:
    """Write which documents of a range of hashes are dropped; a range that is done already is left as it is."""
    platform = LocalPlatform()
    done, drop, again = (os.path.join(task.folder, f"{task.number:06d}{suffix}") for suffix in (".json", DROP, AGAIN))
    if platform.exists(done):
        return read_card(platform, done, RangeCard)[0]
    dropped_documents = dropped_bytes = 0
    temp = f"{again}.new-{platform.token()}"
    with platform.create(temp) as file:

        def write(records: Records) -> None:
            nonlocal dropped_documents, dropped_bytes
            dropped_documents += len(records)
            dropped_bytes += int(records["bytes"].sum(dtype=np.int64))
            file.write(_places(records).tobytes())

        found, repeats = hash_range(Spool(task.spool), task.number, task.count, write)
        file.fsync()
    platform.replace(temp, again)
    dropped = found[repeats]
    platform.write_replacing(drop, _places(dropped).tobytes())
    card = RangeCard(
        documents=len(found) + dropped_documents, bytes=int(found["bytes"].sum(dtype=np.int64)) + dropped_bytes,
        dropped_documents=len(dropped) + dropped_documents,
        dropped_bytes=int(dropped["bytes"].sum(dtype=np.int64)) + dropped_bytes,
    )
    platform.write_replacing(done, seal(card))
    return card


def _places(records: Records) -> npt.NDArray[np.uint64]:
    """Part and document in one number, sorted."""
    return np.sort(records["part"].astype(np.uint64) << np.uint64(32) | records["document"])


class Drops:
    """The documents dropped from each part. `count`: into how many ranges the hashes were dealt."""

    def __init__(self, folder: str, count: int) -> None:
        self._files = [
            map_bytes(os.path.join(folder, f"{k:06d}{suffix}")).view("<u8")
            for k in range(count) for suffix in (DROP, AGAIN)
        ]

    def of(self, part: int) -> npt.NDArray[np.int64]:
        """Places of the part's documents that are dropped."""
        low, high = np.uint64(part << 32), np.uint64(part + 1 << 32)
        runs = [f[np.searchsorted(f, low) : np.searchsorted(f, high)] for f in self._files]
        return (np.concatenate(runs) & np.uint64(0xFFFFFFFF)).astype(np.int64)
