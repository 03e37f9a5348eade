"""The log of a coordinator: every batch of decisions durable before anything that was decided leaves.

A folder of segments, `000001.jsonl`, `000002.jsonl` ...; each line is JSON whose last field is the crc32c, in hex, of
the bytes before `,"crc":`. The first line of a segment is a snapshot of the state, so a replay reads one segment; each
other line is one batch. A writer begins a segment of its own and never appends behind what it has not written itself,
nor behind a write that failed: what such a write left counts for nothing.
A torn last line is what a killed coordinator leaves: nothing of that batch has left. Anything else that is no line is
DecisionsDamaged: what was decided cannot be known, and nobody guesses.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress

import google_crc32c
import msgspec

from packtrain.core.errors import DecisionsDamaged, RunUnusable
from packtrain.core.platform import File, Platform
from packtrain.supervise.state import AnyRecord, State, evolve

SEGMENT_BYTES = 4 << 20
SNAPSHOT_PART = 4
"""A segment grows to so many times its snapshot, where that is more: of 12,500 nodes a snapshot has megabytes, and must
not be written with each batch."""
KEPT = 2
"""Segments that stay when another one begins: the last two, for people."""
_CRC = b',"crc":"'
_NAME = re.compile(r"(\d{6})\.jsonl")


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`n`: 1 for the snapshot, then growing by one."""

    n: int
    state: State | None = None
    records: tuple[AnyRecord, ...] = ()


_decode = msgspec.json.Decoder(Line).decode


class Decisions:
    """One writer. `append` raises OSError: then nothing of that batch counts."""

    def __init__(self, platform: Platform, folder: str) -> None:
        self._platform, self._folder = platform, folder
        self._file: File | None = None
        self._shut = False
        self._n = self._written = 0
        self._full = SEGMENT_BYTES

    def replay(self) -> State:
        """What the log leads to; a new state where there is none. Raises DecisionsDamaged, RunUnusable."""
        try:
            self._platform.mkdir(self._folder, 0o700)
            self._platform.fsync_dir(os.path.dirname(self._folder))
            for name in reversed(self._names()):
                state = replayed(self._platform.read(f"{self._folder}/{name}"), f"{self._folder}/{name}")
                if state is not None:
                    return state
        except OSError as error:
            raise RunUnusable(
                f"the coordinator's log cannot be read: {error.strerror or error}", where=self._folder,
                fix="see that this disk is there and readable; then start it again",
            ) from error
        return State()

    def _names(self) -> list[str]:
        return [name for name in self._platform.listdir(self._folder) if _NAME.fullmatch(name)]

    def append(self, records: Sequence[AnyRecord], state: State) -> None:
        """`state`: after `records`."""
        if self._shut:
            raise OSError(errno.EROFS, "it goes on in another place", self._folder)
        if self._file is None or self._written > self._full:
            self._begin_segment(state)
            return
        try:
            self._write(self._file, Line(n=self._n + 1, records=tuple(records)))
        except OSError:
            self.close()
            raise

    def begin(self, state: State) -> None:
        """Go on from `state`, whatever lies here: the newest segment counts, and this is it. Raises OSError."""
        self._platform.mkdir(self._folder, 0o700)
        self._platform.fsync_dir(os.path.dirname(self._folder))
        self._begin_segment(state)

    def shut(self) -> None:
        """Nothing is appended here any more."""
        self._shut = True
        self.close()

    def _write(self, file: File, line: Line) -> None:
        data = render(line)
        file.write(data)
        file.fsync()
        self._n, self._written = line.n, self._written + len(data)

    def _begin_segment(self, state: State) -> None:
        """A snapshot says all that the batch led to."""
        self.close()
        names = self._names()
        number = int(names[-1][:6]) + 1 if names else 1
        file = self._platform.create(f"{self._folder}/{number:06d}.jsonl", 0o600)
        try:
            self._written = 0
            self._write(file, Line(n=1, state=state))
            self._platform.fsync_dir(self._folder)
            self._full = max(SEGMENT_BYTES, SNAPSHOT_PART * self._written)
        except OSError:
            with suppress(OSError):
                file.close()
            raise
        self._file = file
        for name in names[: -(KEPT - 1)]:
            with suppress(OSError):
                self._platform.unlink(f"{self._folder}/{name}")

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def render(line: Line) -> bytes:
    body = msgspec.json.encode(line)[:-1]
    return b'%s%s%08x"}\n' % (body, _CRC, google_crc32c.value(body))


def replayed(data: bytes, where: str) -> State | None:
    """What a segment leads to; None where not even its snapshot was written whole. Raises DecisionsDamaged."""
    state = None
    for number, piece in enumerate(data.split(b"\n")[:-1], 1):
        line = _line(piece)
        if line is None or line.n != number or (line.state is None) == (number == 1):
            raise _damaged(where, number)
        state = line.state if line.state is not None else state
        assert state is not None
        state = evolve(state, *line.records)
    return state


def _line(data: bytes) -> Line | None:
    body, found, tail = data.rpartition(_CRC)
    if not found or tail != b'%08x"}' % google_crc32c.value(body):
        return None
    try:
        return _decode(body + b"}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _damaged(where: str, number: int) -> DecisionsDamaged:
    return DecisionsDamaged(
        f"the coordinator's log is damaged: line {number} is not what was written", where=where,
        fix="move this folder away and give the same command: the run starts again from its last published step",
    )
