"""Restarts from memory on real processes: real SIGKILLs, a real tmpfs, the toy as worker."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.slots import memory_folder
from packtrain.core.records import AttemptBegan, ErrorSeen
from tests.supervise.runs import drive, expected, log, records, saved_state

TOY = {"steps": 40, "save_every": 10, "wait": True, "remember": True}

NODE = "n0"


@pytest.fixture
def folder(tmp_path: pathlib.Path, memory_disk: None) -> Iterator[pathlib.Path]:
    yield tmp_path / "run"
    shutil.rmtree(memory_folder(str(tmp_path / "run"), NODE), ignore_errors=True)


def begins(folder: pathlib.Path) -> list[Commit]:
    return [commit for commit in log(folder).all() if commit.kind == "begin"]


def test_a_killed_worker_goes_on_from_memory(folder: pathlib.Path) -> None:
    """Killed before anything is on disk, or after, the next attempt begins at the last step or the one before, from
    memory; killed before its first step, the next begins from the same. Damage there is named and costs that attempt,
    and the next begins from disk. The result is the undisturbed one, and nothing of the run stays in memory."""
    fail = {"1": [7, "kill"], "2": [25, "kill"], "3": [0, "kill"], "4": [35, "flip"]}
    assert drive(folder, TOY | {"fail": fail}) == (0, "")
    assert saved_state(folder) == expected(40)
    first, second, third, fourth, fifth, sixth = begins(folder)
    assert (first.memory, second.parent) == (None, first.number) and second.step in (6, 7)
    assert third.memory is not None and third.memory == fourth.memory
    assert third.memory[0] == 2 and third.step in (24, 25)
    assert fifth.memory is not None and fifth.step == 35 and (sixth.memory, sixth.step) == (None, 30)
    began = records(folder, AttemptBegan)
    assert [one.restore_step for one in began] == [-1, second.step, third.step, third.step, 35, 30]
    assert began[1].note == f"step {second.step} from memory: nothing is on disk yet"
    assert began[2].note == f"step {third.step} from memory: {third.step - 20} steps newer than the newest on disk"
    damaged = next(error for error in records(folder, ErrorSeen) if error.name == "checkpoint.slot_damaged")
    assert "tensor state" in damaged.what and memory_folder(str(folder), NODE) in damaged.where
    assert not os.path.exists(memory_folder(str(folder), NODE))


@pytest.mark.soak
def test_a_rollback_takes_nothing_from_memory(folder: pathlib.Path) -> None:
    """The guard's way back leads to the save before the last, whatever newer steps are in memory."""
    assert drive(folder, TOY | {"steps": 30, "fail": {"1": [25, "back"]}}) == (0, "")
    assert [(one.memory, one.step) for one in begins(folder)] == [(None, -1), (None, 10)]
    assert saved_state(folder) == expected(30)
