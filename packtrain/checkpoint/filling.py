"""An image that arrives in memory from another node: checked block by block, whole when its record is written.

In:   a slot's record, then the bytes of its image in order, in pieces of any size.
Out:  the same two files that a worker's slot has (slots.py), the record last: killed at any moment this leaves no
      record, or a true one.
Fails: SlotDamaged naming the block; what was checked before stays, and the sender may go on from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.slots import RECORD, Slot, parse
from packtrain.core.bulk import Mapped
from packtrain.core.errors import SlotDamaged
from packtrain.core.platform import Platform


def record_of(record: bytes, where: str) -> tuple[Slot, str]:
    """The slot that a record tells of, and the record's SHA-256. Raises SlotDamaged for anything else."""
    found = parse(record)
    if found is not None:
        slot = found[0]
        named = fmt.is_writer(slot.writer) and slot.attempt >= 0 and slot.step >= 0
        if named and slot.bytes > 0 and len(slot.crc32c) == fmt.block_count(slot.bytes, slot.block_bytes):
            return found
    raise SlotDamaged("what came is no record of a slot", where=where, fix=FIX)


FIX = "nothing at first: it is sent again; where this comes again, test the memory of both nodes and the link"


class Filling:
    """One image on its way. `image`: its path; nothing may lie there. Raises OSError where there is no room."""

    def __init__(self, platform: Platform, image: str, record: bytes) -> None:
        self.slot, self.sha256 = record_of(record, image)
        self.image = image
        self.checked = 0
        """Bytes of whole blocks that are as their writer summed them up."""
        self.damage: SlotDamaged | None = None
        """What was found last, for whoever has heard only of a connection that broke."""
        self._platform, self._record = platform, record
        self._filled = 0
        self._mapped: Mapped | None = platform.map_file(image, self.slot.bytes)

    @property
    def is_whole(self) -> bool:
        return self.checked == self.slot.bytes

    def take(self, offset: int, data: memoryview) -> None:
        """The bytes from `offset` on: what follows what was taken, or was checked. Raises SlotDamaged."""
        stop = offset + len(data)
        if offset not in (self._filled, self.checked) or stop > self.slot.bytes:
            what = f"bytes {offset} to {stop} came, not those from {self.checked} on"
            raise SlotDamaged(what, where=self.image, fix=FIX)
        assert self._mapped is not None, "it was closed"
        self._mapped.buffer[offset:stop] = data
        self._mapped.filled(offset, stop)
        self._filled = stop
        self._check(np.frombuffer(self._mapped.buffer, np.uint8, count=self.slot.bytes))

    def _check(self, image: np.ndarray[Any, Any]) -> None:
        slot = self.slot
        while self.checked < slot.bytes:
            stop = min(self.checked + slot.block_bytes, slot.bytes)
            if stop > self._filled:
                return
            block = self.checked // slot.block_bytes
            if fmt.crc32c(image[self.checked : stop]) != slot.crc32c[block]:
                self._filled = self.checked
                what = f"block {block} of {slot.writer}, step {slot.step}, is not what its writer summed up"
                self.damage = SlotDamaged(what, where=self.image, fix=FIX)
                raise self.damage
            self.checked = stop

    def close(self) -> None:
        """Nothing more comes: its memory is given back once its file has no name either."""
        self._mapped = None

    def finish(self) -> None:
        """All of it came: from here on it is a slot. Raises OSError."""
        assert self.is_whole, "not all of it came"
        self._platform.write_replacing(self.image + RECORD, self._record)
