"""Mirrors of a run that goes on: real processes, real couriers, folders that somebody deletes."""

from __future__ import annotations

import pathlib
import shutil
import signal

import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import verify_commit
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import AttemptBegan, AttemptEnded, BroughtBack, ErrorSeen, MirrorDone, StepDone
from tests.supervise.runs import drive, driven, expected, log, records, restore_point, saved_state


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "mirror").mkdir()
    return tmp_path / "run"


def mirror(folder: pathlib.Path, **more: object) -> list[dict[str, object]]:
    return [{"name": "other", "place": str(folder.parent / "mirror"), "every_s": 0.0, "deadline_s": 20.0} | more]


def test_a_folder_deleted_while_the_run_goes_on(folder: pathlib.Path) -> None:
    """rm -rf of a checkpoint's folder in the middle of a run: it is published again from the mirror, whole, and that is
    said and journalled."""
    toy = {"steps": 10**9, "save_every": 10, "wait": True, "step_s": 0.02}
    with driven(folder, toy, keep_last=10**6, mirrors=mirror(folder)) as run:
        run.until_step(11)
        save = next(commit for commit in log(folder).all() if commit.kind == "save")
        while not (folder.parent / "mirror" / "copied" / f"{save.number:012d}").exists():
            run.until("step")
        shutil.rmtree(folder / "checkpoints" / save.folder)
        said = run.until("say warning: [checkpoint.lost]")
        run.signal(signal.SIGTERM)
        code, _ = run.end()
    assert code == 75 and "back, from mirror other" in said
    (back,) = records(folder, BroughtBack)
    assert (back.folder, back.step) == (save.folder, 10)
    assert verify_commit(LocalPlatform(), str(folder), save) == []


@pytest.mark.soak
def test_all_checkpoints_deleted_between_two_commands(folder: pathlib.Path) -> None:
    """The next command brings the one it begins from back before it starts a worker, and goes on from there."""
    toy = {"steps": 30, "save_every": 10, "wait": True}
    assert drive(folder, toy, mirrors=mirror(folder, every_s=3600.0)) == (0, "")
    shutil.rmtree(folder / "checkpoints")
    assert drive(folder, toy | {"steps": 40}, mirrors=mirror(folder, every_s=3600.0)) == (0, "")
    assert saved_state(folder) == expected(40)
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, 30]
    assert [done.step for done in records(folder, MirrorDone)][-2:] == [30, 40]
    there = CommitLog(LocalPlatform(), str(folder.parent / "mirror" / "commits")).restore_point()
    assert there == restore_point(folder) and there.step == 40
    assert verify_commit(LocalPlatform(), str(folder.parent / "mirror"), there) == []


@pytest.mark.soak
def test_asked_to_stop_before_it_is_back(folder: pathlib.Path) -> None:
    """Ctrl-C while a lost checkpoint is brought back starts no worker, and is a stop on request."""
    toy = {"steps": 20, "save_every": 10, "wait": True}
    assert drive(folder, toy, mirrors=mirror(folder)) == (0, "")
    shutil.rmtree(folder / "checkpoints" / restore_point(folder).folder)
    toy["steps"] = 30
    with driven(folder, toy, mirrors=mirror(folder, bytes_per_s_max=1.0)) as run:
        run.until("say step 20 was taken away")
        run.signal(signal.SIGINT)
        code, errors = run.end()
    assert code == 75 and "run.stopped_on_request" in errors
    assert (records(folder, AttemptEnded)[-1].exit_code, len(records(folder, StepDone))) == (75, 20)
    assert restore_point(folder).step == 20


@pytest.mark.soak
def test_a_mirror_that_is_not_there_ends_no_run(folder: pathlib.Path) -> None:
    """A run whose mirror cannot be reached trains on and ends well, with a warning that names the mirror."""
    place = str(folder.parent / "unmounted")
    assert drive(folder, {"steps": 20, "save_every": 10, "wait": True}, mirrors=mirror(folder, place=place)) == (0, "")
    assert saved_state(folder) == expected(20)
    seen = records(folder, ErrorSeen)
    assert seen and {one.name for one in seen} == {"checkpoint.mirror_failed"} and "other" in seen[0].what
