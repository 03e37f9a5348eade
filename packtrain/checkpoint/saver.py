"""The worker's half of a save: copy tensors into a memory-mapped file image and offer it to the carrier.

The worker never opens a durable disk, so a dead file system cannot hold it. Buffers are reused save after save, their
pages warm and their headers written once. Why no image is ever read half filled: a buffer is offered only when it is
whole, and is not touched again until its outcome has come. A worker killed while filling has offered nothing; one
killed later leaves a whole image behind. A carrier that is given up (it may only hang, and read on later) reads
what it was offered or nothing: the saver offers that file again to the next carrier, then drops it and goes on under a
new name, and so does every new attempt.

With a memory tier (slots.py) there are three buffers, and each state copied gets a record: one slot is whole, one is
being filled, one is written away. A save on disk is offered from the slot of its step where there is one. With copies
on a peer there are two more: the slot of a round (rounds.py), lent to the carrier, which sends it to another node
(lending.py), and that of the round before, which stays until the next begins.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.format import ImageLayout, LocalTensor
from packtrain.checkpoint.rounds import NEVER, Round
from packtrain.checkpoint.slots import BUFFERS, LENT, SLOTS, Buffer, BufferFolder, Slot, adoptable, drop_left_behind
from packtrain.core.bulk import Crew
from packtrain.core.contract import CarrierClient
from packtrain.core.errors import CarrierLost, PacktrainError, SaveFailed
from packtrain.core.platform import Platform
from packtrain.core.units import NS, bytes_text

MARGIN_S = 5.0
"""How long after its deadline an outcome is still waited for: the carrier notices a deadline only when it is over."""
DEADLINE_S_MIN = 0.1
"""A save without any time left is offered all the same: its failure names what was in the way."""
_OWN_PLACE = ("data_index", "plan_hash", "seed", "code_hash")


class SaveResult(NamedTuple):
    """How one save ended. `commit` 0: it was not published as far as is known, and `error` says why."""

    step: int
    commit: int
    bytes: int
    """Of the images of all writers where this node's carrier published it; else of those it knows of, or this one."""
    stall_s: float
    """How long `save` held the caller."""
    write_s: float
    """From offer to outcome, as the carrier measured it."""
    error: dict[str, str] | None = None
    """name, what, where, fix."""
    ticket: int = 0


@dataclass
class _Pending:
    """A save that was offered and has no outcome yet."""

    step: int
    bytes: int
    offered_ns: int
    buffer: Buffer
    deadline_s: float
    message: dict[str, Any]
    stall_s: float = 0.0
    given_up: bool = False
    """Told to have failed; an outcome may come all the same."""
    lost: bool = False
    """Its carrier was lost: it is offered again to the next one."""


class Saver:
    """One writer's saves, used from one thread. `buffer_folder`: see `choose_buffer_folder`; made if absent, 0700.

    `begun`: the record that began the attempt; without it there is no memory tier, whatever room there is.
    `peers`: it takes part in rounds; what is remembered in one is lent to the carrier for another node, if there is
    room. `local_writers`: of this node.
    """

    def __init__(
        self, platform: Platform, buffer_folder: str | BufferFolder, client: CarrierClient, attempt: int, writer: str,
        deadline_s: float, begun: Commit | None = None, peers: bool = False, local_writers: int = 1,
    ) -> None:
        assert fmt.is_writer(writer), f"{writer!r} cannot be part of a file name"
        where = BufferFolder(buffer_folder) if isinstance(buffer_folder, str) else buffer_folder
        self.fallback = where.fallback
        """Why the buffers lie on the run's own disk and not in memory, in words; empty: nobody wanted otherwise."""
        self.remembers = where.slots and begun is not None
        """Whether there is a memory tier."""
        platform.mkdir(where.path, 0o700)
        kept = adoptable(platform, where.path, begun, writer)
        drop_left_behind(platform, where.path, writer, kept)
        self.skipped = 0
        """Saves that found no free buffer, or the carrier busy or gone."""
        self.skip_reason = ""
        """Of the latest one."""
        self.forgot = 0
        """Memory saves that found no free slot, or no room."""
        self.copied = self.not_copied = 0
        """Rounds in which another node got the slot, and those in which it did not."""
        self._told_of = (0, 0)
        self._platform, self._folder = platform, where.path
        self._client = client
        self._attempt = attempt
        self._writer = writer
        self._deadline_s = deadline_s
        self._lends = self.remembers and peers and where.lends
        self._local_writers = local_writers
        self._round = Round(0, 0)
        self._round_ended = 0
        self._copied_by_ns = 0
        """When the round ends here, copied or not."""
        self._on_loan: tuple[int, Buffer] | None = None
        """Ticket, and what the carrier may read under it."""
        images = (SLOTS if self.remembers else BUFFERS) + (LENT if self._lends else 0)
        self._buffers = [Buffer(f"{where.path}/{writer}.a{attempt:04d}.{i}") for i in range(images)]
        self._nonce = begun.nonce if begun is not None else ""
        self._crew: Crew | None = platform.crew(1) if self.remembers else None
        self._sealed: Callable[[], None] | None = None
        """Waits for the record of the slot filled last."""
        self._may_be_sealed = threading.Event()
        self._filled_last: Buffer | None = None
        self._whole: Buffer | None = None
        """The slot that a restart would take: it is filled again only when another is whole."""
        if kept is not None and self.remembers:
            self._whole = self._buffers[-1]
            self._whole.adopt(kept.image, kept.slot.step)
        self._began_from = self._whole.step if self._whole is not None else 0
        """Step of the slot that this attempt began from; 0: not from memory."""
        self._kept = {self._began_from} if peers else set()
        """Steps whose slots a round needs: they are not filled again."""
        self._pending: dict[int, _Pending] = {}
        self._results: list[SaveResult] = []
        self._ticket = 0
        self._published: SaveResult | None = None
        self._layout: ImageLayout | None = None
        self._planned: list[tuple[fmt.TensorSpec, fmt.Box]] = []
        self._tables: dict[str, Any] = {}

    def save(
        self, step: int, tensors: Sequence[LocalTensor], meta: dict[str, Any], deadline_s: float | None = None
    ) -> int | None:
        """Copy and offer. Returns when the copy is done and accepted: the ticket that its SaveResult will carry.

        None: no free buffer, or the carrier is busy or gone; skipped and counted, to be tried at the next occasion (for
        the last save of a program: after `wait_all`). `meta`: JSON; data_index, plan_hash, seed and code_hash get their
        own place in the manifest. A step on its way or published already is not saved twice. `deadline_s`: of this one
        save, where the time left is less than usual; the carrier then says in time what was in the way.
        """
        begun_ns = self._platform.boot_ns()
        self._hear()
        known = self._known(step)
        if known is not None:
            return known
        layout = self._plan(tensors)
        try:
            slot = self._holds(step)
            buffer = slot if slot and not slot.held else self._copied(step, layout, tensors, meta)
        except SaveFailed as failure:
            return self._fail(step, layout.bytes_total, failure)
        if buffer is None:
            self._skip("all buffers are held by saves that have not ended")
            return None
        deadline_s = self._deadline_s if deadline_s is None else max(deadline_s, DEADLINE_S_MIN)
        message = self._message(step, buffer, layout, meta) | {"deadline_s": deadline_s}
        if not self._offer(message, buffer):
            return None
        stall_s = (self._platform.boot_ns() - begun_ns) / NS
        offered_ns = self._platform.boot_ns()
        self._pending[self._ticket] = _Pending(
            step, layout.bytes_total, offered_ns, buffer, deadline_s, message, stall_s
        )
        buffer.held = True
        return self._ticket

    def remember(
        self, step: int, tensors: Sequence[LocalTensor], meta: dict[str, Any], begins: Round | None = None
    ) -> float | None:
        """Copy into a slot of the memory tier; returns when the copy is done, with the seconds that took.

        It is whole soon after, when a thread has summed it up. None: no slot is free, or there is no room; counted.
        `begins`: the round that does with this step, for all writers.
        """
        assert self.remembers, "there is no memory tier"
        begun_ns = self._platform.boot_ns()
        self._hear()
        if begins is not None:
            self._round, self._kept = begins, {begins.step, begins.before or self._began_from}
            self._copied_by_ns = self._after(self._deadline_s)
        try:
            if self._holds(step) or self._copied(step, self._plan(tensors), tensors, meta):
                return (self._platform.boot_ns() - begun_ns) / NS
        except SaveFailed as failure:
            self.skip_reason = failure.what
        self.forgot += 1
        return None

    @property
    def round_ended(self) -> int:
        """For `Rounds.begins`: the step of the last round that has ended here, negative if it was not held."""
        return self._round_ended if self.remembers else NEVER

    def peer_news(self) -> tuple[int, int]:
        """Since the last call: slots that another node has now, and those that did not get there."""
        before, self._told_of = self._told_of, (self.copied, self.not_copied)
        return self._told_of[0] - before[0], self._told_of[1] - before[1]

    def forget(self) -> None:
        """No attempt is to begin from what is held in memory: records go, images that are being written away stay."""
        self._wait_for_record()
        self._whole = self._filled_last = None
        self._kept = set()
        for buffer in self._buffers:
            with suppress(OSError):
                buffer.forget(self._platform)

    def poll(self) -> list[SaveResult]:
        """Saves that have ended since the last call. Does not wait."""
        self._hear()
        self._go_on_with_round()
        now_ns = self._platform.boot_ns()
        for ticket, pending in self._pending.items():
            overdue = now_ns - pending.offered_ns > (pending.deadline_s + MARGIN_S) * NS
            if overdue and not pending.given_up:
                pending.given_up = True
                self._results.append(_result(ticket, pending, error=self._no_outcome(pending)))
        ended, self._results = self._results, []
        return ended

    def wait_all(self, deadline_s: float) -> list[SaveResult]:
        """Wait until every save has ended, `deadline_s` at most in all; returns what `poll` would.

        The slot filled last is whole then.
        """
        self._wait_for_record()
        end_ns = self._platform.boot_ns() + int(deadline_s * NS)
        for ticket in [ticket for ticket, pending in self._pending.items() if not pending.given_up]:
            left_s = max(0.0, (end_ns - self._platform.boot_ns()) / NS)
            outcome = self._client.wait(ticket, left_s)
            if outcome is not None:
                self._settle(outcome)
        return self.poll()

    def close(self) -> None:
        """Drop the buffers. Those of saves that have not ended stay, for the carrier, and so do the slots that hold
        more than was published: the next attempt may begin from the newest, or from that of a round."""
        self._wait_for_record()
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.lost]:
            self._release(ticket)
        published = self._published.step if self._published is not None else -1
        for buffer in self._buffers:
            needed = (buffer is self._whole or buffer.step in self._kept) and buffer.step > published
            if not (buffer.held or needed):
                buffer.renew(self._platform)
        if self._crew is not None:
            self._crew.close()
        with suppress(OSError):
            self._platform.rmdir(self._folder)  # refused while it holds anything
        self._client.close()

    # --- pieces of save ---

    def _hear(self) -> None:
        for outcome in self._client.outcomes():
            self._settle(outcome)
        for ticket in [ticket for ticket, pending in self._pending.items() if pending.lost]:
            self._offer_again(ticket, self._pending[ticket])

    def _holds(self, step: int) -> Buffer | None:
        """The slot filled last, if it holds this step and nobody removed it: no second copy is made."""
        last = self._filled_last
        return last if last is not None and last.step == step and self._platform.exists(last.path) else None

    def _copied(
        self, step: int, layout: ImageLayout, tensors: Sequence[LocalTensor], meta: dict[str, Any]
    ) -> Buffer | None:
        """The state, copied into a free buffer; None: all are in use. Raises SaveFailed."""
        self._wait_for_record()
        buffer = self._filled(layout, tensors)
        if buffer is not None and self._crew is not None:
            buffer.step, self._filled_last = step, buffer
            slot = self._slot(step, layout, tensors, meta)
            self._may_be_sealed.clear()
            self._sealed = self._crew.start(partial(self._seal, buffer, slot))
        return buffer

    def _seal(self, buffer: Buffer, slot: Slot) -> None:
        """In the crew's thread."""
        try:
            buffer.seal(self._platform, slot)
        finally:
            self._may_be_sealed.set()

    def _filled(self, layout: ImageLayout, tensors: Sequence[LocalTensor]) -> Buffer | None:
        """The first free buffer that takes it: where there is no room for a new one, one that has its room does."""
        failure: SaveFailed | None = None
        for buffer in self._free():
            try:
                if buffer.lent:
                    buffer.renew(self._platform)
                buffer.fill(self._platform, layout, tensors)
                return buffer
            except OSError as error:
                failure = failure or _no_buffer(error, buffer.path, layout.bytes_total)
                buffer.renew(self._platform)
        if failure is not None:
            raise failure
        return None

    def _slot(
        self, step: int, layout: ImageLayout, tensors: Sequence[LocalTensor], meta: dict[str, Any]
    ) -> Slot:
        return Slot(
            begin=self._nonce, attempt=self._attempt, step=step, writer=self._writer, bytes=layout.bytes_total,
            tensors=tuple(dict.fromkeys(tensor.spec for tensor in tensors)), boxes=layout.boxes, about=_about(meta),
        )

    def _free(self) -> list[Buffer]:
        """Buffers that nobody needs, that with the oldest state first. Where there is no room for lending there is none
        for what a round needs either: that goes last."""
        on_loan = self._on_loan[1] if self._on_loan is not None else None
        free = [
            buffer for buffer in self._buffers if not buffer.held and buffer not in (self._whole, on_loan)
            and not (self._lends and buffer.step in self._kept)
        ]
        return sorted(free, key=lambda buffer: (buffer.step in self._kept, buffer.step))

    def _wait_for_record(self) -> None:
        """Of the slot filled last. One that could not be written: the slot before stays the whole one."""
        if self._sealed is None:
            return
        try:
            self._sealed()
            self._whole = self._filled_last
        except OSError as error:
            self.forgot += 1
            if self._filled_last is not None and self._filled_last.step == self._round.step:
                self._not_held()
            self.skip_reason = f"the record of a slot cannot be written: {error}"
        self._sealed = None

    # --- rounds ---

    def _go_on_with_round(self) -> None:
        """Lend its slot as soon as that is whole: one short line, and nothing is waited for. A carrier that cannot be
        told, or does not answer in time, ends the round as a copy does that did not arrive: no rank waits on for it."""
        if self._may_be_sealed.is_set():
            self._wait_for_record()
        if abs(self._round_ended) == self._round.step:
            return
        slot = next((buffer for buffer in self._buffers if buffer.step == self._round.step), None)
        buffer = self._on_loan[1] if self._on_loan is not None else slot
        if buffer is None:
            self._not_held()
        elif buffer is self._filled_last and self._sealed is not None:
            return
        elif not self._lends:
            self._round_ended = self._round.step
        elif self._platform.boot_ns() > self._copied_by_ns:
            self._returned(buffer, {})
        elif self._on_loan is None:
            self._lend(buffer)

    def _after(self, deadline_s: float) -> int:
        """When what has that deadline is over."""
        return self._platform.boot_ns() + int((deadline_s + MARGIN_S) * NS)

    def _not_held(self) -> None:
        self.not_copied += self._lends
        self._round_ended = -self._round.step

    def _lend(self, buffer: Buffer) -> None:
        self._ticket += 1
        told = self._client.tell({
            "op": "lend", "id": self._ticket, "attempt": self._attempt, "step": buffer.step, "writer": self._writer,
            "image": buffer.path, "of": self._local_writers, "before": self._round.before,
        })
        if told:
            self._on_loan = self._ticket, buffer
            self._copied_by_ns = self._after(self._deadline_s * self._local_writers)  # the node sends one at a time

    def _returned(self, buffer: Buffer, outcome: dict[str, Any]) -> None:
        self._on_loan, self._round_ended = None, self._round.step
        if outcome.get("ok") is True:
            self.copied += 1
            return
        self.not_copied += 1
        if outcome.get("ok") is None:
            self._leave(buffer)  # no answer of the carrier's own: it was lost or hangs, and may read on

    def _known(self, step: int) -> int | None:
        """The ticket of a save of this step that is on its way; of one published already, ended once more at once."""
        for ticket, pending in self._pending.items():
            if pending.step == step and not pending.given_up:
                return ticket
        if self._published is None or self._published.step != step:
            return None
        self._ticket += 1
        self._results.append(self._published._replace(ticket=self._ticket, stall_s=0.0, write_s=0.0))
        return self._ticket

    def _plan(self, tensors: Sequence[LocalTensor]) -> ImageLayout:
        pieces = [(tensor.spec, tensor.box) for tensor in tensors]
        if self._layout is None or pieces != self._planned:
            self._layout, self._planned = fmt.plan_image(pieces), pieces
            specs = list(dict.fromkeys(spec for spec, _ in pieces))
            self._tables = {"tensors": msgspec.to_builtins(specs), "boxes": msgspec.to_builtins(self._layout.boxes)}
        return self._layout

    def _message(self, step: int, buffer: Buffer, layout: ImageLayout, meta: dict[str, Any]) -> dict[str, Any]:
        self._ticket += 1
        return {
            "id": self._ticket, "attempt": self._attempt, "step": step, "writer": self._writer, "buffer": buffer.path,
            "bytes": layout.bytes_total,
            **_about(meta), **self._tables,
        }

    def _offer(self, message: dict[str, Any], buffer: Buffer) -> bool:
        try:
            if self._client.offer(message) == "accepted":
                return True
            self._skip("the carrier is busy with earlier saves")
        except CarrierLost as error:
            self._leave(buffer)  # it may have accepted without our hearing of it
            self._skip(error.what)
        return False

    def _leave(self, buffer: Buffer) -> None:
        """To a carrier that may read on; what a restart would take stays where it is, and is not filled again."""
        buffer.lent = True
        if self._crew is None and not buffer.held:
            buffer.renew(self._platform)

    def _skip(self, reason: str) -> None:
        self.skipped += 1
        self.skip_reason = reason

    def _fail(self, step: int, size: int, error: PacktrainError) -> int:
        self._ticket += 1
        self._results.append(SaveResult(step, 0, size, 0.0, 0.0, error.as_dict(), self._ticket))
        return self._ticket

    # --- outcomes ---

    def _settle(self, outcome: dict[str, Any]) -> None:
        if self._on_loan is not None and outcome["id"] == self._on_loan[0]:
            return self._returned(self._on_loan[1], outcome)
        if outcome.get("ok") is None:
            return self._lost(outcome)
        pending = self._release(outcome["id"])
        if pending is None:
            return
        published = outcome["ok"] is True
        error = None if published else dict(outcome.get("error") or {})
        result = _result(
            outcome["id"], pending, int(outcome.get("commit") or 0), float(outcome.get("write_s") or 0.0), error
        )
        result = result._replace(bytes=int(outcome.get("bytes") or result.bytes))
        if published:
            self._published = result
        if published or not pending.given_up:
            self._results.append(result)

    def _release(self, ticket: int) -> _Pending | None:
        """It has ended: nobody needs its buffer, and one that a lost carrier may read on is not filled again."""
        pending = self._pending.pop(ticket, None)
        if pending is not None:
            pending.buffer.held = False
            if pending.buffer.lent:
                self._leave(pending.buffer)
        return pending

    def _lost(self, outcome: dict[str, Any]) -> None:
        """No outcome of the carrier's own: it was lost and may read on. Told as failed, and offered to the next one."""
        ticket = outcome["id"]
        pending = self._pending.get(ticket)
        if pending is None:
            return
        self._leave(pending.buffer)
        pending.lost = True
        if not pending.given_up:
            pending.given_up = True
            self._results.append(_result(ticket, pending, error=dict(outcome.get("error") or {})))

    def _offer_again(self, ticket: int, pending: _Pending) -> None:
        """The same image, where its time is not over and nothing later went its way: steps go forward."""
        left_s = pending.deadline_s - (self._platform.boot_ns() - pending.offered_ns) / NS
        later = [one.step for one in self._pending.values() if not one.lost]
        newest = max([self._published.step if self._published is not None else -1, *later], default=-1)
        if left_s <= DEADLINE_S_MIN or newest >= pending.step:
            self._release(ticket)
        elif self._client.reachable:
            with suppress(CarrierLost):  # the next one may take it
                pending.lost = self._client.offer(pending.message | {"deadline_s": left_s}) != "accepted"

    def _no_outcome(self, pending: _Pending) -> dict[str, str]:
        return SaveFailed(
            f"step {pending.step} has no outcome {pending.deadline_s + MARGIN_S:.0f} s after it was offered",
            where=pending.buffer.path, fix="see whether the disk of the run hangs; its buffer stays taken until then",
        ).as_dict()


def _about(meta: dict[str, Any]) -> dict[str, Any]:
    """As a manifest has it."""
    rest = {key: value for key, value in meta.items() if key not in _OWN_PLACE}
    return {**{key: meta[key] for key in _OWN_PLACE if key in meta}, "meta": rest}


def _result(
    ticket: int, pending: _Pending, commit: int = 0, write_s: float = 0.0, error: dict[str, str] | None = None
) -> SaveResult:
    return SaveResult(pending.step, commit, pending.bytes, pending.stall_s, write_s, error, ticket)


def _no_buffer(error: OSError, path: str, size: int) -> SaveFailed:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return SaveFailed(
        f"no room for a buffer of {bytes_text(size)}" if full else f"the buffer cannot be filled: {error}",
        where=path, fix="free memory or disk space there; the save is tried again at the next occasion",
    )
