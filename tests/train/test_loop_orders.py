"""What the loop does when it is told something: by its agent, by a signal, by its own clock."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from packtrain.checkpoint.interval import EVERY_S_MIN
from packtrain.checkpoint.saver import SaveResult
from packtrain.core.contract import ORDER_LAG, Order, Word
from packtrain.core.errors import StoppedOnRequest
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import EvalDone, IntervalChosen, PhaseTotals, SaveDone, StepDone, TrainingDone
from packtrain.core.units import NS
from packtrain.train.loop import PAUSE_POLL_S
from packtrain.train.orders import Orders
from tests.train import rig

STEPS = rig.SPEC.train.steps


class Clock(LocalPlatform):
    """The real files and a clock of its own, which only `pass_s` and `sleep` move."""

    def __init__(self) -> None:
        self.now_ns, self.slept_s = 1, 0.0

    def boot_ns(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS)

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.pass_s(seconds)


class SlowFeed(rig.Feed):
    """Each batch takes 5 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def get(self, index: int) -> rig.Batch:
        self._clock.pass_s(5.0)
        return super().get(index)


def scripted(*orders: tuple[int, Order]) -> Orders:
    return Orders(rig.Script(dict(orders)))


def test_save_order(tmp_path: pathlib.Path) -> None:
    """SAVE saves the step that all ranks reached together, and training goes on to the bits of a run never told to."""
    kept = rig.Kept()
    final = rig.Attempt(str(tmp_path), orders=scripted((2, Order(1, Word.SAVE))), offering=kept).run()
    assert kept.offers == [1 + ORDER_LAG, STEPS]
    assert rig.bits(final) == rig.bits(rig.Attempt(rig.fresh_folder(tmp_path, "plain")).run())


def test_pause_and_resume(tmp_path: pathlib.Path) -> None:
    """PAUSE computes nothing until RESUME; the pause counts neither as training time nor as step time."""
    clock, kept = Clock(), rig.Kept()
    orders = scripted((2, Order(1, Word.PAUSE)), (9, Order(2, Word.RESUME)))
    attempt = rig.Attempt(str(tmp_path), orders=orders, platform=clock, offering=kept)
    final = attempt.run()
    assert rig.bits(final) == rig.bits(rig.Attempt(rig.fresh_folder(tmp_path, "plain")).run())
    assert clock.slept_s == pytest.approx(4 * PAUSE_POLL_S)
    assert attempt.loop is not None and attempt.loop._trained() == 0
    assert all(r.seconds == 0 for r in rig.records(str(tmp_path), StepDone))


def test_stop_while_paused(tmp_path: pathlib.Path) -> None:
    """A paused world hears STOP, saves and leaves."""
    kept = rig.Kept()
    orders = scripted((2, Order(1, Word.PAUSE)), (7, Order(2, Word.STOP)))
    with pytest.raises(StoppedOnRequest):
        rig.Attempt(str(tmp_path), orders=orders, platform=Clock(), offering=kept).run()
    assert list(kept.saved) == [1 + ORDER_LAG]


def test_drain_is_stop(tmp_path: pathlib.Path) -> None:
    """DRAIN saves and ends with 75, like STOP."""
    kept = rig.Kept()
    with pytest.raises(StoppedOnRequest) as stopped:
        rig.Attempt(str(tmp_path), orders=scripted((3, Order(1, Word.DRAIN))), offering=kept).run()
    assert stopped.value.exit_code == 75
    assert list(kept.saved) == [2 + ORDER_LAG]


def test_sigterm_stops(tmp_path: pathlib.Path) -> None:
    """A SIGTERM that came before the first step stops before it; nothing was trained, so nothing is saved."""
    orders, kept = scripted(), rig.Kept()
    orders.terminate()
    with pytest.raises(StoppedOnRequest, match="after step 0"):
        rig.Attempt(str(tmp_path), orders=orders, offering=kept).run()
    assert kept.offers == []


def test_finish_order(tmp_path: pathlib.Path) -> None:
    """FINISH is a normal end at the step all reached: saved, evaluated, TrainingDone, no error."""
    kept = rig.Kept()
    rig.Attempt(str(tmp_path), orders=scripted((2, Order(1, Word.FINISH))), offering=kept).run()
    assert kept.offers == [1 + ORDER_LAG]
    assert [r.step for r in rig.records(str(tmp_path), TrainingDone)] == [1 + ORDER_LAG]


def test_skip_window_outlives_a_restart(tmp_path: pathlib.Path) -> None:
    """A window ordered in one attempt is skipped in the next too: it is kept in the checkpoint."""
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "journal")
    orders = scripted((1, Order(1, Word.SKIP, 4, 2)), (2, Order(2, Word.STOP)))
    with pytest.raises(StoppedOnRequest):
        rig.begin(folder, run, orders=orders).run()
    rig.begin(folder, run).run()
    assert [d.updates_skipped for d in rig.records(folder, TrainingDone)] == [2]


def test_minutes_max_ends_training(tmp_path: pathlib.Path) -> None:
    """When minutes_max have passed over all attempts, the run ends normally at the next agreed step and stays so."""
    spec = rig.with_train(rig.SPEC, minutes_max=0.1)
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "journal")
    for clock in (Clock(), Clock()):
        rig.begin(folder, run, spec=spec, platform=clock, feed=SlowFeed(clock)).run()
    # 6 s have passed after the 2nd batch of 5 s; the 3rd carries the order.
    assert [d.step for d in rig.records(folder, TrainingDone)] == [3 + ORDER_LAG] * 2
    assert len(rig.records(folder, StepDone)) == 3 + ORDER_LAG


def test_time_alone_saves(tmp_path: pathlib.Path) -> None:
    """With every_s the clock of rank 0 orders saves, each at a step all ranks agreed on."""
    spec = rig.replace(rig.SPEC, checkpoint=rig.CheckpointConfig(every_s=5.0, deadline_s=5.0))
    clock, kept = Clock(), rig.Kept()
    final = rig.Attempt(str(tmp_path), spec=spec, platform=clock, feed=SlowFeed(clock), offering=kept).run()
    # Due after the 1st batch, carried by the 2nd, obeyed after the lag; due again after the next.
    assert kept.offers == [2 + ORDER_LAG, STEPS]
    assert [r.step for r in rig.records(str(tmp_path), SaveDone)] == kept.offers
    assert rig.bits(final) == rig.bits(rig.Attempt(rig.fresh_folder(tmp_path, "plain")).run())


class Costing(rig.Kept):
    """Saves that take a tenth of a second to write."""

    def poll(self) -> list[SaveResult]:
        return [result._replace(write_s=0.1) for result in super().poll()]


def test_auto_chooses_an_interval_once_a_save_was_measured(tmp_path: pathlib.Path) -> None:
    """With every_s = "auto" the loop journals the interval that the first save's cost gives, with its reason, and no
    other while that does not change."""
    spec = rig.replace(rig.SPEC, checkpoint=rig.CheckpointConfig(every_s="auto", deadline_s=5.0))
    clock, orders = Clock(), scripted((1, Order(1, Word.SAVE)))
    rig.Attempt(
        str(tmp_path), spec=spec, platform=clock, feed=SlowFeed(clock), offering=Costing(), orders=orders
    ).run()
    (chosen,) = rig.records(str(tmp_path), IntervalChosen)
    assert chosen.every_s == EVERY_S_MIN and "0 in 0.0 node-days" in chosen.reason


def test_a_finished_run_does_nothing_but_its_end(tmp_path: pathlib.Path) -> None:
    """An attempt restored at the last step trains nothing, saves nothing, and says again that training is done."""
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "journal")
    final = rig.bits(rig.begin(folder, run).run())
    assert rig.bits(rig.begin(folder, run).run()) == final
    assert len(rig.records(folder, StepDone)) == STEPS
    assert len(rig.records(folder, TrainingDone)) == 2
    assert len(rig.records(folder, SaveDone)) == 1


def test_a_restored_step_is_not_saved_again(tmp_path: pathlib.Path) -> None:
    """SAVE before the first step of a resumed attempt has nothing to do: that step is published already."""
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "journal")
    with pytest.raises(StoppedOnRequest):
        rig.begin(folder, run, orders=scripted((2, Order(1, Word.STOP)))).run()
    rig.begin(folder, run, orders=scripted((1, Order(1, Word.SAVE)))).run()
    assert [s.step for s in rig.records(folder, SaveDone)] == [1 + ORDER_LAG, STEPS]


def test_phase_totals(tmp_path: pathlib.Path) -> None:
    """Totals per phase are journalled every 10 s of the run's clock and at its end, whichever way it ends."""
    clock = Clock()
    rig.Attempt(str(tmp_path), platform=clock, feed=SlowFeed(clock)).run()
    # Two probes and six steps of 5 s each, and the end.
    assert len(rig.records(str(tmp_path), PhaseTotals)) == 4 + 1
    assert rig.records(str(tmp_path), EvalDone) == []
    folder = rig.fresh_folder(tmp_path, "stopped")
    with pytest.raises(StoppedOnRequest):
        rig.Attempt(folder, orders=scripted((2, Order(1, Word.STOP)))).run()
    assert len(rig.records(folder, PhaseTotals)) == 1


def offers_held(folder: str, *orders: tuple[int, Order], **cadence: Any) -> list[int]:
    clock, kept = Clock(), rig.Kept()
    spec = rig.replace(rig.SPEC, checkpoint=rig.CheckpointConfig(deadline_s=5.0, **cadence))
    rig.Attempt(
        folder, spec=spec, orders=scripted(*orders), platform=clock, offering=kept, feed=SlowFeed(clock)
    ).run()
    return kept.offers


def test_saves_by_the_cadence_are_held(tmp_path: pathlib.Path) -> None:
    """After HOLD nothing is saved by the cadence, of steps or of time, before the step it names; what is asked for, and
    the last one, is saved; HOLD with 0 ends it."""
    hold, long = (1, Order(1, Word.HOLD, 5)), (1, Order(1, Word.HOLD, 100))
    by_steps = offers_held(rig.fresh_folder(tmp_path, "a"), hold, every_s=0, every_steps=1)
    assert 4 not in by_steps and by_steps[-2:] == [5, STEPS]
    asked = offers_held(rig.fresh_folder(tmp_path, "b"), long, (3, Order(2, Word.SAVE)), every_s=0, every_steps=1)
    ended = offers_held(rig.fresh_folder(tmp_path, "c"), long, (2, Order(2, Word.HOLD)), every_s=0, every_steps=1)
    assert len(asked) >= 2 and 5 in ended
    assert offers_held(rig.fresh_folder(tmp_path, "d"), long, every_s=5.0) == [STEPS]
