"""Brings slots in memory to another node's carrier, keeps those of others, and gives them back.

    worker  --lend-->  Lending  --hold, hold_image-->  Lending of the peer  (holding.py)
    agent   --fetch->  Fetching  --slot, slot_image-->  Lending of the node that has it  (fetching.py)

Which step is sent all workers agree on (rounds.py). One slot is sent at a time, by a thread of its own, at a capped
rate; of each worker one waits at most, and its worker fills it again only when it has an answer. A slot is sent from
where the receiver has it up to: what broke off goes on. What is sent and received is checked block by block by who
receives it (filling.py), against a record which its writer made and whose SHA-256 is part of the digest in the commit
log. Nothing here holds up a save or ends a carrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import msgspec

from packtrain.checkpoint.asking import AGAIN_S, ASK_S, RESTART_S, Around, Patience, words
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.fetching import Fetching
from packtrain.checkpoint.filling import record_of
from packtrain.checkpoint.holding import Holding, is_true
from packtrain.checkpoint.link import Answer, Body, Reply, Request, body_of
from packtrain.checkpoint.peering import in_order, peers_of
from packtrain.checkpoint.slots import (
    RECORD,
    RECORD_BYTES_MAX,
    Whole,
    drop_slot,
    forget_slot,
    held_in,
    memory_folder,
    named_by,
    peer_folder,
)
from packtrain.core.errors import PacktrainError, PeerCopyFailed, PeerLost
from packtrain.core.platform import Platform
from packtrain.core.units import NS


class Lend(msgspec.Struct, frozen=True, tag_field="op", tag="lend"):
    """A worker's slot is whole, and is not filled again until this is answered."""

    id: int
    attempt: int
    step: int
    writer: str
    image: str
    of: int = 1
    """Writers of this node."""
    before: int = 0
    """As `Round.before`."""


Told = Callable[[dict[str, Any] | PacktrainError], None]
"""Hears, from any thread, how one request ended: what it did, or why not."""


class Lending:
    """One carrier's part. `deadline_s`: of one copy to a peer."""

    def __init__(
        self, platform: Platform, run_folder: str, begin: Commit, around: Around, deadline_s: float,
        warn: Callable[[PacktrainError], None] = lambda error: None,
    ) -> None:
        self.platform, self._begin, self._around = platform, begin, around
        self._folder = memory_folder(run_folder, around.node)
        self._deadline_s, self._warn = deadline_s, warn
        self.holding = Holding(platform, peer_folder(run_folder, around.node), begin)
        self.fetching = Fetching(platform, begin, self._folder, around, self.holding)
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[Lend, Told]] = {}
        self._lenders: set[str] = set()
        self._failing = False
        self._warns = False
        """Whether the last warning is still on its way."""
        self._warner = platform.crew(1)
        self._stopped = False
        self.sent = self.failed = 0
        """Slots that a peer has whole, and those that did not get there."""

    @property
    def answers(self) -> dict[str, Answer]:
        """What other carriers ask: op -> who answers."""
        return {
            "hold": self._on_hold, "hold_image": self._on_hold_image, "slot": self._on_slot,
            "slot_image": self._on_slot_image, "slot_bad": self._on_slot_bad,
        }

    def clean(self) -> None:
        """Drop what earlier attempts left that this one did not begin from: nobody can begin from it any more."""
        self.holding.clean()
        self.fetching.clean()
        with suppress(OSError):
            began = named_by(self._begin.memory, held_in(self.platform, self._folder)) if self._begin.memory else []
            for one in held_in(self.platform, self._folder):
                if one.slot.attempt < self._begin.attempt and one not in began:
                    drop_slot(self.platform, one.image)

    def start(self) -> None:
        self.clean()
        threading.Thread(target=self._send_all, daemon=True, name="lending").start()

    def stop(self, run_over: bool = False) -> None:
        """No more is sent. `run_over`: what is kept for others goes."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._warner.close()
        if run_over:
            self.holding.drop()

    # --- sending ---

    def lend(self, lend: Lend, told: Told) -> None:
        """A worker lends one slot, and another when that is over or its time is. So a carrier that was stopped for
        longer than a copy may take hears of several at once: the newest is sent, those before give way to it."""
        with self._changed:
            older = self._waiting.pop(lend.writer, None)
            self._waiting[lend.writer] = (lend, told)
            self._changed.notify_all()
        if older is not None:
            older[1](PeerCopyFailed(f"step {older[0].step} gave way to step {lend.step}", where=older[0].image))

    def _send_all(self) -> None:
        while (turn := self._next()) is not None:
            lend, told = turn
            told(self.bring(lend))

    def _next(self) -> tuple[Lend, Told] | None:
        """Wait for one; the earliest step first, so that what all workers have of it is together soon."""
        with self._changed:
            while not self._waiting and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return None
            return self._waiting.pop(min(self._waiting, key=lambda writer: (self._waiting[writer][0].step, writer)))

    def bring(self, lend: Lend) -> dict[str, Any] | PacktrainError:
        """This slot to the peer of this node, now: what that took, or why it did not get there."""
        began_ns = self.platform.boot_ns()
        try:
            peer = self._send(lend)
        except Exception as error:  # whatever it is, it costs one copy
            return self._failed(lend, error)
        self.sent, self._failing = self.sent + 1, False
        self._drop_what_was_begun_from(lend)
        return {"step": lend.step, "peer": peer, "seconds": (self.platform.boot_ns() - began_ns) / NS}

    def _peer(self) -> str:
        peer = peers_of(in_order(self._around.nodes()), self._around.domains).get(self._around.node)
        if peer is None:
            raise PeerLost("no other node is known yet", where=self._around.node)
        return peer

    def _failed(self, lend: Lend, error: Exception) -> PacktrainError:
        """Said once, and again when it had worked meanwhile; not waited for: the run's disk may hang."""
        found = PeerCopyFailed(
            f"step {lend.step} of {lend.writer} has no copy on another node: {words(error)}", where=lend.image,
            fix="training goes on and the next is sent as usual; until one arrives the loss of this node costs the "
            "steps since the last that did",
        )
        self.failed += 1
        if not self._failing:
            self._failing = True
            if not self._warns:
                self._warns = True
                self._warner.start(lambda: self._say(found))
        return found

    def _say(self, error: PacktrainError) -> None:
        """In the crew's thread."""
        try:
            self._warn(error)
        finally:
            self._warns = False

    def _send(self, lend: Lend) -> str:
        """To which peer. One whose carrier just went is waited for as long as it may take to come back, once: rounds go
        on at their pace where it stays away."""
        record = self.platform.read(lend.image + RECORD, 0, RECORD_BYTES_MAX)
        slot, sha256 = record_of(record, lend.image)
        patience = Patience(self.platform, self._deadline_s)

        def send() -> str:
            hold = {"op": "hold", "of": lend.of, "before": lend.before}
            peer = self._peer()
            with closing(self._around.reach(peer)) as client:
                at = client.ask(hold, body_of(record), timeout_s=patience.left_s(ASK_S))["at"]
                if at < slot.bytes:
                    image = {"op": "hold_image", "sha256": sha256, "at": at}
                    client.ask(image, self._image(lend.image, at, slot.bytes), timeout_s=patience.left_s())
            return peer

        return patience.tried(send, AGAIN_S if self._failing else RESTART_S)

    def _image(self, path: str, at: int, size: int) -> Body:
        """The rest of an image. A slot that its worker took away in between ends it."""

        def read(offset: int, view: memoryview) -> None:
            if self.platform.read_into(path, at + offset, view) != len(view):
                raise OSError(f"{path} is shorter than its record says")

        return Body(size - at, read)

    # --- keeping ---

    def _on_hold(self, request: Request) -> Reply:
        record = request.data(RECORD_BYTES_MAX)
        of, before = _whole_number(request, "of"), _whole_number(request, "before")
        return Reply({"at": self.holding.expect(record, of, before)})

    def _on_hold_image(self, request: Request) -> Reply:
        at = _whole_number(request, "at")
        self.holding.take(str(request.header.get("sha256")), at, request.take)
        return Reply({})

    # --- giving back ---

    def _kept(self) -> list[Whole]:
        return [*held_in(self.platform, self._folder), *self.holding.whole()]

    def _on_slot(self, request: Request) -> Reply:
        """The record of what the attempt began from."""
        writer = request.header.get("writer")
        if self._begin.memory is not None:
            for one in named_by(self._begin.memory, self._kept()):
                if one.slot.writer == writer:
                    return Reply({}, body_of(self.platform.read(one.image + RECORD, 0, RECORD_BYTES_MAX)))
        raise PeerCopyFailed(f"node {self._around.node} has no such slot of {writer}", where=self._folder)

    def _on_slot_image(self, request: Request) -> Reply:
        at, sha256 = _whole_number(request, "at"), request.header.get("sha256")
        for one in self._kept():
            if one.sha256 == sha256 and 0 <= at < one.slot.bytes:
                return Reply({}, self._image(one.image, at, one.slot.bytes))
        raise PeerCopyFailed(f"node {self._around.node} has that slot no more", where=self._folder)

    def _on_slot_bad(self, request: Request) -> Reply:
        writer, sha256 = str(request.header.get("writer")), str(request.header.get("sha256"))
        dropped = self.holding.distrust(writer, sha256)
        for one in held_in(self.platform, self._folder):
            if (one.slot.writer, one.sha256) == (writer, sha256) and not is_true(self.platform, one):
                forget_slot(self.platform, one.image)
                dropped = True
        return Reply({"dropped": dropped})

    # --- leftovers ---

    def _drop_what_was_begun_from(self, lend: Lend) -> None:
        """Slots brought here, once all writers have held a round and each worker of this node has a newer one on
        another node: theirs they drop themselves."""
        self._lenders.add(lend.writer)
        if self._begin.memory is not None and lend.before and len(self._lenders) >= lend.of:
            with suppress(OSError):
                for one in named_by(self._begin.memory, held_in(self.platform, self._folder)):
                    if one.slot.writer not in self._lenders:
                        drop_slot(self.platform, one.image)


def _whole_number(request: Request, name: str) -> int:
    value = request.header.get(name)
    if type(value) is not int or value < 0:
        raise PeerCopyFailed(f"{name} is {value!r}, no whole number", where="a carrier's request")
    return value
