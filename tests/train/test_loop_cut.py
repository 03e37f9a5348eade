"""Cut anywhere, compare the tail: a resumed run is the uncut run, bit for bit."""

from __future__ import annotations

import pathlib

import pytest

from packtrain.core.contract import ORDER_LAG, Order, Word
from packtrain.core.errors import StoppedOnRequest
from packtrain.core.records import StepDone, TrainingDone
from packtrain.train.orders import Orders
from tests.train import rig

STEPS = rig.SPEC.train.steps


def every_step(spec: rig.Sections) -> rig.Sections:
    return rig.replace(spec, checkpoint=rig.CheckpointConfig(every_s=0, every_steps=1, deadline_s=5.0))


def test_cut_after_any_step(tmp_path: pathlib.Path) -> None:
    """Restored from the checkpoint of any step, every later loss and the final state, guard statistics included, are
    those of the uncut run."""
    run, uncut_folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "uncut")
    final = rig.bits(rig.begin(uncut_folder, run, spec=every_step(rig.SPEC)).run())
    uncut = rig.losses(rig.records(uncut_folder, StepDone))
    assert sorted(uncut) == list(range(1, STEPS + 1))
    commits = rig.saved_commits(run)
    for cut in range(1, STEPS + 1):
        folder = rig.fresh_folder(tmp_path, f"cut-{cut}")
        resumed = rig.bits(rig.begin(folder, run, parent=commits[cut].number).run())
        assert rig.losses(rig.records(folder, StepDone)) == {step: x for step, x in uncut.items() if step > cut}
        assert resumed == final


@pytest.mark.parametrize("poll", range(1, STEPS + 2))
def test_stop_and_resume(tmp_path: pathlib.Path, poll: int) -> None:
    """Stopped by an order at any call, the run saves that step; the next attempt goes on to the uncut run's bits."""
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "journal")
    script = rig.Script({poll: Order(1, Word.STOP)})
    with pytest.raises(StoppedOnRequest):
        rig.begin(folder, run, orders=Orders(script)).run()
    stopped = len(rig.records(folder, StepDone))
    # Poll 1 is the exchange before the first step; call k polls k + 1.
    assert stopped == (0 if poll == 1 else min(poll - 1 + ORDER_LAG, STEPS))
    assert (stopped in rig.saved_commits(run)) == (stopped > 0)
    final = rig.bits(rig.begin(folder, run).run())
    steps = rig.records(folder, StepDone)
    assert [r.step for r in steps] == list(range(1, STEPS + 1))
    assert [r.step for r in rig.records(folder, TrainingDone)] == [STEPS]
    assert final == uncut_bits(tmp_path)


def uncut_bits(tmp_path: pathlib.Path) -> dict[str, bytes]:
    return rig.bits(rig.Attempt(rig.fresh_folder(tmp_path, "uncut")).run())
