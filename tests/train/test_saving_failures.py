"""Saves that fail: a warning and on, unless it is the last one; a newer attempt ends this one at once."""

from __future__ import annotations

import pathlib

import pytest

from packtrain.core.contract import Order, Word
from packtrain.core.errors import CommitStale, PacktrainError, SaveFailed
from packtrain.core.records import ErrorSeen, SaveDone, StepDone, TrainingDone
from packtrain.train.orders import Orders
from packtrain.train.saving import SKIPPED
from tests.train import rig
from tests.train.test_loop_orders import Clock

STEPS = rig.SPEC.train.steps
FULL = SaveFailed("no space left on device", where="/run/checkpoints", fix="free space there")
EVERY_2 = rig.replace(rig.SPEC, checkpoint=rig.CheckpointConfig(every_s=0, every_steps=2, deadline_s=5.0))


def attempt(folder: pathlib.Path, *errors: PacktrainError | None, **changes: object) -> rig.Attempt:
    return rig.Attempt(str(folder), spec=EVERY_2, platform=Clock(), offering=rig.Kept(errors), **changes)


def test_a_failed_save_is_one_warning(tmp_path: pathlib.Path) -> None:
    """A save that failed is one warning with place and remedy; the run goes on, saves later steps and ends normally."""
    attempt(tmp_path, FULL).run()
    assert rig.records(str(tmp_path), ErrorSeen) == [ErrorSeen(severity="warning", **FULL.as_dict())]
    assert [(s.step, s.commit > 0, s.error) for s in rig.records(str(tmp_path), SaveDone)] == [
        (2, False, FULL.name), (4, True, ""), (6, True, ""),
    ]
    assert len(rig.records(str(tmp_path), TrainingDone)) == 1


def test_the_last_save_is_tried_until_it_works(tmp_path: pathlib.Path) -> None:
    """A last save that fails at first is tried again within its deadline."""
    attempt(tmp_path, None, None, FULL, FULL).run()
    assert [(s.step, s.commit > 0) for s in rig.records(str(tmp_path), SaveDone)] == [
        (2, True), (4, True), (6, False), (6, False), (6, True),
    ]
    assert len(rig.records(str(tmp_path), TrainingDone)) == 1


def test_the_last_save_finds_no_home(tmp_path: pathlib.Path) -> None:
    """When the last save has no home by its deadline the run ends with 75 and names the last published step."""
    with pytest.raises(SaveFailed, match=r"no space left.*last published step is 4") as failed:
        attempt(tmp_path, None, None, *[FULL] * 9).run()
    assert failed.value.exit_code == 75
    assert len(rig.records(str(tmp_path), StepDone)) == STEPS
    assert rig.records(str(tmp_path), TrainingDone) == []


def test_a_stop_waits_no_longer_than_its_grace(tmp_path: pathlib.Path) -> None:
    """A stop whose save finds no home gives up within the grace, though checkpoint.deadline_s is longer."""
    clock = Clock()
    failing = attempt(tmp_path, *[FULL] * 99, orders=Orders(rig.Script({2: Order(1, Word.STOP)})), grace_s=3.0)
    failing.platform = clock
    with pytest.raises(SaveFailed, match="no step was published yet"):
        failing.run()
    assert clock.slept_s < 3.0
    last = failing.offering.deadlines[1:]
    assert last and all(0 < deadline_s < 3.0 for deadline_s in last), "the carrier is told how long we can wait"


def test_a_busy_carrier_is_skipped_and_counted(tmp_path: pathlib.Path) -> None:
    """A save that could not even be offered is recorded as skipped, and no warning."""
    busy = attempt(tmp_path)
    busy.offering = rig.Kept(busy=[1])
    busy.run()
    assert [(s.step, s.error) for s in rig.records(str(tmp_path), SaveDone)] == [(2, SKIPPED), (4, ""), (6, "")]
    assert rig.records(str(tmp_path), ErrorSeen) == []


def test_a_newer_attempt_ends_this_one(tmp_path: pathlib.Path) -> None:
    """An outcome that says a newer attempt began stops the loop at its next step with 75, without another save."""
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "old")
    old = rig.begin(folder, run, spec=EVERY_2)
    rig.begin(rig.fresh_folder(tmp_path, "new"), run)
    with pytest.raises(CommitStale, match="newer attempt") as stopped:
        old.run()
    assert stopped.value.exit_code == 75
    assert [(s.step, s.commit) for s in rig.records(folder, SaveDone)] == [(2, 0)]
    assert len(rig.records(folder, StepDone)) < STEPS
    assert rig.saved_commits(run) == {}
