"""What a coordinator reads and writes beside its log of decisions: the run's journal, commit log and checkpoints.

They lie on the run's disk, which may hang, so nothing here is done in the coordinator's loop: each kind of call is an
errand (errands.py), one at a time, and what comes of it is told by `look`. What is to be written waits meanwhile, with
the time at which it happened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from packtrain.core.journal import Entry, Journal, Tail
from packtrain.core.platform import Platform
from packtrain.core.records import Record, RecordsLost
from packtrain.core.units import NS
from packtrain.supervise.errands import Errands

T = TypeVar("T")


class Do(Protocol):
    """`Papers.do`."""

    def __call__(self, kind: str, call: Callable[[], T], then: Callable[[T | Exception], None]) -> bool: ...


READ_NS = NS // 5
"""How often the journal is looked into."""
UNWRITTEN_MAX = 10_000
"""Records that wait for a disk that hangs; beyond that the oldest are lost, and counted."""
EVER_S = 1e8
"""Nobody gives up such a call: there is no other disk to do it on."""
LOOK_S = 0.01


class Papers:
    """Of one coordinator. Nothing here raises OSError."""

    def __init__(self, platform: Platform, run_folder: str) -> None:
        self._platform = platform
        self._journal = Journal(platform, f"{run_folder}/journal", role="coordinator")
        self._tail = Tail(platform, f"{run_folder}/journal")
        self._errands = Errands(platform)
        self._unwritten: list[tuple[int, Record]] = []
        self._lost = 0
        self._busy: set[str] = set()
        """Kinds of calls under way."""
        self._read_ns = 0
        self._begun = self._over = 0
        """Readings of the journal."""
        self._was_read = False
        self._past: list[Entry] = []
        self._entries: list[Entry] = []

    def write(self, record: Record) -> None:
        """Into the journal, durably, as soon as its disk does it; in order."""
        self._unwritten.append((self._platform.boot_ns(), record))
        if len(self._unwritten) > UNWRITTEN_MAX:
            del self._unwritten[0]
            self._lost += 1

    def do(self, kind: str, call: Callable[[], T], then: Callable[[T | Exception], None]) -> bool:
        """`then` gets its result, or what it raised, in a later `look`. False: one of this kind is under way."""
        if kind in self._busy:
            return False

        def told(result: tuple[T] | Exception | None) -> None:
            self._busy.discard(kind)
            assert result is not None, "errands are few, and nobody gives them up"
            then(result if isinstance(result, Exception) else result[0])

        self._busy.add(kind)
        self._errands.start(self._platform.boot_ns(), EVER_S, lambda: (call(),), told)
        return True

    def busy(self, kind: str) -> bool:
        """Whether a call of this kind is under way."""
        return kind in self._busy

    def look(self) -> list[Entry]:
        """What has come into the journal since the last look, or since it was first read. Tells of calls that are over,
        and starts others."""
        ns = self._platform.boot_ns()
        self._errands.look(ns)
        if self._unwritten:
            self._write_some()
        if ns - self._read_ns >= READ_NS:
            self._read()
        entries, self._entries = self._entries, []
        return entries

    def past(self) -> list[Entry]:
        """What the journal held when it was first read, however long that took; once."""
        entries, self._past = self._past, []
        return entries

    def read_now(self) -> Callable[[], bool]:
        """Tells whether a look had all that is in the journal by now, or its disk refused."""
        number, self._read_ns = self._begun + 1, 0
        self._read()
        return lambda: self._over >= number

    def _read(self) -> None:
        if self.do("read", self._tail.poll, self._noted):
            self._read_ns = self._platform.boot_ns()
            self._begun += 1

    def _write_some(self) -> None:
        records, lost = list(self._unwritten), self._lost
        if self.do("write", lambda: self._write(records, lost), lambda result: None):
            self._unwritten.clear()
            self._lost = 0

    def _write(self, records: list[tuple[int, Record]], lost: int) -> None:
        """In the errand's thread. The journal keeps what its disk refuses."""
        if lost:
            self._journal.write(RecordsLost(count=lost, error="the disk under the journal hung"))
        for ns, record in records:
            self._journal.write(record, durable=record is records[-1][1], ns=ns)

    def _noted(self, found: list[Entry] | Exception) -> None:
        """None while the folder cannot be listed: they come at a later look."""
        self._over += 1
        if isinstance(found, Exception):
            return
        if self._was_read:
            self._entries += found
        else:
            self._was_read, self._past = True, found

    def flush(self, seconds: float, *kinds: str) -> bool:
        """Wait until all is written, what there was is read, and calls of these kinds are over; whether that was done
        within `seconds`."""
        end_ns = self._platform.boot_ns() + round(seconds * NS)
        while self._unwritten or self._busy & {"write", "read", *kinds}:
            self._errands.look(self._platform.boot_ns())
            if self._unwritten:
                self._write_some()
            if self._platform.boot_ns() >= end_ns:
                return False
            self._platform.sleep(LOOK_S)
        return True

    def close(self, seconds: float) -> None:
        """A journal whose disk hangs is left to itself."""
        if self.flush(seconds):
            self._journal.close()
