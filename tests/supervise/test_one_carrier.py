"""The policy of one node's carrier, pure: when it is given up, what the next one keeps off, and when there is none."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.units import NS
from packtrain.supervise import one_carrier as oc

OVERDUE_S = 20
RUN, SCRATCH = "/run", "/scratch/run"


def begun(**changes: object) -> oc.State:
    return replace(oc.began(oc.State(overdue_s=OVERDUE_S), 0), **changes)


def stands(second: float, *hung: oc.Hung, saves: int = 0, quarantine: tuple[str, ...] = ()) -> oc.Stands:
    return oc.Stands(round(second * NS), saves, hung, quarantine)


def kinds(actions: list[oc.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_dead_carrier_is_replaced() -> None:
    """Carrier death brings a new carrier at the next look, later and later when it keeps dying, and no other action."""
    state, waits, now = begun(), [], 2
    for _ in range(7):
        state, actions = oc.happened(state, oc.Gone(ns=now * NS, status=-9))
        assert actions == []
        ended, actions = now, []
        while not actions:
            state, actions = oc.tick(state, now * NS)
            now += 1
        assert kinds(actions) == ["Start"]
        waits.append(now - 1 - ended)
    assert waits == [0, 1, 2, 4, 8, 16, 30]


def test_silence_is_noticed() -> None:
    """A carrier that answers nothing for its bound is given up and another one starts; one that starts has twice as
    long, answers put it off, and time in which nobody looked counts for nothing."""
    state = begun()
    assert oc.tick(state, 2 * OVERDUE_S * NS - 1)[1] == []
    state, actions = oc.happened(state, stands(30))
    state, actions = oc.tick(state, (30 + OVERDUE_S) * NS - 1)
    assert actions == []
    assert oc.tick(state, (40 + OVERDUE_S) * NS, unwatched_ns=11 * NS)[1] == []
    state, actions = oc.tick(state, (30 + OVERDUE_S) * NS)
    assert kinds(actions) == ["GiveUp"]
    error = actions[0].error
    assert "answered nothing for 20 s" in error.what and error.where and "the carrier's log" in error.fix
    assert kinds(oc.tick(state, (31 + OVERDUE_S) * NS)[1]) == ["Start"]


def test_threads_that_hang() -> None:
    """A thread that hangs for the bound, or as many as a home takes, and the carrier is given up, the next one keeping
    off every home that anything hung in; a save under way is waited for, ten times as long and no longer."""
    short, long = oc.Hung(RUN, 1, OVERDUE_S - 0.1), oc.Hung(RUN, 1, OVERDUE_S)
    full, fresh = oc.Hung(RUN, oc.HUNG_MAX, 0.5), oc.Hung(SCRATCH, 1, 0.1)
    assert oc.happened(begun(), stands(5, short))[1] == []
    for event in (stands(5, long), stands(5, full), stands(5, oc.Hung(RUN, 1, 10 * OVERDUE_S), saves=1)):
        state, actions = oc.happened(begun(), event)
        assert kinds(actions) == ["GiveUp"] and actions[0].quarantine == (RUN,)
        assert oc.tick(state, 6 * NS)[1] == [oc.Start(reason="the one before is gone", quarantine=(RUN,))]
    for event in (stands(5, long, saves=1), stands(5, full, saves=2)):
        assert oc.happened(begun(), event)[1] == []
    assert oc.happened(begun(), stands(5, long, fresh))[1][0].quarantine == (RUN, SCRATCH)


def test_what_is_in_quarantine_costs_no_carrier() -> None:
    """Threads in a home that is in quarantine are the carrier's own business: it is given up once for each home. A
    home that answers is taken back, told once, and may cost another one."""
    hangs = oc.Hung(RUN, 1, 1e6)
    state, _ = oc.happened(begun(), stands(5, hangs))
    state, _ = oc.tick(state, 6 * NS)
    for second in range(7, 500):
        state, actions = oc.happened(state, stands(second, hangs, quarantine=(RUN,)))
        assert actions == []
    state, actions = oc.happened(state, stands(500))
    assert actions == [oc.TakenBack(path=RUN)] and state.quarantine == ()
    assert oc.happened(state, stands(501))[1] == []
    assert kinds(oc.happened(state, stands(501, hangs))[1]) == ["GiveUp"]


def test_what_a_silent_carrier_said_last_is_kept() -> None:
    """One that falls silent leaves its last word: where its threads hung then is in quarantine, with what was."""
    state, _ = oc.happened(begun(quarantine=(SCRATCH,)), stands(5, oc.Hung(RUN, 1, 1.0), quarantine=(SCRATCH,)))
    state, actions = oc.tick(state, 60 * NS)
    assert actions[0].quarantine == (SCRATCH, RUN) and "/scratch/run, /run" in actions[0].error.where


def test_a_last_save_is_not_disturbed() -> None:
    """While a person's stop is served a carrier whose threads hang stays, one that answers nothing does not."""
    state, actions = oc.happened(begun(), stands(2, oc.Hung(RUN, 4, 1e6)), stopping=True)
    assert actions == []
    for second in range(3, 2 + OVERDUE_S):
        state, actions = oc.tick(state, second * NS)
        assert actions == []
    assert kinds(oc.tick(state, (2 + OVERDUE_S) * NS)[1]) == ["GiveUp"]


def test_those_that_do_not_die() -> None:
    """Carriers that were killed and do not end are no more than UNDEAD_MAX: then none is started until one ends, and
    one that still answers is not given up for its threads when none could follow."""
    state, now = begun(), 0
    for n in range(oc.UNDEAD_MAX):
        now += 100
        state, actions = oc.tick(state, now * NS)
        assert kinds(actions) == ["GiveUp"]
        assert ("when one of them" in actions[0].error.what) == (n + 1 == oc.UNDEAD_MAX)
        now += 100
        state, actions = oc.tick(state, now * NS)
        assert kinds(actions) == ["Start"] * (n + 1 < oc.UNDEAD_MAX)
    state, _ = oc.happened(state, oc.GivenUpEnded())
    state, actions = oc.tick(state, now * NS)
    assert kinds(actions) == ["Start"]
    assert oc.happened(state, stands(now, oc.Hung(RUN, 1, 1e6)))[1] == []
    state, _ = oc.happened(state, oc.GivenUpEnded())
    assert kinds(oc.happened(state, stands(now, oc.Hung(RUN, 1, 1e6)))[1]) == ["GiveUp"]


EVENTS = st.lists(
    st.one_of(
        st.just("tick"), st.builds(oc.Gone, ns=st.just(0), status=st.just(1)), st.just(oc.GivenUpEnded()),
        st.builds(
            oc.Stands, ns=st.just(0), saves=st.integers(0, 1),
            hung=st.lists(st.builds(oc.Hung, st.sampled_from([RUN, SCRATCH]), st.integers(1, 4), st.floats(0, 500)),
                          max_size=2).map(tuple),
            quarantine=st.lists(st.sampled_from([RUN, SCRATCH]), max_size=2).map(tuple),
        ),
    ),
    max_size=80,
)


@given(EVENTS, st.lists(st.integers(0, 60), min_size=80, max_size=80))
def test_one_carrier_at_a_time(events: list[oc.Event | str], pauses: list[int]) -> None:
    """In any history: none is started beside one that was not given up or gone, no more than UNDEAD_MAX were killed and
    have not ended, and each giving up is told with what, where and what to do."""
    state, alive, undead, now = begun(), True, 0, 1
    for event, pause in zip(events, pauses, strict=False):
        now += pause
        if isinstance(event, oc.Gone) and not alive:
            continue
        if isinstance(event, oc.Gone | oc.Stands):
            event = replace(event, ns=now * NS)
        ended = isinstance(event, oc.GivenUpEnded) and undead
        if isinstance(event, oc.GivenUpEnded) and not undead:
            continue
        state, actions = oc.tick(state, now * NS) if event == "tick" else oc.happened(state, event)
        undead -= bool(ended)
        alive = alive and not isinstance(event, oc.Gone)
        for action in actions:
            assert not isinstance(action, oc.GiveUp) or alive
            assert not isinstance(action, oc.Start) or not alive
            alive = isinstance(action, oc.Start) or (alive and not isinstance(action, oc.GiveUp))
            undead += isinstance(action, oc.GiveUp)
            assert not isinstance(action, oc.GiveUp) or (action.error.what and action.error.where and action.error.fix)
        assert undead <= oc.UNDEAD_MAX and state.undead == undead
