"""Two tries at one step: a save that was given up may wake at any moment and must not touch the one that came after."""

from __future__ import annotations

from contextlib import suppress

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.publish import Gate, carry
from packtrain.checkpoint.reader import verify_commit
from packtrain.core.errors import PacktrainError
from packtrain.core.fake import FakeDisk, FakePlatform
from tests.checkpoint.worlds import RUN, WRITER, make_run, save_of


def given_up_at(moment: int) -> tuple[FakePlatform, Commit | None, bool]:
    """A save is given up before its operation `moment` and the same step is saved by another thread, whole; then the
    first goes on. -> the disk, what the second published, whether the first came so far."""
    disk = FakeDisk()
    platform = FakePlatform(disk, "a")
    log = make_run(platform)
    begin = log.begin(0, (WRITER,), "node")
    platform.mkdir("/buffers")
    save, gate, published = save_of(platform, begin.attempt, 1), Gate(), []
    late = FakePlatform(disk, "a", faults=lambda op, path, n: second() if n == moment else None)

    def second() -> None:
        if gate.shut():
            published.append(carry(platform, CommitLog(platform, f"{RUN}/commits"), RUN, save, Gate()))

    with suppress(PacktrainError):
        carry(late, CommitLog(late, f"{RUN}/commits"), RUN, save, gate)
    return platform, published[0] if published else None, late.ops >= moment


def test_a_save_that_was_given_up_harms_no_later_one_of_its_step() -> None:
    """Given up before each of its operations in turn: what the second published is whole, and the only one."""
    moment, seconds, reached = 0, 0, True
    while reached:
        moment += 1
        platform, commit, reached = given_up_at(moment)
        if commit is not None:
            seconds += 1
            assert verify_commit(platform, RUN, commit) == [], moment
            assert CommitLog(platform, f"{RUN}/commits").last() == commit
    assert seconds >= 8
