"""Copies named ranges from one store to another: in chunks, in parallel, capped, resumable, verified end to end.

It is handed two stores, what to copy and how fast it may go; it knows no tier and no journal. Per object:

1. What the target has under that name already is read back; where it is what the source has, nothing is sent.
2. Chunks that an earlier process left in an unfinished upload stay; the others are read, checked and put.
3. Everything is read back from the target and compared with the source's checksums: those the caller knows (part
   tables), else those of the bytes as they were read. A folder shows a chunk before the object is visible, and that
   chunk alone is sent again; a bucket shows it afterwards, and the object is sent again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import google_crc32c
import msgspec

from packtrain.core.errors import (
    NameAbsent,
    NameTaken,
    TransferDamaged,
    TransferLate,
    TransferStopped,
    UploadLost,
)
from packtrain.core.platform import Platform
from packtrain.core.pool import Pool
from packtrain.core.stores import Plan, Store, Upload
from packtrain.core.units import MIB, NS, bytes_text, duration_text

PARTS_MAX = 9000
"""S3 takes 10,000 parts: above, chunks grow."""
TRIES = 3
LOOK_S = 0.25
"""How often a waiting copy looks whether it shall stop, or go faster."""
WAIT_S_MIN = 0.001
CREDIT_S = 1.0
"""Time lost in waiting for the stores is made up for by this much of faster sending, and no more: from its beginning on
a copy never averages more than its rate, and over any 20 s at most 5% more."""


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one copy. Memory is about `threads` * `chunk_bytes` * 2."""

    threads: int = 4
    chunk_bytes: int = 8 * MIB
    """S3 takes parts of at least 5 MiB."""
    copy_bytes_per_s_max: float = math.inf
    """Cap on what is sent or read back, over a second and a few chunks; a single chunk goes as fast as it can."""
    deadline_s: float = math.inf


class Item(NamedTuple):
    """What is copied: a range of one object becomes a whole object."""

    source: str
    target: str
    size: int = -1
    """Bytes; -1: up to the source's end."""
    offset: int = 0
    sums: tuple[int, ...] = ()
    """crc32c of each `block_bytes` of the range, where the caller knows them; (): the source is believed."""
    block_bytes: int = 4 * MIB


@dataclass
class Tally:
    """What a copy has done so far, in bytes and counts."""

    bytes_total: int = 0
    bytes_sent: int = 0
    """Put into the target, repeats included."""
    bytes_kept: int = 0
    """Found there already, from an earlier copy."""
    bytes_checked: int = 0
    """Read back from the target and found good."""
    chunks_read_again: int = 0
    """Because the source gave other bytes than its checksums say."""
    chunks_sent_again: int = 0
    """Because the target refused what arrived, or gave other bytes back than it was sent."""
    items_kept: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        with self.lock:
            for name, n in counts.items():
                setattr(self, name, getattr(self, name) + n)


class Progress(NamedTuple):
    """For a screen. Each byte is to be sent (or found) and then checked."""

    bytes_done: int
    """Checked."""
    bytes_total: int
    bytes_per_s: float
    """Sent or, where more, checked since the copy began: what is there already needs no sending."""
    eta_s: float
    """inf while nothing is known."""


Rate = Callable[[], float]
"""Bytes a second allowed right now: asked before every chunk; 0: pause."""


def unlimited() -> float:
    return math.inf


def copy(
    platform: Platform, source: Store, target: Store, items: Sequence[Item], config: TransferConfig | None = None, *,
    rate: Rate = unlimited, stop: threading.Event | None = None, progress: Callable[[Progress], None] | None = None,
    replace: bool = False,
) -> Tally:
    """Copy all `items`, in any order; every one is whole, verified and visible in `target` when this returns.

    `replace`: what is there under a target's name with other content is replaced; otherwise that is NameTaken.
    Raises TransferDamaged, TransferLate at the deadline, TransferStopped after `stop` was set, and what the stores
    raise. Called again after any of them, or after a kill, it goes on with what has arrived.
    """
    assert len({item.target for item in items}) == len(items), "two items of one copy have one target"
    config = config or TransferConfig()
    work = _Copy(platform, source, target, config, rate, stop or threading.Event(), progress, replace)
    jobs: list[_Job] = []
    try:
        work.pool.run([partial(work.measure, item, jobs) for item in items])
        work.tally.bytes_total = sum(job.plan.size for job in jobs)
        work.pool.run([partial(work.begin, job) for job in jobs])
    finally:
        work.over.set()
        for job in jobs:
            job.leave()
    return work.tally


class Throttle:
    """Hands out the right to move bytes so that they average the rate, from the first byte on.

    What is asked for is a debt, paid off first come, first served at the rate of the moment: each look pays for the
    time since the last one, at the rate that was said then.
    """

    def __init__(self, platform: Platform, rate: Rate, check: Callable[[], None]) -> None:
        """`check` is called while waiting, and may raise."""
        self._platform, self._rate, self._check = platform, rate, check
        self._lock = threading.Lock()
        self._asked = 0.0
        """Bytes, all together."""
        self._paid = 0.0
        """Of these; more: credit."""
        self._looked_ns = platform.boot_ns()
        self._said = 0.0
        """Bytes a second at the last look."""

    def take(self, n_bytes: int) -> None:
        """Wait until `n_bytes` may be moved."""
        self._check()
        mine, paid = self._look(n_bytes)
        while paid < mine:
            wait_s = (mine - paid) / self._said if self._said > 0 else LOOK_S
            self._check()
            self._platform.sleep(min(LOOK_S, max(WAIT_S_MIN, wait_s)))
            _, paid = self._look()

    def _look(self, more: int = 0) -> tuple[float, float]:
        """Pay for the time since the last look, then ask for `more`: (bytes asked for, bytes paid) by now."""
        said = max(0.0, self._rate())
        with self._lock:
            now_ns = self._platform.boot_ns()
            passed_s, self._looked_ns = (now_ns - self._looked_ns) / NS, now_ns
            earned = self._said * passed_s if passed_s else 0.0
            self._paid = min(self._paid + earned, self._asked + said * CREDIT_S)
            self._asked, self._said = self._asked + more, said
            if math.isinf(said):
                self._paid = self._asked
            return self._asked, self._paid


class _Job:
    """One object on its way. Its chunks may be worked on by several threads."""

    def __init__(self, item: Item, plan: Plan) -> None:
        self.item, self.plan = item, plan
        self.upload: Upload | None = None
        self.left = 0
        """Tasks of the present stage."""
        self.bad: list[int] = []
        """Chunks that the present check found wrong."""
        self.tries = 1
        self.finished = False
        """It was made visible under its name once: what is there is ours."""
        self.lost: UploadLost | None = None
        """The store forgot the upload under way."""
        self.lock = threading.Lock()
        self._block_bytes = item.block_bytes if item.sums else plan.chunk_bytes
        self._known: dict[int, tuple[int, ...]] = {}
        if item.sums:
            per_chunk = plan.chunk_bytes // item.block_bytes
            self._known = {i: item.sums[i * per_chunk : (i + 1) * per_chunk] for i in range(plan.chunks)}

    def knows(self, index: int) -> bool:
        return index in self._known

    def learn(self, index: int, data: bytes) -> None:
        """Bytes of the source that no checksum vouches for: they are what the target must have."""
        self._known[index] = self._sums(data)

    def is_good(self, index: int, data: bytes) -> bool:
        return len(data) == self.plan.span(index)[1] and self._sums(data) == self._known[index]

    def _sums(self, data: bytes) -> tuple[int, ...]:
        view, size = memoryview(data), self._block_bytes
        return tuple(google_crc32c.value(bytes(view[at : at + size])) for at in range(0, len(data), size))

    def one_less(self) -> bool:
        """Whether that was the last task of the stage."""
        with self.lock:
            self.left -= 1
            return self.left == 0

    def leave(self) -> None:
        if self.upload is not None:
            self.upload.leave()

    def where(self, store: Store, name: str, index: int) -> str:
        start, size = self.plan.span(index)
        return f"{store.url} {name}, bytes {start}..{start + size}"


class _Copy:
    """The stages of a copy, each a task of the pool: measure, then per object begin, send, check, end."""

    def __init__(
        self, platform: Platform, source: Store, target: Store, config: TransferConfig, rate: Rate,
        stop: threading.Event, progress: Callable[[Progress], None] | None, replace: bool,
    ) -> None:
        self.tally = Tally()
        self.pool = Pool(config.threads)
        self.over = threading.Event()
        """The caller has left: threads that still wait for a store go no further."""
        self._platform, self._source, self._target, self._config = platform, source, target, config
        self._stop, self._progress, self._replace = stop, progress, replace
        self._began_ns = platform.boot_ns()
        self._throttle = Throttle(platform, lambda: min(rate(), config.copy_bytes_per_s_max), self._check)

    # --- beginning ---

    def measure(self, item: Item, jobs: list[_Job]) -> None:
        self._check()
        size = item.size if item.size >= 0 else self._source.size(item.source) - item.offset
        unit = item.block_bytes if item.sums else 1
        chunk_bytes = max(self._config.chunk_bytes, -(-size // PARTS_MAX))
        plan = Plan(item.target, size, max(unit, -(-chunk_bytes // unit) * unit))
        assert not item.sums or len(item.sums) == -(-size // item.block_bytes), "one checksum for each block"
        jobs.append(_Job(item, plan))

    def begin(self, job: _Job) -> None:
        """Look what is there under the target's name; then check it, or send."""
        self._check()
        try:
            there = self._target.size(job.plan.name)
        except NameAbsent:
            self._send(job)
            return
        if there == job.plan.size:
            self._stage(job, self._check_kept, self._end_kept)
        else:
            self._replace_or_refuse(job)

    def _check_kept(self, job: _Job, index: int) -> None:
        if not job.knows(index):
            self._fetch(job, index)
        if not job.is_good(index, self._read_back(job, index)):
            job.bad.append(index)

    def _end_kept(self, job: _Job) -> None:
        if job.bad:
            self._replace_or_refuse(job)
            return
        self._target.settle(job.plan.name)
        self.tally.add(bytes_kept=job.plan.size, bytes_checked=job.plan.size, items_kept=1)
        self._tell()

    def _replace_or_refuse(self, job: _Job) -> None:
        if not self._replace:
            raise NameTaken(
                "this name is taken by something else than what is copied", where=f"{self._target.url} {job.plan.name}",
                fix="copy to another place, or say that it may be replaced",
            )
        self._send(job)

    # --- sending ---

    def _send(self, job: _Job) -> None:
        job.upload = self._target.upload(job.plan)
        if self.over.is_set():  # `copy` has ended without seeing this one
            job.leave()
        if job.upload.in_order:
            for index in range(job.plan.chunks):
                self._put(job, index)
            self._look_or_finish(job)
        else:
            self._stage(job, self._put, self._look_or_finish)

    def _put(self, job: _Job, index: int) -> None:
        """Bring one chunk to the target, unless it is there."""
        self._check()
        assert job.upload is not None
        if job.lost is not None:
            return
        size, data = job.plan.span(index)[1], b""
        if not job.knows(index):
            data = self._fetch(job, index)
        if job.upload.has(index, partial(job.is_good, index)):
            self.tally.add(bytes_kept=size)
            return
        try:
            times = job.upload.put(index, data or self._fetch(job, index))
        except UploadLost as lost:
            job.lost = lost
            return
        self.tally.add(bytes_sent=size * times, chunks_sent_again=times - 1)
        self._tell()

    def _fetch(self, job: _Job, index: int) -> bytes:
        """One chunk of the source, as good as its checksums are; without any, they are learnt here."""
        start, size = job.plan.span(index)
        for _ in range(TRIES):
            self._throttle.take(size)
            data = self._source.read(job.item.source, job.item.offset + start, size)
            if not job.knows(index) and len(data) == size:
                job.learn(index, data)
            if job.knows(index) and job.is_good(index, data):
                return data
            self.tally.add(chunks_read_again=1)
        raise TransferDamaged(
            f"the source gives other bytes than it should, {TRIES} times in a row",
            where=job.where(self._source, job.item.source, index),
            fix="verify the source, test its disk; copy another step, or from another place that has this one",
        )

    # --- checking ---

    def _look_or_finish(self, job: _Job) -> None:
        """All chunks are put: read them back where the kind shows them now."""
        assert job.upload is not None
        if job.lost is not None:
            self._send_anew(job, job.lost)
        elif job.upload.shows:
            self._stage(job, self._check_unfinished, self._finish)
        else:
            self._finish_unseen(job)

    def _check_unfinished(self, job: _Job, index: int) -> None:
        """A chunk that is not what was sent is sent again, alone."""
        assert job.upload is not None
        size = job.plan.span(index)[1]
        for trial in range(TRIES):
            if trial:
                times = job.upload.put(index, self._fetch(job, index))
                self.tally.add(chunks_sent_again=times, bytes_sent=size * times)
            self._throttle.take(size)
            if job.is_good(index, job.upload.look(index)):
                self.tally.add(bytes_checked=size)
                self._tell()
                return
        raise self._damaged(job, index)

    def _finish_unseen(self, job: _Job) -> None:
        """A bucket: make it visible, then read it back."""
        try:
            self._finish(job)
        except UploadLost as lost:  # also where it was finished, and the answer to that was lost
            if not self._is_there(job):
                self._send_anew(job, lost)
                return
        self._stage(job, self._check_finished, self._end)

    def _finish(self, job: _Job) -> None:
        self._check()
        assert job.upload is not None
        job.upload.finish(self._replace or job.finished)
        job.finished = True

    def _is_there(self, job: _Job) -> bool:
        try:
            return self._target.size(job.plan.name) == job.plan.size
        except NameAbsent:
            return False

    def _send_anew(self, job: _Job, lost: UploadLost) -> None:
        """From its beginning: all that had arrived is gone."""
        if job.tries == TRIES:
            raise lost
        job.leave()
        job.tries, job.lost = job.tries + 1, None
        self.tally.add(chunks_sent_again=job.plan.chunks)
        self._send(job)

    def _check_finished(self, job: _Job, index: int) -> None:
        if job.is_good(index, self._read_back(job, index)):
            self.tally.add(bytes_checked=job.plan.span(index)[1])
            self._tell()
        else:
            job.bad.append(index)

    def _end(self, job: _Job) -> None:
        """The object is good, or is sent again from its beginning."""
        if not job.bad:
            return
        if job.tries == TRIES:
            raise self._damaged(job, job.bad[0])
        job.tries += 1
        good = job.plan.size - sum(job.plan.span(index)[1] for index in job.bad)
        self.tally.add(chunks_sent_again=job.plan.chunks, bytes_checked=-good)
        self._send(job)

    def _read_back(self, job: _Job, index: int) -> bytes:
        start, size = job.plan.span(index)
        self._throttle.take(size)
        return self._target.read(job.plan.name, start, size)

    def _damaged(self, job: _Job, index: int) -> TransferDamaged:
        return TransferDamaged(
            f"the target gives other bytes back than it was sent, {TRIES} times in a row",
            where=job.where(self._target, job.plan.name, index), fix="copy to another place; test this store",
        )

    # --- for every stage ---

    def _stage(self, job: _Job, each: Callable[[_Job, int], None], then: Callable[[_Job], None]) -> None:
        """`each` for every chunk, by whichever thread is free, and `then` once by who comes last."""
        job.left, job.bad = job.plan.chunks, []

        def one(index: int) -> None:
            each(job, index)
            if job.one_less():
                then(job)

        self.pool.add_first([partial(one, index) for index in range(job.plan.chunks)])

    def _check(self) -> None:
        """Raises when the copy shall not go on."""
        where = f"{self._source.url} to {self._target.url}"
        if self._stop.is_set() or self.over.is_set():
            raise TransferStopped("the copy was told to stop", where=where, fix="the same command goes on from here")
        if (self._platform.boot_ns() - self._began_ns) / NS >= self._config.deadline_s:
            raise TransferLate(
                f"{bytes_text(self.tally.bytes_checked)} of {bytes_text(self.tally.bytes_total)} were there and "
                f"verified after {duration_text(self._config.deadline_s)}, which was the deadline", where=where,
                fix="the same command goes on from here; allow it more time or a higher rate",
            )

    def _tell(self) -> None:
        if self._progress is None:
            return
        tally, passed_s = self.tally, (self._platform.boot_ns() - self._began_ns) / NS or 1.0
        with tally.lock:
            sent, checked = tally.bytes_sent, tally.bytes_checked
            left, speed = 2 * tally.bytes_total - sent - tally.bytes_kept - checked, (sent + checked) / passed_s
            eta_s = max(0, left) / speed if speed else math.inf
            self._progress(Progress(checked, tally.bytes_total, max(sent, checked) / passed_s, eta_s))
