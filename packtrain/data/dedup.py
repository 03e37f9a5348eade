"""Exact deduplication by 128-bit content hashes, a range of hashes at a time, so that memory is bounded whatever the
corpus.

Of equal documents the first in reading order is kept. Each range leaves a file of the documents to drop, sorted by
part.
"""

from __future__ import annotations

import os

import msgspec
import numpy as np
import numpy.typing as npt

from packtrain.core.platform import LocalPlatform
from packtrain.data.blocks import map_bytes
from packtrain.data.signed import read_card, seal
from packtrain.data.spool import RECORD, Records, Spool

FOUND = np.dtype([("part", "<u4"), ("row", "<u4"), *((name, RECORD[name]) for name in RECORD.names or ())])
"""A record with the part it is in and its row among the part's records."""
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


def hash_range(spool: Spool, number: int, count: int) -> tuple[Records, npt.NDArray[np.bool_]]:
    """Records of one of `count` equal ranges of hashes, sorted by hash then reading order, and which of them repeat."""
    low = np.uint64((number << 64) // count)
    high = np.uint64(((number + 1 << 64) // count) - 1)
    pieces = []
    for part in range(len(spool)):
        records = spool.records(part)
        first, last = np.searchsorted(records["high"], low, "left"), np.searchsorted(records["high"], high, "right")
        piece = np.zeros(int(last - first), dtype=FOUND)
        for name in RECORD.names or ():
            piece[name] = records[name][first:last]
        piece["part"] = part
        piece["row"] = np.arange(first, last)
        pieces.append(piece)
    found = np.concatenate(pieces) if pieces else np.zeros(0, dtype=FOUND)
    found = found[np.lexsort((found["document"], found["part"], found["low"], found["high"]))]
    repeats = np.zeros(len(found), dtype=bool)
    repeats[1:] = (found["high"][1:] == found["high"][:-1]) & (found["low"][1:] == found["low"][:-1])
    return found, repeats


def drop_repeats(task: RangeTask) -> RangeCard:
    """Write which documents of a range of hashes are dropped; a range that is done already is left as it is."""
    platform = LocalPlatform()
    done = os.path.join(task.folder, f"{task.number:06d}.json")
    if platform.exists(done):
        return read_card(platform, done, RangeCard)[0]
    found, repeats = hash_range(Spool(task.spool), task.number, task.count)
    dropped = found[repeats]
    places = np.sort(dropped["part"].astype(np.uint64) << np.uint64(32) | dropped["document"])
    platform.write_replacing(os.path.join(task.folder, f"{task.number:06d}.drop"), places.tobytes())
    card = RangeCard(
        documents=len(found), bytes=int(found["bytes"].sum(dtype=np.int64)), dropped_documents=len(dropped),
        dropped_bytes=int(dropped["bytes"].sum(dtype=np.int64)),
    )
    platform.write_replacing(done, seal(card))
    return card


class Drops:
    """The documents dropped from each part. `count`: into how many ranges the hashes were dealt."""

    def __init__(self, folder: str, count: int) -> None:
        self._files = [map_bytes(os.path.join(folder, f"{k:06d}.drop")).view("<u8") for k in range(count)]

    def of(self, part: int) -> npt.NDArray[np.int64]:
        """Places of the part's documents that are dropped."""
        low, high = np.uint64(part << 32), np.uint64(part + 1 << 32)
        runs = [f[np.searchsorted(f, low) : np.searchsorted(f, high)] for f in self._files]
        return (np.concatenate(runs) & np.uint64(0xFFFFFFFF)).astype(np.int64)
