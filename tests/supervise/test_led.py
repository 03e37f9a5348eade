"""A run of one node from its command to its exit code: the shipped coordinator on a fake machine, in virtual time."""

from __future__ import annotations

import msgspec
import pytest

from packtrain.checkpoint import asked
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.errors import (
    CheckpointDamaged,
    CommitsUnfit,
    CommitUnknown,
    GuardRollback,
    WrongModel,
)
from packtrain.core.fake import FakePlatform, fail
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    GuardVerdict,
    NodeSuspected,
    ReplayOrdered,
    RetentionDone,
    RunCreated,
    RunFinished,
)
from packtrain.core.units import NS
from packtrain.supervise.coordinator import OPEN_S
from packtrain.supervise.decisions import Decisions
from packtrain.supervise.log_homes import DECISIONS
from packtrain.supervise.messages import AskCarrier, Launch
from tests.checkpoint.worlds import RUN
from tests.supervise.led import HOME, JOB, Life, Run, ends, saves
from tests.supervise.test_papers import Hanging


def begun(run: Run) -> list[int]:
    """What each attempt restored."""
    return [one.restore_step for one in run.records(AttemptBegan)]


def test_done_and_done_again() -> None:
    """A run that is done ends with 0, every record in place; the same command goes on from its last save and does not
    make the run again."""
    run = Run()
    run.lives = saves(run, [10, 20])
    assert run.command().exit_code == 0
    (ended,) = run.records(AttemptEnded)
    assert (ended.exit_code, ended.reason) == (0, "done")
    assert run.command().exit_code == 0 and begun(run) == [-1, 20]
    assert len(run.records(RunCreated)) == 1 and [one.exit_code for one in run.records(RunFinished)] == [0, 0]


def test_what_is_read_late_is_past() -> None:
    """A journal whose disk hangs longer than a coordinator waits for it when it begins: what it says of saves, and of
    nodes in doubt, is as old as if it had been read at once."""
    run = Run(Hanging)
    run.lives = saves(run, [10])
    run.command()
    run.note(GuardVerdict(step=9, reason="spike", rerun="clean", policy="used", digest=1, rerun_digest=2))
    run.platform.hangs, run.lives = True, ends(0, after=50)
    run.happens = lambda seconds: run.platform.come_back() if seconds > OPEN_S + 10 and run.platform.hangs else None
    assert run.command().exit_code == 0 and begun(run) == [-1, 10]
    state = Decisions(run.platform, f"{HOME}/2/{DECISIONS}").replay()
    assert state.run.published == -1 and not state.run.replays and not run.records(NodeSuspected)


@pytest.mark.parametrize("slow", [False, True])
def test_a_verdict_makes_its_own_attempt_doubtful(slow: bool) -> None:
    """The rank journals it and ends by it at once: it is read before another attempt has its nodes, also where the disk
    is slow, and what is ordered is of the attempt that gave it."""
    run = Run(Hanging)
    run.happens = lambda seconds: run.platform.come_back() if seconds > 3 and run.platform.hangs else None

    def life(attempt: int) -> Life:
        yield
        if attempt > 1:
            return 0, None
        run.note(GuardVerdict(
            step=9, reason="spike", rerun="clean", policy="rollback", digest=1, rerun_digest=2, attempt=attempt
        ))
        run.platform.hangs = slow
        return 75, GuardRollback("bad twice", where="", fix="")

    run.lives = life
    assert run.command().exit_code == 0 and begun(run) == [-1, -1]
    assert [(one.attempt, one.last) for one in run.records(ReplayOrdered)] == [(1, 9)]


def test_a_stop_is_75_and_the_same_command_goes_on() -> None:
    """Asked to stop while it trains it saves and stops; the next command begins from there."""
    run = Run()
    run.lives = saves(run, [10, 20])
    run.happens = lambda seconds: run.ask("stop") if len(run.log.all()) == 3 and seconds < 3 else None
    finish = run.command()
    assert finish.exit_code == 75 and finish.error["name"] == "run.stopped_on_request"
    run.happens = lambda seconds: None
    assert run.command().exit_code == 0 and begun(run) == [-1, 10]


def test_a_crash_goes_on_from_the_last_save() -> None:
    """Another attempt at once, and its journal says why; a loop of them without a step ends in 70."""
    run = Run()
    run.lives = lambda attempt: (saves(run, [10], status=1) if attempt == 1 else saves(run, [10, 20]))(attempt)
    assert run.command().exit_code == 0 and begun(run) == [-1, 10]
    assert [one.exit_code for one in run.records(AttemptEnded)] == [1, 0]
    run = Run()
    run.lives = ends(1)
    finish = run.command()
    assert finish.exit_code == 70 and finish.error["name"] == "run.no_progress" and len(begun(run)) == 3


def test_78_is_never_tried_again() -> None:
    """A refused configuration ends the run with the worker's own message."""
    run = Run()
    error = WrongModel("planted", where="the test", fix="plant nothing")
    run.lives = ends(78, error)
    finish = run.command()
    assert finish.exit_code == 78 and finish.error == error.as_dict() and len(begun(run)) == 1


def test_a_run_begins_where_it_was_asked_to() -> None:
    """After `ckpt restore` the next attempt begins from that save, once; a crash later goes on from its own saves."""
    run = Run()
    run.lives = saves(run, [10, 20])
    run.command()
    first = next(commit for commit in run.log.all() if commit.kind == "save")
    asked.wish(run.platform, RUN, first, run.log.head())
    run.lives = lambda attempt: saves(run, [20, 30], status=1 if attempt == 2 else 0)(attempt)
    assert run.command().exit_code == 0 and begun(run) == [-1, 10, 30]


def harm(run: Run, commit: Commit, gone: bool) -> None:
    """A bit of its image differs, or its manifest is not there any more."""
    folder = f"{RUN}/checkpoints/{commit.folder}"
    if gone:
        return run.platform.unlink(f"{folder}/manifest.json")
    image = f"{folder}/part-r00000.safetensors"
    data = run.platform.read(image)
    run.platform.write_replacing(image, data[:-1] + bytes([data[-1] ^ 1]))


def test_a_damaged_checkpoint_is_left_for_one_that_opens() -> None:
    """Tried twice; then an older save, and one that does not open is passed over at once."""
    run = Run()
    run.lives = saves(run, [10, 20, 30, 40])
    run.command()
    harm(run, run.log.all()[-1], gone=False)
    harm(run, run.log.all()[-2], gone=True)
    error = CheckpointDamaged("planted")

    def life(attempt: int) -> Life:
        return (ends(75, error) if begun(run)[-1] == 40 else ends(0))(attempt)

    run.lives = life
    assert run.command().exit_code == 0 and begun(run) == [-1, 40, 40, 20]


def test_the_guard_goes_one_save_back() -> None:
    """Whatever is newer."""
    run = Run()
    run.lives = saves(run, [10, 20])
    run.command()
    run.lives = lambda attempt: ends(75 if attempt == 2 else 0, GuardRollback("planted"))(attempt)
    assert run.command().exit_code == 0 and begun(run) == [-1, 20, 10]


def test_retention_is_asked_of_the_carrier() -> None:
    """After each save, after the last one too, and what it did is written down; what is kept is not asked for."""
    run = Run()
    run.lives = saves(run, [10, 20, 30, 40])
    run.command(msgspec.structs.replace(JOB, checkpoint=CheckpointConfig(keep_last=2, grace_s=0.0)))
    folders = [commit.folder for commit in run.log.all() if commit.kind == "save"]
    assert run.done(AskCarrier)
    assert {one.folder for one in run.records(RetentionDone)} == set(folders[:2])


class Unlistable(FakePlatform):
    """A journal folder that can be listed every other time only."""

    lists = 0

    def listdir(self, path: str) -> list[str]:
        if path.endswith("/journal"):
            self.lists += 1
            if self.lists % 2:
                raise OSError(5, "Input/output error", path)
        return super().listdir(path)


class Full(FakePlatform):
    """A disk on which the journal finds no room."""

    def create(self, path: str, *args: object, **options: object) -> object:  # type: ignore[override]
        if "/journal/" in path:
            raise OSError(28, "No space left on device", path)
        return super().create(path, *args, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("platform", [Unlistable, Full])
def test_a_journal_that_is_refused_ends_nothing(platform: type[FakePlatform]) -> None:
    """While its folder cannot be listed, or has no room, there is no news; the run goes on to its end."""
    run = Run(platform)
    run.lives = saves(run, [10, 20])
    assert run.command().exit_code == 0 and len(run.done(Launch)) == 1
    assert [commit.step for commit in run.log.all() if commit.kind == "save"] == [10, 20]


def test_no_attempt_begins_on_an_unknown_log() -> None:
    """A damaged last record ends the command before anything begins, and nothing is appended to the log."""
    run = Run()
    run.lives = saves(run, [10])
    run.command()
    names = sorted(run.platform.listdir(f"{RUN}/commits"))
    run.platform.write_replacing(f"{RUN}/commits/{names[-1]}", b"damaged")
    with pytest.raises(CommitUnknown):
        run.command()
    assert sorted(run.platform.listdir(f"{RUN}/commits")) == names


def test_a_file_system_without_links_is_refused() -> None:
    """Where link(2) is no exclusive create nothing begins."""
    run = Run()
    run.platform.faults = lambda op, path, n: fail(1) if op == "link" else None
    with pytest.raises(CommitsUnfit):
        run.command()
    assert run.log.all() == []


def test_a_folder_that_cannot_be_used_ends_the_first_attempt_at_once() -> None:
    """Whoever gave the command is still there: 75 with the place, and no try after try."""
    run = Run()
    run.platform.write_new(f"{RUN}/logs", b"in the way")
    began_ns = run.platform.boot_ns()
    finish = run.command()
    assert finish.exit_code == 75 and finish.error["name"] == "run.unusable" and f"{RUN}/logs" in finish.error["where"]
    assert begun(run) == [] and run.platform.boot_ns() - began_ns < NS
