"""The policy of one node, pure: what follows what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.errors import CheckpointDamaged, PacktrainError, SaveFailed, WrongModel
from packtrain.core.units import NS
from packtrain.supervise import one_node as on
from packtrain.supervise.config import SuperviseConfig

CONFIG = SuperviseConfig(grace_s=30, beat_overdue_s=10, attempts_without_progress=3)


def play(*events: on.Event, state: on.State | None = None) -> tuple[on.State, list[on.Action]]:
    """The state after `events` and the actions of the last one. Every Begin is answered by the events that follow."""
    state, actions = state or on.State(config=CONFIG), []
    for event in events:
        state, actions = on.decide(state, event)
    return state, actions


def running(step: int = 5) -> on.State:
    """A run restored from step 4 whose first attempt has completed `step` steps."""
    return play(on.Opened(best_step=4), on.Began(ns=0), on.Heard(ns=NS, step=step))[0]


def ended(status: int, error: PacktrainError | None = None, tail: str = "") -> on.WorkerEnded:
    return on.WorkerEnded(ns=2 * NS, status=status, error=error, tail=tail)


def finish(actions: list[on.Action]) -> on.Finish:
    assert isinstance(actions[-1], on.Finish)
    return actions[-1]


def kinds(actions: list[on.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_zero_is_done() -> None:
    """A worker that exits 0 ends the run with exit code 0 and no error."""
    actions = play(ended(0), state=running())[1]
    assert kinds(actions) == ["EndAttempt", "Finish"]
    assert (finish(actions).exit_code, finish(actions).error) == (0, None)


def test_75_after_an_order_is_stopped() -> None:
    """A worker that exits 75 after it was asked to stop ends the run with 75, and no attempt begins."""
    state, actions = play(on.Asked(ns=NS, by="SIGINT"), state=running())
    assert actions == [on.OrderStop(reason="SIGINT")]
    actions = play(ended(75), state=state)[1]
    assert finish(actions).exit_code == 75 and finish(actions).error.name == "run.stopped_on_request"  # type: ignore[union-attr]


def test_75_unasked_begins_again() -> None:
    """A worker that asks to be started again is, at once."""
    assert kinds(play(ended(75), state=running())[1]) == ["EndAttempt", "Warn", "Begin"]


def test_75_for_want_of_a_home_for_the_last_save_stops() -> None:
    """Exit 75 after the last save found no home is not tried again on the same disk; the error names what to do."""
    error = SaveFailed("disk full", where="checkpoints", fix="free space")
    actions = play(ended(75, error), state=running())[1]
    assert finish(actions) == on.Finish(exit_code=75, reason="disk full", error=error)


@pytest.mark.parametrize("asked", [False, True])
def test_78_is_never_restarted(asked: bool) -> None:
    """A refused configuration ends the run with 78 and the worker's own error, asked to stop or not."""
    error = WrongModel("the checkpoint is of another model")
    before = [on.Asked(ns=NS, by="SIGTERM")] if asked else []
    actions = play(*before, ended(78, error), state=running())[1]
    assert (finish(actions).exit_code, finish(actions).error) == (78, error)


@pytest.mark.parametrize("status", [1, 70, 137, -9, -11, -6])
def test_anything_else_is_diagnosed_and_restarted(status: int) -> None:
    """A crash is told with its signal or code and the last line of the log, and another attempt begins."""
    actions = play(ended(status, tail="Traceback\n\x1b[31mValueError: x\n\n"), state=running())[1]
    assert kinds(actions) == ["EndAttempt", "Warn", "Begin"]
    assert isinstance(actions[0], on.EndAttempt)
    assert on.status_text(status) in actions[0].reason and "ValueError: x" in actions[0].reason
    assert "\x1b" not in actions[0].reason


def test_sigkill_names_memory() -> None:
    """A SIGKILL nobody sent is explained by the most likely cause."""
    assert "out of memory" in on.diagnose(-9, "")


def test_crashes_without_progress_end_the_run() -> None:
    """After three attempts in a row without a step above the highest, the run stops with NoProgress and exit 70."""
    state = running(step=5)
    begins = 0
    for _ in range(4):
        state, actions = play(ended(1), state=state)
        if isinstance(actions[-1], on.Finish):
            break
        begins += 1
        state, _ = play(on.Began(ns=0), on.Heard(ns=0, step=5), state=state)
    assert begins == 3 and finish(actions).exit_code == 70
    assert finish(actions).error.name == "run.no_progress"  # type: ignore[union-attr]


def test_progress_resets_the_count() -> None:
    """An attempt that completes one more step than any before gives the run its three tries again."""
    state = running(step=5)
    for step in range(6, 60):
        state, actions = play(ended(1), state=state)
        assert isinstance(actions[-1], on.Begin)
        state, _ = play(on.Began(ns=0), on.Heard(ns=0, step=step), state=state)


def test_a_damaged_checkpoint_is_left_behind() -> None:
    """A checkpoint that cannot be read is tried once more, then the one before it, and progress counts from there."""
    error = CheckpointDamaged("bytes 0..9: crc32c differs")
    state, actions = play(ended(75, error), state=running(step=-1))
    assert actions[-1] == on.Begin(reason=error.what, back=0)
    state, actions = play(on.Began(ns=0), ended(75, error), state=state)
    assert actions[-1] == on.Begin(reason=error.what, back=1)
    state, _ = play(on.Began(ns=0, step=2), on.Heard(ns=0, step=3), ended(1), state=state)
    assert (state.fruitless, state.damaged, state.best_step) == (0, 0, 3)


def test_a_replayed_step_is_not_progress() -> None:
    """Steps completed again after a restore do not count as progress."""
    state, _ = play(ended(1), on.Began(ns=0), on.Heard(ns=0, step=3), ended(1), state=running(step=5))
    assert state.fruitless == 1 and state.best_step == 5


def test_step_zero_is_not_progress() -> None:
    """A fresh worker that says it has completed nothing has made no progress."""
    state, _ = play(on.Opened(best_step=0), on.Began(ns=0), on.Heard(ns=0, step=0), ended(1))
    assert state.fruitless == 1


def test_silence_is_death() -> None:
    """Beats silent for beat_overdue_s: SIGKILL once, and the end is told as silence."""
    state = looked(running(), 10)
    assert not play(on.Tick(ns=11 * NS - 1), state=state)[1]
    state, actions = play(on.Tick(ns=11 * NS), state=state)
    assert kinds(actions) == ["Kill"]
    state, actions = play(on.Tick(ns=12 * NS), state=state)
    assert actions == []
    actions = play(ended(-9), state=state)[1]
    assert isinstance(actions[1], on.Warn) and actions[1].error.name == "run.worker_silent"


def looked(state: on.State, until_s: int) -> on.State:
    """`state` watched each second up to `until_s`."""
    return play(*(on.Tick(ns=second * NS) for second in range(1, until_s + 1)), state=state)[0]


def test_the_first_beat_may_take_longer() -> None:
    """Before its first beat a worker has twice the time: interpreters start slowly."""
    state = looked(play(on.Opened(best_step=0), on.Began(ns=0))[0], 19)
    assert not state.killed
    assert kinds(play(on.Tick(ns=20 * NS), state=state)[1]) == ["Kill"]


def test_time_nobody_looked_counts_for_nothing() -> None:
    """After an hour of suspend neither silence nor the end of the grace is concluded before its time was watched."""
    state, _ = play(on.Asked(ns=NS, by="SIGINT"), state=looked(running(), 5))
    state, actions = play(on.Tick(ns=3600 * NS), state=state)
    assert actions == []
    state = replace(state, overdue_ns=10**18)
    assert kinds(play(*(on.Tick(ns=s * NS) for s in range(3601, 3627)), state=state)[1]) == ["Kill"]


def test_the_grace_ends_in_sigkill() -> None:
    """A worker still there when the grace is over is killed, and the run ends stopped, not cleanly."""
    state, _ = play(on.Asked(ns=0, by="SIGTERM"), state=running())
    state = replace(state, overdue_ns=10**18)
    state = looked(state, 29)
    assert not state.killed
    state, actions = play(on.Tick(ns=30 * NS), state=state)
    assert kinds(actions) == ["Kill"]
    actions = play(ended(-9), state=state)[1]
    assert finish(actions).exit_code == 75 and "not cleanly" in finish(actions).error.what  # type: ignore[union-attr]


def test_asked_twice_kills_at_once() -> None:
    """The second request to stop kills without waiting for the grace."""
    state, actions = play(on.Asked(ns=0, by="SIGINT"), on.Asked(ns=1, by="SIGINT"), state=running())
    assert kinds(actions) == ["Kill"]
    assert finish(play(ended(-9), state=state)[1]).exit_code == 75


def test_asked_before_an_attempt_runs() -> None:
    """Asked to stop while nothing runs, the run ends with 75 and nothing begins."""
    actions = play(on.Opened(best_step=0), on.Asked(ns=0, by="SIGINT"))[1]
    assert kinds(actions) == ["Finish"] and finish(actions).exit_code == 75


def test_done_beats_stop() -> None:
    """A worker that reached its end while it was asked to stop is done."""
    actions = play(on.Asked(ns=0, by="SIGINT"), ended(0), state=running())[1]
    assert finish(actions).exit_code == 0


def test_a_dead_carrier_is_replaced_and_the_worker_is_not_touched() -> None:
    """Carrier death brings a new carrier at the next look, later and later when it keeps dying, and no other action."""
    state, waits = running(), []
    now = 2
    for _ in range(7):
        state, actions = play(on.CarrierGone(ns=now * NS, status=-9), state=state)
        assert kinds(actions) == ["Warn"]
        began, actions = now, []
        while not actions:
            state, actions = play(on.Heard(ns=now * NS, step=5), on.Tick(ns=now * NS), state=state)
            now += 1
        assert kinds(actions) == ["StartCarrier"]
        waits.append(now - 1 - began)
    assert waits == [0, 1, 2, 4, 8, 16, 30]
    assert state.running


EVENTS = st.one_of(
    st.builds(on.WorkerEnded, ns=st.just(0), status=st.sampled_from([0, 75, 78, 1, -9, -11])),
    st.builds(on.CarrierGone, ns=st.just(0), status=st.sampled_from([0, 1, -9])),
    st.builds(on.Heard, ns=st.just(0), step=st.integers(-1, 30)),
    st.builds(on.Asked, ns=st.just(0), by=st.sampled_from(["SIGINT", "SIGTERM"])),
    st.builds(on.Tick, ns=st.integers(0, 100).map(lambda s: s * NS)),
)


@given(st.lists(EVENTS, max_size=60))
def test_invariants_over_any_history(events: list[on.Event]) -> None:
    """In any history: one worker at a time, none after a request to stop, 0 or 78; one order, one end, few tries."""
    state, actions = play(on.Opened(best_step=0))
    asked = over = False
    begins_without_progress, highest, orders = 0, 0, 0
    now = 0
    for event in events:
        if isinstance(event, on.WorkerEnded) and not state.running:
            continue
        if isinstance(event, on.Tick):
            now = max(now, event.ns)
            event = on.Tick(ns=now)
        if isinstance(actions[-1] if actions else None, on.Begin):
            assert not state.running and not asked and not over
            begins_without_progress += 1
            assert begins_without_progress <= CONFIG.attempts_without_progress
            state, actions = play(on.Began(ns=now), state=state)
        if isinstance(event, on.Heard) and event.step > highest:
            highest, begins_without_progress = event.step, 0
        asked |= isinstance(event, on.Asked)
        over |= isinstance(event, on.WorkerEnded) and event.status in (0, 78)
        was_finished = state.finished
        state, actions = play(event, state=state)
        orders += kinds(actions).count("OrderStop")
        assert orders <= 1
        assert not (was_finished and actions)
        assert not isinstance(event, on.CarrierGone) or not {"Kill", "Begin", "Finish"} & set(kinds(actions))
        assert state.finished == (was_finished or "Finish" in kinds(actions))
