"""The worker's half of a save: copy tensors into a memory-mapped file image and offer it to the carrier.

The worker never opens a durable disk, so a dead file system cannot hold it. Two buffers are reused save after save,
their pages warm and their headers written once. Why no image is ever read half filled: a buffer is offered only when it
is whole, and is not touched again until its outcome has come. A worker killed while filling has offered nothing; one
killed later leaves a whole image behind. A carrier that is given up (it may only hang, and read on later) keeps the old
file's name to itself: the saver drops that file and goes on under a new name, and so does every new attempt.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.format import ImageLayout, LocalTensor
from packtrain.core.contract import CarrierClient
from packtrain.core.errors import CarrierLost, PacktrainError, SaveFailed
from packtrain.core.platform import Platform
from packtrain.core.units import NS, bytes_text

BUFFERS = 2
MARGIN_S = 5.0
"""How long after its deadline an outcome is still waited for: the carrier notices a deadline only when it is over."""
DEADLINE_S_MIN = 0.1
"""A save without any time left is offered all the same: its failure names what was in the way."""
MEMORY_FOLDER = "/dev/shm"
MEMORY_SHARE_MAX = 0.5
"""Of what is free there."""
_OWN_PLACE = ("data_index", "plan_hash", "seed", "code_hash")


class SaveResult(NamedTuple):
    """How one save ended. `commit` 0: it was not published as far as is known, and `error` says why."""

    step: int
    commit: int
    bytes: int
    stall_s: float
    """How long `save` held the caller."""
    write_s: float
    """From offer to outcome, as the carrier measured it."""
    error: dict[str, str] | None = None
    """name, what, where, fix."""
    ticket: int = 0


class BufferFolder(NamedTuple):
    """Where buffers lie. `fallback`: why not in memory, in words for a warning; empty: they are in memory."""

    path: str
    fallback: str = ""


class Buffer:
    """One mapped file. Its pages are reserved when it is made: a full tmpfs is an error then, not a SIGBUS later."""

    def __init__(self, stem: str) -> None:
        self.held = False
        self._stem = stem
        self._generation = 0
        self._map: mmap.mmap | None = None
        self._header = b""

    @property
    def path(self) -> str:
        return f"{self._stem}.g{self._generation}"

    def fill(self, layout: ImageLayout, tensors: Sequence[LocalTensor]) -> None:
        if self._map is None or self._header != layout.header:
            self._map = self._mapped(layout)
            self._header = layout.header
        for index, tensor in enumerate(tensors):
            layout.fill(self._map, index, tensor.array)

    def _mapped(self, layout: ImageLayout) -> mmap.mmap:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, layout.bytes_total)
            os.posix_fallocate(fd, 0, layout.bytes_total)
            mapped = mmap.mmap(fd, layout.bytes_total)
        finally:
            os.close(fd)
        layout.fill_header(mapped)
        return mapped

    def renew(self, platform: Platform) -> None:
        """Leave the file to whoever may still read it: its name goes, the next fill makes another."""
        with suppress(OSError):
            platform.unlink(self.path)
        self._generation += 1
        self._map = None


@dataclass
class _Pending:
    """A save that was offered and has no outcome yet."""

    step: int
    bytes: int
    offered_ns: int
    buffer: Buffer
    deadline_s: float
    stall_s: float = 0.0
    given_up: bool = False


class Saver:
    """One writer's saves, used from one thread. `buffer_folder`: see `choose_buffer_folder`; made if absent, 0700."""

    def __init__(
        self, platform: Platform, buffer_folder: str | BufferFolder, client: CarrierClient, attempt: int, writer: str,
        deadline_s: float,
    ) -> None:
        assert fmt.is_writer(writer), f"{writer!r} cannot be part of a file name"
        where = BufferFolder(buffer_folder) if isinstance(buffer_folder, str) else buffer_folder
        self.fallback = where.fallback
        """Why the buffers lie on the run's own disk and not in memory, in words; empty: nobody wanted otherwise."""
        platform.mkdir(where.path, 0o700)
        _drop_left_behind(platform, where.path, writer)
        self.skipped = 0
        """Saves that found no free buffer, or the carrier busy or gone."""
        self.skip_reason = ""
        """Of the latest one."""
        self._platform, self._folder = platform, where.path
        self._client = client
        self._attempt = attempt
        self._writer = writer
        self._deadline_s = deadline_s
        self._buffers = [Buffer(f"{where.path}/{writer}.a{attempt:04d}.{i}") for i in range(BUFFERS)]
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
        for outcome in self._client.outcomes():
            self._settle(outcome)
        known = self._known(step)
        if known is not None:
            return known
        buffer = next((buffer for buffer in self._buffers if not buffer.held), None)
        if buffer is None:
            self._skip("both buffers are held by saves that have not ended")
            return None
        layout = self._plan(tensors)
        try:
            buffer.fill(layout, tensors)
        except OSError as error:
            failure = _no_buffer(error, buffer.path, layout.bytes_total)
            buffer.renew(self._platform)
            return self._fail(step, layout.bytes_total, failure)
        deadline_s = self._deadline_s if deadline_s is None else max(deadline_s, DEADLINE_S_MIN)
        message = self._message(step, buffer, layout, meta) | {"deadline_s": deadline_s}
        if not self._offer(message, buffer):
            return None
        stall_s = (self._platform.boot_ns() - begun_ns) / NS
        offered_ns = self._platform.boot_ns()
        self._pending[self._ticket] = _Pending(step, layout.bytes_total, offered_ns, buffer, deadline_s, stall_s)
        buffer.held = True
        return self._ticket

    def poll(self) -> list[SaveResult]:
        """Saves that have ended since the last call. Does not wait."""
        for outcome in self._client.outcomes():
            self._settle(outcome)
        now_ns = self._platform.boot_ns()
        for ticket, pending in self._pending.items():
            overdue = now_ns - pending.offered_ns > (pending.deadline_s + MARGIN_S) * NS
            if overdue and not pending.given_up:
                pending.given_up = True
                self._results.append(_result(ticket, pending, error=self._no_outcome(pending)))
        ended, self._results = self._results, []
        return ended

    def wait_all(self, deadline_s: float) -> list[SaveResult]:
        """Wait until every save has ended, `deadline_s` at most in all; returns what `poll` would."""
        end_ns = self._platform.boot_ns() + int(deadline_s * NS)
        for ticket in [ticket for ticket, pending in self._pending.items() if not pending.given_up]:
            left_s = max(0.0, (end_ns - self._platform.boot_ns()) / NS)
            outcome = self._client.wait(ticket, left_s)
            if outcome is not None:
                self._settle(outcome)
        return self.poll()

    def close(self) -> None:
        """Drop the buffers; those of saves that have not ended stay, for the carrier."""
        for buffer in self._buffers:
            if not buffer.held:
                buffer.renew(self._platform)
        with suppress(OSError):
            self._platform.rmdir(self._folder)  # refused while it holds anything
        self._client.close()

    # --- pieces of save ---

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
            **{key: meta[key] for key in _OWN_PLACE if key in meta},
            "meta": {key: value for key, value in meta.items() if key not in _OWN_PLACE}, **self._tables,
        }

    def _offer(self, message: dict[str, Any], buffer: Buffer) -> bool:
        try:
            if self._client.offer(message) == "accepted":
                return True
            self._skip("the carrier is busy with earlier saves")
        except CarrierLost as error:
            buffer.renew(self._platform)  # it may have accepted without our hearing of it
            self._skip(error.what)
        return False

    def _skip(self, reason: str) -> None:
        self.skipped += 1
        self.skip_reason = reason

    def _fail(self, step: int, size: int, error: PacktrainError) -> int:
        self._ticket += 1
        self._results.append(SaveResult(step, 0, size, 0.0, 0.0, error.as_dict(), self._ticket))
        return self._ticket

    # --- outcomes ---

    def _settle(self, outcome: dict[str, Any]) -> None:
        pending = self._pending.pop(outcome["id"], None)
        if pending is None:
            return
        pending.buffer.held = False
        published = outcome.get("ok") is True
        if not published and outcome.get("ok") is None:
            pending.buffer.renew(self._platform)  # no outcome of the carrier's own: it was lost, and may read on
        error = None if published else dict(outcome.get("error") or {})
        result = _result(
            outcome["id"], pending, int(outcome.get("commit") or 0), float(outcome.get("write_s") or 0.0), error
        )
        if published:
            self._published = result
        if published or not pending.given_up:
            self._results.append(result)

    def _no_outcome(self, pending: _Pending) -> dict[str, str]:
        return SaveFailed(
            f"step {pending.step} has no outcome {pending.deadline_s + MARGIN_S:.0f} s after it was offered",
            where=pending.buffer.path, fix="see whether the disk of the run hangs; its buffer stays taken until then",
        ).as_dict()


def choose_buffer_folder(
    platform: Platform, run_folder: str, image_bytes: int, writer: str | None = None
) -> BufferFolder:
    """Where this run's buffers lie: in memory if two images take at most half of what is free, else beside the run.

    What dead attempts of `writer` left in either place goes first: it is no reason to find too little room. A folder in
    memory must be ours alone: anybody may make names there.
    """
    name = hashlib.sha256(os.path.realpath(run_folder).encode()).hexdigest()[:16]
    folder, beside = f"{MEMORY_FOLDER}/packtrain-{os.getuid()}-{name}", f"{run_folder}/buffers"
    if writer is not None:
        for candidate in (folder, beside):
            with suppress(OSError):
                _drop_left_behind(platform, candidate, writer)
    try:
        free = platform.free_bytes(MEMORY_FOLDER)
        if BUFFERS * image_bytes > MEMORY_SHARE_MAX * free:
            need = f"{BUFFERS} x {bytes_text(image_bytes)}"
            why = f"{need} is over half of the {bytes_text(free)} free in {MEMORY_FOLDER}"
        else:
            platform.mkdir(folder, 0o700)
            found = os.lstat(folder)
            if found.st_uid == os.getuid() and found.st_mode == 0o040700:
                return BufferFolder(folder)
            why = f"{folder} is not a folder of this user alone"
    except OSError as error:
        why = f"{MEMORY_FOLDER} cannot be used: {error}"
    return BufferFolder(beside, f"save buffers are on the run's own disk: {why}")


def _drop_left_behind(platform: Platform, folder: str, writer: str) -> None:
    """Buffers of this writer's earlier attempts: what still reads them can publish nothing any more."""
    for name in platform.listdir(folder):
        if name.startswith(f"{writer}.a"):
            with suppress(OSError):
                platform.unlink(f"{folder}/{name}")


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
