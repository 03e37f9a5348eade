"""The policy of one node, pure: what follows what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.contract import PHASES
from packtrain.core.errors import (
    CheckpointDamaged,
    CheckpointUnreadable,
    CommitStale,
    Contradiction,
    GuardRollback,
    PacktrainError,
    SaveFailed,
    SlotDamaged,
    WrongModel,
)
from packtrain.core.units import NS
from packtrain.supervise import one_carrier as oc
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


def test_memory_is_distrusted_when_it_leads_nowhere() -> None:
    """A damaged slot is no lack of progress and the next attempt begins from disk; two attempts in a row without a new
    step do the same, and a step that was taken from memory is not a new one."""
    error = SlotDamaged("step 7 cannot be restored from memory")
    state, actions = play(ended(75, error), state=running())
    assert actions[-1] == on.Begin(reason=error.what, memory=False) and state.fruitless == 0
    state, actions = play(on.Began(ns=0, held=9), on.Heard(ns=0, step=9), ended(1), state=state)
    assert state.fruitless == 1 and (state.best_step, state.highest_step) == (9, 9)
    assert actions[-1] == on.Begin(reason="exit code 1")
    state, actions = play(on.Began(ns=0, held=8), on.Heard(ns=0, step=9), ended(1), state=state)
    assert actions[-1] == on.Begin(reason="exit code 1", memory=False) and state.best_step == 9


def ends(state: on.State, *errors: PacktrainError, step: int = -1) -> tuple[on.State, list[on.Action]]:
    """Attempts that end with 75 and these errors, one after the other; the actions after the last."""
    actions: list[on.Action] = []
    for error in errors:
        state, actions = play(ended(75, error), state=state)
        if not state.finished and error is not errors[-1]:
            state, _ = play(on.Began(ns=0), on.Heard(ns=0, step=step), state=state)
    return state, actions


def test_rollbacks_go_back_one_save_at_a_time_and_three_at_most() -> None:
    """Each damaged checkpoint leads one save back from the lineage as it then is, whatever attempts are allowed."""
    error = CheckpointDamaged("bytes 0..9: crc32c differs", where="part", fix="look")
    for n in (2, 3, 4):
        assert ends(running(step=-1), *[error] * n)[1][-1] == on.Begin(reason=error.what, back=1)
    actions = ends(running(step=-1), *[error] * 5)[1]
    assert finish(actions).exit_code == 70 and "3 rollbacks" in finish(actions).error.what  # type: ignore[union-attr]


def test_the_guard_goes_back() -> None:
    """A rollback of the guard begins one save back, is no crash, and is bounded unless the run gets further."""
    error = GuardRollback("batch 50 was bad twice")
    state, actions = ends(running(step=50), error)
    assert actions[1:] == [on.Warn(error), on.Begin(reason=error.what, back=1)]
    state, actions = ends(play(on.Began(ns=0, step=40), on.Heard(ns=0, step=50), state=state)[0], error, error, step=50)
    assert actions[-1] == on.Begin(reason=error.what, back=1)
    assert state.fruitless == 0
    stuck = ends(play(on.Began(ns=0, step=20), on.Heard(ns=0, step=50), state=state)[0], error)[1]
    assert finish(stuck).exit_code == 70 and "50" in finish(stuck).error.what  # type: ignore[union-attr]
    further = ends(play(on.Began(ns=0, step=20), on.Heard(ns=0, step=51), state=state)[0], error)[1]
    assert further[-1] == on.Begin(reason=error.what, back=1)


def test_a_disk_that_refuses_is_tried_later_and_later() -> None:
    """Attempts that cannot read go back to no other save, begin after pauses that grow, and end in 75 after eight."""
    error = CheckpointUnreadable("EIO")
    state, pauses, now = running(step=-1), [], 2
    for _ in range(8):
        state, actions = play(on.WorkerEnded(ns=now * NS, status=75, error=error), state=state)
        if state.finished:
            break
        assert kinds(actions) == ["EndAttempt", "Warn"]
        began, actions = now, []
        while not actions:
            now += 1
            state, actions = play(on.Tick(ns=now * NS), state=state)
        assert actions == [on.Begin(reason="the pause is over")]
        pauses.append(now - began)
        state, _ = play(on.Began(ns=now * NS), state=state)
    assert pauses == [1, 2, 4, 8, 16, 30, 30] and state.damaged == 0
    assert finish(actions) == on.Finish(exit_code=75, reason="EIO", error=error)


def test_asked_to_stop_in_a_pause() -> None:
    """While the next attempt waits, a request to stop ends the run."""
    state, _ = play(ended(75, CheckpointUnreadable("EIO")), state=running(step=-1))
    assert finish(play(on.Asked(ns=3 * NS, by="SIGINT"), state=state)[1]).exit_code == 75


def test_a_stale_worker_ends_the_run() -> None:
    """When another command has begun an attempt this one leaves the run to it."""
    error = CommitStale("attempt 9 began")
    assert finish(play(ended(75, error), state=running())[1]) == on.Finish(75, error.what, error)


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
    """After an hour of suspend neither silence nor the end of the grace is concluded before its time was watched; a
    moment of it counts as watched, so that slow looks do not hold off every end."""
    state, _ = play(on.Asked(ns=NS, by="SIGINT"), state=looked(running(), 5))
    state, actions = play(on.Tick(ns=3600 * NS), state=state)
    assert actions == []
    state = replace(state, overdue_ns=10**18)
    state, actions = play(*(on.Tick(ns=s * NS) for s in range(3601, 3624)), state=state)
    assert actions == [] and not state.killed
    assert kinds(play(on.Tick(ns=3624 * NS), state=state)[1]) == ["Kill"]


def test_slow_looks_do_not_hold_off_the_end() -> None:
    """A foreground that looks every 3 s only still ends a grace of 30 s, after 15 looks."""
    state, _ = play(on.Asked(ns=0, by="SIGINT"), state=running())
    state = replace(state, overdue_ns=10**18, looked_ns=0)
    looks = 0
    while not state.killed and looks < 100:
        looks += 1
        state, _ = play(on.Tick(ns=looks * 3 * NS), state=state)
    assert looks == 15


def beating(state: on.State, step: int, phase: str, since_s: int, until_s: int) -> on.State:
    """`state` with a beat and a look each second."""
    for second in range(since_s, until_s + 1):
        state, _ = play(on.Tick(ns=second * NS), on.Heard(second * NS, step, phase), state=state)
    return state


@pytest.mark.parametrize("phase", PHASES)
def test_beats_without_progress_are_death_where_a_step_is_due(phase: str) -> None:
    """Beats that name no new step for progress_s end the worker in phases of the loop, and in no other phase."""
    state = on.State(config=SuperviseConfig(beat_overdue_s=10, progress_s=60))
    state, _ = play(on.Opened(best_step=4), on.Began(ns=0), on.Heard(0, 4, "restore"), state=state)
    state = beating(state, 4, "step", 1, 300)
    assert not state.killed, "the first step compiles"
    state = beating(state, 5, "step", 301, 301)
    state = beating(state, 5, phase, 302, 360)
    assert not state.killed
    state = beating(state, 5, phase, 361, 362)
    unhurried = phase in ("init", "compile", "restore", "save", "eval", "pause")
    assert ("supervise.progress_s" in state.killed) != unhurried


def test_progress_can_be_left_unwatched() -> None:
    """With progress_s 0 a worker that beats is never killed for standing still."""
    state = on.State(config=SuperviseConfig(beat_overdue_s=10, progress_s=0))
    state, _ = play(on.Opened(best_step=0), on.Began(ns=0), on.Heard(0, 1), on.Heard(0, 2), state=state)
    assert not beating(state, 2, "step", 1, 5000).killed


@pytest.mark.parametrize("bad", [{"progress_s": 100}, {"progress_s": -1}, {"progress_s": 120, "beat_overdue_s": 60}])
def test_a_standstill_is_not_concluded_before_silence(bad: dict[str, float]) -> None:
    """A ladder of times in the wrong order is refused."""
    with pytest.raises(Contradiction):
        SuperviseConfig(**bad)


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


EVENTS = st.one_of(
    st.builds(on.WorkerEnded, ns=st.just(0), status=st.sampled_from([0, 75, 78, 1, -9, -11])),
    st.builds(oc.Gone, ns=st.just(0), status=st.sampled_from([0, 1, -9])),
    st.builds(
        oc.Stands, ns=st.just(0), saves=st.integers(0, 2),
        hung=st.lists(st.builds(oc.Hung, st.just("/a"), st.just(1), st.floats(0, 100)), max_size=1).map(tuple),
    ),
    st.just(oc.GivenUpEnded()),
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
        assert not isinstance(event, oc.Event) or not {"Kill", "Begin", "Finish"} & set(kinds(actions))
        assert state.finished == (was_finished or "Finish" in kinds(actions))
