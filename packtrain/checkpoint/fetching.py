"""Gets the slots that an attempt begins from to where the workers of this node look, from nodes that have them."""

from __future__ import annotations

import re
from contextlib import closing, suppress
from functools import partial
from typing import Any

import msgspec

from packtrain.checkpoint.asking import ASK_S, Around, Asking, Patience, words
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.filling import FIX, Filling, record_of
from packtrain.checkpoint.holding import Holding
from packtrain.checkpoint.link import Write
from packtrain.checkpoint.slots import RECORD, RECORD_BYTES_MAX, Memory, drop_slot, held_in, images_in, named_by
from packtrain.core.errors import PacktrainError, PeerCopyFailed, PeerLost, SlotDamaged
from packtrain.core.platform import Platform

FETCH_S = 600.0
"""For all slots that an attempt needs from elsewhere."""
_FETCHED = re.compile(r"[^/]+\.a\d+\.s\d+")
"""Names of images that came from elsewhere: no worker calls its own so."""


class Fetch(msgspec.Struct, frozen=True, tag_field="op", tag="fetch"):
    """Bring the slots that this attempt began from to where workers look: writer -> the node that has its slot."""

    id: int
    writers: dict[str, str]
    deadline_s: float = FETCH_S


class Fetching:
    """One node's. `folder`: where its workers look."""

    def __init__(self, platform: Platform, begin: Commit, folder: str, around: Around, holding: Holding) -> None:
        self._platform, self._begin, self._folder = platform, begin, folder
        self._around, self._holding = around, holding

    def fetch(self, fetch: Fetch) -> dict[str, Any] | PacktrainError:
        """All of these, one after the other. Names what failed first: then no worker can restore from memory."""
        patience, fetched = Patience(self._platform, fetch.deadline_s), 0
        for writer, node in sorted(fetch.writers.items()):
            try:
                fetched += self._fetch_one(writer, node, patience)
            except SlotDamaged as error:
                return SlotDamaged(f"{error.what}, fetched from node {node}", where=error.where, fix=error.fix)
            except Exception as error:  # whatever it is, the attempt begins from disk
                what = f"the slot of {writer} did not come from node {node}: {words(error)}"
                return PeerCopyFailed(what, where=self._folder, fix="nothing: the next attempt begins from disk")
        return {"fetched": fetched}

    def clean(self) -> None:
        """Drop what a carrier that was killed had only in part."""
        with suppress(OSError):
            whole = {one.image for one in held_in(self._platform, self._folder)}
            for image in images_in(self._platform, self._folder):
                if image not in whole and _FETCHED.fullmatch(image.rpartition("/")[2]):
                    drop_slot(self._platform, image)

    @property
    def _memory(self) -> Memory:
        """Raises PeerCopyFailed where the attempt did not begin from memory."""
        if self._begin.memory is None:
            raise PeerCopyFailed(f"attempt {self._begin.attempt} began from no memory", where=self._folder)
        return self._begin.memory

    def _fetch_one(self, writer: str, node: str, patience: Patience) -> int:
        """Bytes that came; 0: it is here already."""
        self._platform.mkdir(self._folder, 0o700)
        if not self._platform.is_private(self._folder):
            raise PeerCopyFailed(f"{self._folder} is not a folder of this user alone", where=self._folder)
        here = named_by(self._memory, held_in(self._platform, self._folder))
        if any(one.slot.writer == writer for one in here):
            return 0
        if node == self._around.node:
            return self._take_over(writer)
        with closing(self._around.reach(node)) as client:
            return self._received(client, writer, patience)

    def _take_over(self, writer: str) -> int:
        """What this node keeps for a peer gets a second name, where workers look."""
        for one in named_by(self._memory, self._holding.whole()):
            if one.slot.writer == writer:
                image = self._place(writer)
                self._platform.link(one.image, image)
                self._platform.link(one.image + RECORD, image + RECORD)
                return 0
        raise PeerCopyFailed(f"node {self._around.node} has no such slot of {writer}", where=self._holding.folder)

    def _place(self, writer: str) -> str:
        """Where a slot goes that comes from elsewhere; nothing lies there."""
        attempt, step, _ = self._memory
        image = f"{self._folder}/{writer}.a{attempt:04d}.s{step}"
        drop_slot(self._platform, image)
        return image

    def _received(self, client: Asking, writer: str, patience: Patience) -> int:
        record = self._record(client, writer, patience)
        filling = Filling(self._platform, self._place(writer), record)
        try:
            patience.tried(lambda: _get(client, filling, patience))
            filling.finish()
        except Exception as error:
            filling.close()
            drop_slot(self._platform, filling.image)
            if isinstance(error, SlotDamaged):
                with suppress(PacktrainError):  # the node that keeps it sees for itself
                    bad = {"op": "slot_bad", "writer": writer, "sha256": filling.sha256}
                    client.ask(bad, timeout_s=patience.left_s(ASK_S))
            raise
        return filling.slot.bytes

    def _record(self, client: Asking, writer: str, patience: Patience) -> bytes:
        """Of what the attempt began from."""
        came = bytearray()
        asked = {"op": "slot", "writer": writer}
        patience.tried(lambda: _ask_into(client, asked, came, patience))
        slot, _ = record_of(bytes(came), self._folder)
        if (slot.writer, slot.attempt, slot.step) != (writer, *self._memory[:2]):
            what = f"a slot of {slot.writer}, step {slot.step}, came for {writer}"
            raise SlotDamaged(what, where=self._folder, fix=FIX)
        return bytes(came)


def _ask_into(client: Asking, asked: dict[str, Any], came: bytearray, patience: Patience) -> None:
    """The body of the answer, which is a record."""

    def take(size: int) -> Write:
        if size > RECORD_BYTES_MAX:
            raise SlotDamaged(f"a record of {size} bytes", where="another node", fix=FIX)
        return partial(_put, came)

    came.clear()
    client.ask(asked, take=take, timeout_s=patience.left_s(ASK_S))


def _put(came: bytearray, offset: int, piece: memoryview) -> None:
    came[offset:] = piece


def _get(client: Asking, filling: Filling, patience: Patience) -> None:
    """What is missing of an image."""
    at = filling.checked
    asked = {"op": "slot_image", "sha256": filling.sha256, "at": at}
    try:
        client.ask(asked, take=lambda size: partial(_placed, filling, at), timeout_s=patience.left_s())
    except PeerLost:
        if filling.damage is not None:  # what came after it was too much to wait for
            raise filling.damage from None
        raise
    if not filling.is_whole:
        raise SlotDamaged(f"{filling.slot.writer} came short", where=filling.image, fix=FIX)


def _placed(filling: Filling, at: int, offset: int, piece: memoryview) -> None:
    filling.take(at + offset, piece)
