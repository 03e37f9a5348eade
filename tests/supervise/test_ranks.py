"""What the beats of one rank say, in virtual time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.contract import PHASES, Beat
from packtrain.core.units import NS
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.messages import AgentEvent, RankHeard, RankPhase, RankSilent, RankStalled
from packtrain.supervise.ranks import Rank, heard, kind_of, looked, unwatched_ns

CONFIG = SuperviseConfig(beat_overdue_s=60.0, progress_s=1800.0)
START = 1000 * NS


class Watched:
    """A rank that is looked at ten times a second."""

    def __init__(self, speaks: bool = True, config: SuperviseConfig = CONFIG) -> None:
        self.ns, self.config = START, config
        self.rank = Rank(attempt=1, rank=0, heard_ns=START, speaks=speaks)
        self.told: list[tuple[float, AgentEvent]] = []
        self.seq = 0
        self.spent = dict.fromkeys(PHASES, 0)
        self.phase, self.step = "init", -1

    def note(self, events: list[AgentEvent]) -> None:
        self.told += [((self.ns - START) / NS, event) for event in events]

    def beat(self, phase: str = "", step: int | None = None) -> None:
        self.seq += 1
        self.phase, self.step = phase or self.phase, self.step if step is None else step
        beat = Beat(self.seq, 1, 0, 1, self.phase, self.step, dict(self.spent))
        self.rank, events = heard(self.rank, beat, self.ns)
        self.note(events)

    def pass_s(self, seconds: float, beats: bool = False) -> None:
        for n in range(round(10 * seconds)):
            self.ns += NS // 10
            self.spent[self.phase] += NS // 10
            if beats and n % 10 == 9:
                self.beat()
            self.rank, events = looked(self.rank, self.config, self.ns)
            self.note(events)

    def steps(self, n: int, step_s: float = 0.5) -> None:
        for _ in range(n):
            self.pass_s(step_s)
            self.beat("step", self.step + 1)

    def of(self, kind: type) -> list[tuple[float, AgentEvent]]:
        return [(at, event) for at, event in self.told if isinstance(event, kind)]


def running() -> Watched:
    """One that compiled, and has made ten steps of half a second."""
    watched = Watched()
    watched.pass_s(5, beats=True)
    watched.beat("step", 0)
    watched.steps(10)
    watched.told.clear()
    return watched


def at(watched: Watched, kind: type) -> list[float]:
    """Seconds after the last beat or step that each was told for."""
    return [round(event.seconds, 1) for _, event in watched.of(kind)]  # type: ignore[attr-defined]


def test_a_phase_is_told_when_its_kind_changes() -> None:
    """data, step and rerun are one; each other phase is a kind of its own."""
    watched = Watched()
    for phase in ("init", "compile", "restore", "data", "step", "rerun", "step", "save", "data"):
        watched.beat(phase)
    assert [e.phase for _, e in watched.told if isinstance(e, RankPhase)] == [
        "init", "compile", "restore", "steps", "save", "steps",
    ]
    assert {kind_of(phase) for phase in PHASES} == {
        "init", "compile", "restore", "steps", "save", "eval", "pause", "other",
    }


def test_a_beat_that_comes_late_changes_nothing() -> None:
    """Of two beats the one with the higher number is later in all it says."""
    watched = running()
    before = watched.rank
    watched.rank, events = heard(watched.rank, Beat(watched.seq, 1, 0, 1, "save", 3, {}), watched.ns + NS)
    assert watched.rank == before and not events


def test_silence_is_told_early_and_again_as_it_grows() -> None:
    """While it steps: after 3 s, at each doubling, at the configured minute, and on."""
    watched = running()
    watched.pass_s(130)
    assert at(watched, RankSilent) == [3.0, 6.0, 12.0, 24.0, 48.0, 60.0, 120.0]
    assert not watched.of(RankStalled), "of a rank that does not speak nobody knows whether it steps"
    watched.beat()
    assert [type(event) for _, event in watched.told[-1:]] == [RankHeard]


def test_before_its_first_step_silence_is_long() -> None:
    """An interpreter that imports holds its lock: nothing is told before twice `beat_overdue_s`."""
    watched = Watched()
    watched.pass_s(119)
    assert not watched.told
    watched.pass_s(2)
    assert at(watched, RankSilent) == [120.0]
    early = Watched()
    early.beat("compile")
    early.pass_s(119)
    assert not early.of(RankSilent)


def test_a_program_that_never_beats_is_not_called_silent() -> None:
    """Unless it has beaten once."""
    watched = Watched(speaks=False)
    watched.pass_s(500)
    assert not watched.told
    watched.beat("step", 1)
    watched.pass_s(4)
    assert at(watched, RankSilent) == [3.0]


def test_a_save_may_be_silent_for_the_configured_time() -> None:
    """Outside steps there is no early suspicion."""
    watched = running()
    watched.beat("save")
    watched.pass_s(59.9)
    assert not watched.of(RankSilent)
    watched.pass_s(0.2)
    assert at(watched, RankSilent) == [60.0]


def test_a_standstill_is_told_in_time_for_three_median_steps_and_two_seconds() -> None:
    """With steps of half a second after 3.4 s, which leaves a tenth for the way; then at each doubling and exactly at
    `progress_s`."""
    watched = running()
    watched.pass_s(1900, beats=True)
    assert at(watched, RankStalled) == [3.4, 6.8, 13.6, 27.2, 54.4, 108.8, 217.6, 435.2, 870.4, 1740.8, 1800.0]
    assert not watched.of(RankSilent) and not watched.of(RankHeard)
    watched.beat("step", watched.step + 1)
    assert len(watched.of(RankHeard)) == 1


def test_no_step_is_due_while_it_saves_or_before_its_second_step() -> None:
    """A save of an hour, an evaluation, and a first step that compiles are no standstill."""
    watched = running()
    for phase in ("save", "eval", "pause", "compile", "restore"):
        watched.beat(phase)
        watched.pass_s(400, beats=True)
    assert not watched.of(RankStalled)
    first = Watched()
    first.beat("step", 0)
    first.pass_s(4000, beats=True)
    assert not first.of(RankStalled)


def test_with_few_steps_known_only_the_configured_bound_counts() -> None:
    """Three steps make no median; `progress_s` of zero switches it off."""
    watched = Watched(config=SuperviseConfig(progress_s=200.0))
    watched.beat("step", 0)
    watched.steps(3)
    watched.pass_s(201, beats=True)
    assert at(watched, RankStalled) == [200.0]
    off = Watched(config=SuperviseConfig(progress_s=0.0))
    off.beat("step", 0)
    off.steps(10)
    off.pass_s(500, beats=True)
    assert not off.of(RankStalled)


def test_a_rank_that_is_silent_and_then_stalls_is_not_called_well() -> None:
    """`RankHeard` comes when neither is left."""
    watched = running()
    watched.pass_s(5, beats=True)
    watched.pass_s(5)
    watched.beat()
    assert watched.of(RankStalled) and watched.of(RankSilent) and not watched.of(RankHeard)
    watched.beat("step", watched.step + 1)
    assert len(watched.of(RankHeard)) == 1


def test_steps_of_beats_that_were_lost_count() -> None:
    """Five steps told by one beat are five of a fifth of the time; saves between them are none of it."""
    watched = Watched()
    watched.beat("step", 0)
    watched.pass_s(2)
    watched.phase = "save"
    watched.pass_s(30)
    watched.phase = "step"
    watched.pass_s(3)
    watched.beat("step", 5)
    assert watched.rank.step_s == 1.0


def test_time_in_which_nobody_looked_counts_for_nothing() -> None:
    """A machine asleep for an hour makes nobody silent or stalled."""
    watched = running()
    before = watched.ns
    watched.ns += 3600 * NS
    gap = unwatched_ns(watched.ns, before)
    watched.rank, events = looked(watched.rank, watched.config, watched.ns, gap)
    assert not events and gap == 3598 * NS
    watched.pass_s(1.2)
    assert at(watched, RankSilent) == [3.0], "the two seconds of the last look, and this one"
    assert unwatched_ns(watched.ns, 0) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(-1, 30), st.integers(0, 200), st.integers(-5, 5))))
def test_health_is_told_in_turns_whatever_comes(script: list[tuple[str, int, int, int]]) -> None:
    """`RankHeard` comes only after a suspicion, whatever beats come, late and out of order."""
    watched = Watched()
    for phase, step, tenths, seq in script:
        watched.pass_s(tenths / 10)
        watched.seq = max(0, watched.seq + seq)
        watched.beat(phase, step)
    doubted = False
    for _, event in watched.told:
        if isinstance(event, RankSilent | RankStalled):
            assert event.seconds > 0
            doubted = True
        elif isinstance(event, RankHeard):
            assert doubted
            doubted = False
