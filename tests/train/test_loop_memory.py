"""The loop and the memory tier: its own cadence, and a restart from what was copied last."""

from __future__ import annotations

import pathlib
import shutil

import msgspec
import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import restoring
from packtrain.checkpoint.rounds import Round
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import BufferFolder, look, memory_folder
from packtrain.core.errors import GuardRollback
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import MemorySaved, StepDone
from packtrain.data.loader import Batch
from packtrain.train.saving import Standing, restore_state
from tests.train import rig

STEPS = rig.SPEC.train.steps


def remembering(every: int, every_steps: int = 0) -> rig.Sections:
    config = rig.CheckpointConfig(every_s=0, every_steps=every_steps, memory_every_steps=every, deadline_s=5.0)
    return rig.replace(rig.SPEC, checkpoint=config)


def test_copies_have_a_cadence_of_their_own(tmp_path: pathlib.Path) -> None:
    """Every so many steps the state is copied into memory, before the save on disk where one is due at that step; each
    copy and each skipped one is journalled, and training has the same bits. Without a tier nothing is copied."""
    kept, folder = rig.Kept(busy=[4], remembers=True), rig.fresh_folder(tmp_path, "with")
    final = rig.Attempt(folder, spec=remembering(2, every_steps=4), offering=kept).run()
    assert kept.remembered == [2, 4] and kept.offers == [4, STEPS]
    told = [(copy.step, copy.bytes > 0, copy.stall_s) for copy in rig.records(folder, MemorySaved)]
    assert told == [(2, True, 0.5), (4, False, 0.0)]
    kept, folder = rig.Kept(), rig.fresh_folder(tmp_path, "without")
    plain = rig.Attempt(folder, spec=remembering(2), offering=kept).run()
    assert (kept.remembered, rig.records(folder, MemorySaved)) == ([], [])
    assert rig.bits(final) == rig.bits(plain)


def test_rounds_begin_as_all_have_said(tmp_path: pathlib.Path) -> None:
    """A round begins with a step of its cadence, when what was read from the calls up to it says that the last one has
    ended, also where a batch was run again there; which one was held last goes with it."""
    for ends, rounds in (
        ({2: 2, 4: 4}, [Round(2, 0), Round(4, 2)]), ({2: -2}, [Round(2, 0), Round(4, 0)]), ({}, [Round(2, 0)]),
    ):
        kept, folder = rig.Kept(remembers=True, ends=ends), rig.fresh_folder(tmp_path, f"of {len(ends)} {rounds[-1]}")
        rig.Attempt(folder, spec=remembering(1), offering=kept, peer_every=2, feed=rig.Feed({3: 1})).run()
        assert kept.rounds == rounds and kept.remembered == [1, 2, 3, 4, 5]
    none = rig.Kept(remembers=True)
    rig.Attempt(rig.fresh_folder(tmp_path, "none"), spec=remembering(1), offering=none).run()
    assert none.rounds == []


def test_a_rollback_leaves_nothing_in_memory(tmp_path: pathlib.Path) -> None:
    """An attempt that the guard rolls back forgets its copies: they are newer than where the run goes back to, and the
    next attempt may be begun by somebody who has heard of no rollback."""
    kept, folder = rig.Kept(remembers=True), rig.fresh_folder(tmp_path, "journal")
    spec = rig.replace(remembering(1), guard=msgspec.structs.replace(rig.SPEC.guard, policy="rollback"))
    with pytest.raises(GuardRollback):
        rig.Attempt(folder, spec=spec, offering=kept, feed=rig.Feed({3: 99})).run()
    assert len(rig.records(folder, MemorySaved)) == 3 and kept.remembered == []


class Dies(rig.Feed):
    """The program ends where batch 4 is asked for."""

    def get(self, index: int) -> Batch:
        if index == 4 and self.armed:
            raise ZeroDivisionError("planted")
        return super().get(index)


def in_memory(folder: str, run: str, **changes: object) -> rig.Attempt:
    """An attempt that begins from memory where it may, and keeps copies there."""
    platform = LocalPlatform()
    log = CommitLog(platform, f"{run}/commits")
    log.probe()
    platform.mkdir(f"{run}/checkpoints")
    begin = log.begin(None, ("r00000",), platform.node(), memory=look(platform, run, log).memory)
    made = rig.Attempt(folder, spec=remembering(1), attempt=begin.attempt, **changes)  # type: ignore[arg-type]
    if begin.memory is not None:
        with restoring(platform, run, begin.number, begin.memory[2]) as checkpoint:
            made.state = restore_state(checkpoint, made.spec, rig.programs(STEPS).mesh)
            made.standing = Standing.of(checkpoint.manifest)
    where = BufferFolder(memory_folder(run, platform.node()), slots=True)
    made.offering = Saver(platform, where, rig.InlineCarrier(platform, run), begin.attempt, "r00000", 5.0, begin)
    return made


def test_a_restart_from_memory_is_the_uncut_run(tmp_path: pathlib.Path, memory_disk: None) -> None:
    """A program that ends before anything is on disk goes on from the last step it had copied: every later loss and the
    final state, guard statistics included, are those of the uncut run."""
    uncut, folder, run = (rig.fresh_folder(tmp_path, name) for name in ("uncut", "journal", "run"))
    final = rig.bits(rig.Attempt(uncut).run())
    try:
        with pytest.raises(ZeroDivisionError):
            in_memory(folder, run, feed=Dies()).run()
        resumed = in_memory(folder, run)
        assert resumed.standing.index == 4
        assert rig.bits(resumed.run()) == final and STEPS in rig.saved_commits(run)
        assert rig.losses(rig.records(folder, StepDone)) == rig.losses(rig.records(uncut, StepDone))
    finally:
        shutil.rmtree(memory_folder(run, LocalPlatform().node()), ignore_errors=True)
