"""Bounded model checking of publishing: two attempts of one run on a fake disk, every interleaving and fault in bounds.

The old attempt publishes saves; meanwhile a new one begins, restores and publishes. `judge` (worlds.py) says what must
hold afterwards, of what the processes left behind and of what a power cut leaves of that. A failure prints its choices,
and `Choices(script=[...])` repeats it. Each of these, done to commits.py or publish.py, makes a test here fail: any
fsync of a record, part, manifest or folder left out, replace for link, the nonce not looked at, the last record not
read again before a link, a newer attempt not noticed, one's own record not recognized, a folder discarded that may be
published.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.publish import Gate, carry
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable, CommitStale, CommitUnknown, SaveFailed
from packtrain.core.fake import (
    Baton,
    Choices,
    FakeDisk,
    FakePlatform,
    Fault,
    chosen_faults,
    crash,
    delay,
    duplicate,
    explore,
    fail,
    late,
    lost_reply,
    power_cut,
    sample,
    stale,
    tear,
)
from tests.checkpoint.worlds import RUN, WRITER, judge, make_run, publish_small, save_of, small_state

LOG = f"{RUN}/commits"
CHANGES = ("link", "fsync_dir", "unlink")
Menu = Callable[[str, str], list[Fault]]


@dataclass
class World:
    """Attempt 1 has begun on a disk where all is durable; "old" is its carrier, "new" is whoever begins attempt 2."""

    choices: Choices
    preemptions_max: int = 0
    menu: Menu | None = None
    faults_max: int = 1
    files: bool = True
    """False: the log alone, for its own sake; checkpoints are only names then."""
    confirmed: list[Commit] = field(default_factory=list)
    """What some writer was told is published."""

    def __post_init__(self) -> None:
        self.disk = FakeDisk()
        setup = FakePlatform(self.disk, "setup")
        setup.mkdir("/buffers")
        log = make_run(setup)
        log.begin(0, (WRITER,), "node")
        if self.files:
            publish_small(setup, log, 1, 10)
        self.disk.sync_all()
        self.baton = Baton(self.choices, self.disk.clock, self.preemptions_max, self.matters_to_others)
        faults = chosen_faults(self.choices, self.menu, self.faults_max) if self.menu else None
        self.old, self.new = (FakePlatform(self.disk, name, self.baton, faults) for name in ("old", "new"))

    def matters_to_others(self, op: str, path: str) -> bool:
        return path.startswith(LOG) if self.files else op in ("read", "link", "fsync_dir")

    def run(self) -> None:
        for outcome in self.baton.run(self.old_attempt, self.new_attempt):
            assert outcome.error is None or outcome.crashed, f"{outcome.error!r}: {self.choices}"
        self.old.faults = self.new.faults = None
        self.check()

    def old_attempt(self) -> None:
        """Publish until told to stop."""
        log = CommitLog(self.old, LOG)
        for step in (20, 30):
            try:
                self.publish(self.old, log, 1, step)
            except CommitStale:
                self.require_begun(2)
                return
            except (CommitUnknown, SaveFailed, OSError):
                continue

    def new_attempt(self) -> None:
        """Begin, restore what that leads to, publish."""
        log = CommitLog(self.new, LOG)
        try:
            begin = log.begin(None, (WRITER,), "node")
            self.confirmed.append(begin)
            point = log.restore_point()
            assert begin.step == (point.step if point else -1), f"{begin} but {point}: {self.choices}"
            if self.files and point is not None:
                self.restore(point)
            self.publish(self.new, log, begin.attempt, begin.step + 5)
        except CommitStale:
            self.require_begun(1, at_most=1)  # a stale view hid attempt 1; nobody began after attempt 2
        except (CommitUnknown, SaveFailed, OSError):
            return

    def require_begun(self, attempt: int, at_most: int = 9) -> None:
        """Nobody is told to stop for nothing, its own success least of all."""
        last = CommitLog(FakePlatform(self.disk, "witness"), LOG).last()
        assert last is not None and attempt <= last.attempt <= at_most, f"told to stop by {last}: {self.choices}"

    def restore(self, point: Commit) -> None:
        try:
            checkpoint = open_checkpoint(self.new, RUN, point)
            for piece in small_state(point.attempt, point.step):
                assert checkpoint.read(piece.spec.name).tobytes() == piece.array.tobytes(), self.choices
        except CheckpointUnreadable:
            return  # an I/O error is no damage: somebody tries again
        except CheckpointDamaged as error:
            # A stale view may hide a file from this process; whether it is really there, `check` judges at the end.
            assert "No such file" in error.what, f"published and damaged: {error.what}: {self.choices}"

    def publish(self, platform: FakePlatform, log: CommitLog, attempt: int, step: int) -> None:
        if self.files:
            save = save_of(platform, attempt, step, deadline_s=1.0)
            self.confirmed.append(carry(platform, log, RUN, save, Gate()))
        else:
            self.confirmed.append(log.publish(attempt, step, "digest", "folder"))

    def check(self) -> None:
        """What the processes left must stand, and what a power cut right now leaves of it, too; then life goes on."""
        if not self.disk.dark:
            self.disk.run_deferred(all_of_them=True)
            self.judge(FakePlatform(self.disk, "judge"))
        outage = Choices(seed=tuple(self.choices.script))
        rebooted = FakePlatform(self.disk.after_power_cut(outage), "rebooted")
        log = CommitLog(rebooted, LOG)
        begin = log.begin(None, (WRITER,), "node")
        if self.files:
            publish_small(rebooted, log, begin.attempt, begin.step + 1)
        self.judge(rebooted)

    def judge(self, platform: FakePlatform) -> None:
        commits = judge(platform, note=self.choices, load=self.files)
        lost = [commit for commit in self.confirmed if commit not in commits]
        assert not lost, f"confirmed, then gone: {lost}: {self.choices}"


def faults_of_the_log(op: str, path: str) -> list[Fault]:
    """Death, lost replies, delayed and repeated requests, stale views."""
    menu = [crash(), power_cut()]
    if op == "link":
        menu += [lost_reply(), late(1), late(3), duplicate(), duplicate(3)]
    if op == "read":
        menu += [stale(1), stale(3)]
    return menu


def faults_of_a_disk(op: str, path: str) -> list[Fault]:
    """All of that, and what disks do to files."""
    menu = faults_of_the_log(op, path)
    if op == "write":
        menu += [fail(errno.ENOSPC), tear(0.5), tear(0.5, then="power_cut"), lost_reply()]
    elif op in ("fsync", "fsync_dir", "create", "mkdir", "unlink"):
        menu += [fail(errno.EIO), lost_reply(errno.EIO)]
    elif op == "read":
        menu += [fail(errno.EIO)]
    return menu


def anything(op: str, path: str) -> list[Fault]:
    """Slow and late operations as well."""
    menu = faults_of_a_disk(op, path)
    return menu if op in ("read", "exists") else [*menu, delay(0.3), late(1), late(4)]


def test_every_interleaving_of_two_writers():
    """No interleaving with up to three preemptions breaks the log: dense, no dead attempt, nothing confirmed lost."""
    for choices in explore():
        World(choices, preemptions_max=3, files=False).run()


def test_every_single_fault_in_every_near_interleaving():
    """Nor does one preemption and one crash, power cut, lost reply, late or repeated link, or stale view, anywhere."""
    for choices in explore():
        World(choices, preemptions_max=1, menu=faults_of_the_log, files=False).run()


def test_every_single_fault_of_whole_saves():
    """With files: one fault at any operation of both attempts leaves only checkpoints that load, and life goes on."""
    for choices in explore():
        World(choices, menu=faults_of_a_disk).run()


def test_random_worlds_beyond():
    """Seeded random worlds with up to four preemptions and three faults, of any kind, keep the same promises."""
    for choices in sample(400, seed="publishing", rate=0.04):
        World(choices, preemptions_max=4, menu=anything, faults_max=3).run()


def test_every_outcome_of_a_power_cut():
    """Whatever unsynced names and contents a power cut spares, numbers stay dense and what was confirmed stays."""

    def menu(op: str, path: str) -> list[Fault]:
        return [power_cut()] if op in CHANGES else []

    for choices in explore():
        world = World(choices, preemptions_max=1, menu=menu, files=False)
        log = CommitLog(world.old, LOG)
        outcomes = world.baton.run(
            lambda world=world, log=log: world.publish(world.old, log, 1, 10),
            lambda world=world: world.confirmed.append(CommitLog(world.new, LOG).begin(None, (WRITER,), "node")),
        )
        assert all(o.error is None or o.crashed or isinstance(o.error, CommitStale) for o in outcomes), choices
        world.judge(FakePlatform(world.disk.after_power_cut(choices), "rebooted"))


@pytest.mark.parametrize("op", ["write", "create", "mkdir", "fsync", "fsync_dir", "link"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_save_outlives_a_bad_disk(op, code):
    """A disk that fails the same way for a while is retried in new folders until it is well; one is published."""
    disk = FakeDisk()
    platform = FakePlatform(disk, "a")
    platform.mkdir("/buffers")
    log = make_run(platform)
    log.begin(0, (WRITER,), "node")
    save = save_of(platform, 1, 10)
    left = [3]

    def sick(seen: str, path: str, n: int) -> Fault | None:
        if seen != op or not left[0]:
            return None
        left[0] -= 1
        return fail(code)

    platform.faults = sick
    commit = carry(platform, log, RUN, save, Gate())
    assert left == [0] and commit.number == 2
    judge(platform)
    assert platform.listdir(f"{RUN}/checkpoints") == [commit.folder], "a failed try was left behind"
