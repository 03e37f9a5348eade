"""Slots that this node keeps in memory for another one: what survives the loss of a node.

    <memory folder>.peers/r00003.a0007.s1200.5d41402a         an image, whole or arriving
    <memory folder>.peers/r00003.a0007.s1200.5d41402a.json    its record, as its writer wrote it: it is whole

Of each writer the slot of the last round that all writers held (rounds.py) stays while another arrives, so two images
at most; what else of that writer lies there goes first. One arrives at a time. Slots that this attempt began from, of
writers that are now on other nodes, stay until a round of its own was held by all; what no attempt can begin from any
more goes at the start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.filling import Filling, record_of
from packtrain.checkpoint.slots import (
    MEMORY_FOLDER,
    MEMORY_SHARE_MAX,
    Slot,
    Whole,
    drop_folder,
    drop_slot,
    held_in,
    images_in,
)
from packtrain.core.errors import PeerCopyFailed
from packtrain.core.memory import budget_for
from packtrain.core.platform import Platform

WRITERS_MAX = 64
"""Of one node."""
FIX = "nothing: the next copy is sent as usual; until one arrives a loss of that node costs the steps since the last"


class Holding:
    """The folder of slots of others on one node, used by threads. `begin`: the attempt whose slots are taken in."""

    def __init__(self, platform: Platform, folder: str, begin: Commit) -> None:
        self.folder = folder
        self._platform, self._begin = platform, begin
        self._lock = threading.Lock()
        self._arriving: Filling | None = None
        self._taking = False
        """Whether a connection fills it just now."""
        self._turn = 0
        """Counts those: one that was begun anew, while the old one may only hang, has lost its turn."""

    def clean(self) -> None:
        """Drop what no attempt can begin from any more: all but this attempt's and what it began from itself."""
        with self._lock, suppress(OSError):
            whole = {one.image for one in self._whole() if self._may_matter(one.slot)}
            for image in self._images():
                if image not in whole:
                    drop_slot(self._platform, image)

    def drop(self) -> None:
        """The run is over: nothing stays."""
        with self._lock, suppress(OSError):
            self._leave()
            drop_folder(self._platform, self.folder)

    def whole(self) -> list[Whole]:
        """What is kept here. Raises OSError."""
        with self._lock:
            return self._whole()

    # --- taking in ---

    def expect(self, record: bytes, of: int, before: int) -> int:
        """A slot is to come, from a node with `of` writers: the byte of its image from which on it is missing here.
        `before`: as `Round.before`.

        Raises PeerCopyFailed where it is not taken, SlotDamaged for a damaged record, OSError.
        """
        slot, sha256 = record_of(record, self.folder)
        with self._lock:
            known = [one for one in self._open() if one.slot.writer == slot.writer]
            if any(one.sha256 == sha256 for one in known):
                return slot.bytes
            self._refuse_odd(slot, known, of)
            if self._arriving is not None and self._arriving.sha256 == sha256:
                return self._gone_on_with(self._arriving)
            self._make_room(slot, known, before)
            image = f"{self.folder}/{slot.writer}.a{slot.attempt:04d}.s{slot.step}.{sha256[:8]}"
            self._arriving = Filling(self._platform, image, record)
            return 0

    def take(self, sha256: str, at: int, receive: Callable[[Callable[[int, memoryview], None]], None]) -> None:
        """Take in the image that is expected, from byte `at` on. `receive` hands pieces of it over, each with its place
        after `at`. Raises PeerCopyFailed, SlotDamaged, OSError, and what `receive` raises.
        """
        with self._lock:
            filling = self._arriving
            if filling is None or filling.sha256 != sha256:
                raise self._refused("that slot is not expected here")
            self._turn += 1
            turn = self._turn
            self._taking = True

        try:
            receive(partial(self._place, filling, turn, at))
        finally:
            with self._lock:
                self._taking = self._taking and turn != self._turn
        with self._lock:
            if turn == self._turn:
                self._finish_whole()

    def _place(self, filling: Filling, turn: int, at: int, offset: int, piece: memoryview) -> None:
        with self._lock:
            if turn != self._turn:
                raise self._refused("its sender has begun anew")
            filling.take(at + offset, piece)

    def distrust(self, writer: str, sha256: str) -> bool:
        """Somebody found that slot damaged: look, and where that is so no attempt begins from it. Raises OSError."""
        with self._lock:
            bad = [
                one for one in self._whole()
                if (one.slot.writer, one.sha256) == (writer, sha256) and not is_true(self._platform, one)
            ]
            for one in bad:
                drop_slot(self._platform, one.image)
        return bool(bad)

    # --- pieces; the lock is held ---

    def _open(self) -> list[Whole]:
        self._platform.mkdir(self.folder, 0o700)
        if not self._platform.is_private(self.folder):
            raise self._refused(f"{self.folder} is not a folder of this user alone")
        return self._whole()

    def _whole(self) -> list[Whole]:
        return held_in(self._platform, self.folder)

    def _images(self) -> list[str]:
        return images_in(self._platform, self.folder)

    def _may_matter(self, slot: Slot) -> bool:
        memory = self._begin.memory
        began = memory is not None and (slot.attempt, slot.step) == memory[:2]
        return began or slot.begin == self._begin.nonce

    def _leave(self) -> None:
        """What was arriving is not waited for any more."""
        if self._arriving is not None:
            self._arriving.close()
        self._arriving, self._taking = None, False
        self._turn += 1

    def _gone_on_with(self, filling: Filling) -> int:
        """From which byte on it is missing."""
        self._turn += 1
        if filling.damage is not None:
            raise filling.damage
        self._finish_whole()
        return filling.checked

    def _finish_whole(self) -> None:
        """What arrives, if all of it came. Where its record could not be written that is tried with the next word."""
        filling = self._arriving
        if filling is not None and filling.is_whole:
            filling.finish()
            self._arriving = None

    def _refuse_odd(self, slot: Slot, known: Sequence[Whole], of: int) -> None:
        if slot.begin != self._begin.nonce or slot.writer not in self._begin.writers or not 0 < of <= WRITERS_MAX:
            what = f"a slot of {slot.writer}, attempt {slot.attempt}"
            raise self._refused(f"{what}, is none of attempt {self._begin.attempt}")
        if self._taking and self._arriving is not None and self._arriving.slot.writer != slot.writer:
            raise self._refused("another slot is arriving")
        newest = max((_age(one.slot) for one in known), default=(-1, -1))
        if _age(slot) < newest:
            raise self._refused(f"step {slot.step} of {slot.writer} is older than what is kept here")

    def _make_room(self, slot: Slot, known: Sequence[Whole], before: int) -> None:
        """Keep what its round needs, of what was arriving nothing; then see that the new one fits."""
        keep = self._needed(known, before)
        self._leave()
        whole = {
            one.image for one in self._whole()
            if one.slot.writer != slot.writer and not (before and one.slot.begin != slot.begin)
        }
        for image in self._images():
            if image not in whole and (keep is None or image != keep.image):
                drop_slot(self._platform, image)
        kept = sum(one.slot.bytes for one in self._whole())
        lack = budget_for(self._platform, MEMORY_FOLDER, MEMORY_SHARE_MAX, kept).lack(1, slot.bytes, kept)
        if lack:
            raise self._refused(lack)

    def _needed(self, known: Sequence[Whole], before: int) -> Whole | None:
        """Of one writer's slots that of the round before, or what this attempt began from; the newest where neither is
        here."""
        began, attempt = self._begin.memory, self._begin.attempt
        wanted = began[:2] if began is not None and not before else (attempt, before)
        return max(known, key=lambda one: (_age(one.slot) == wanted, _age(one.slot)), default=None)

    def _refused(self, what: str) -> PeerCopyFailed:
        return PeerCopyFailed(what, where=self.folder, fix=FIX)


def _age(slot: Slot) -> tuple[int, int]:
    return slot.attempt, slot.step


def is_true(platform: Platform, one: Whole) -> bool:
    """Whether each block of the image is as its record says. Raises OSError."""
    slot, size = one.slot, one.slot.block_bytes
    return all(
        fmt.crc32c(platform.read(one.image, number * size, min(size, slot.bytes - number * size))) == crc
        for number, crc in enumerate(slot.crc32c)
    )
