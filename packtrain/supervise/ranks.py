"""What the beats of one rank say: another kind of phase, silence, a standstill, and that it is over. Pure.

Suspicion is told early and again as it grows, so that whoever decides may collect evidence before it concludes:

    silent     no beat for 3 s while it steps (before that: `beat_overdue_s`, twice that before its first step)
    stalled    beats, but no step for 3 median steps + 1.9 s where one is due (fewer than 5 steps known: `progress_s`)

then at each doubling, and exactly at `supervise.beat_overdue_s` and `supervise.progress_s`. A step is not due while a
rank compiles, restores, saves, evaluates or pauses. Time in which nobody looked (a suspended machine, a stopped agent)
counts for nothing. Times are nanoseconds since boot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from packtrain.core.contract import Beat
from packtrain.core.units import NS
from packtrain.supervise.config import FIRST_BEAT_FACTOR, SuperviseConfig
from packtrain.supervise.messages import AgentEvent, RankHeard, RankPhase, RankSilent, RankStalled

STEPS = "steps"
STEPPING = ("data", "step", "rerun")
"""Phases that a step is made of."""
SUSPECT_S = 3.0
STALL_MEDIANS, STALL_S = 3, 1.9
"""A coordinator is to know after 3 median steps + 2 s: what is left is for the look here, the way, and its log."""
KNOWN_MIN, KNOWN_MAX = 5, 15
"""Steps whose time is known before their median counts, and that it is taken of."""
UNWATCHED_NS = 2 * NS
"""What lies between two looks beyond this counts for nothing."""


@dataclass(frozen=True)
class Rank:
    """What is known of one rank of an attempt."""

    attempt: int
    rank: int
    heard_ns: int
    """Its last beat, or when it was started."""
    speaks: bool = True
    """Whether it is to beat from the beginning: a program of anybody's may never."""
    seq: int = 0
    """Of its last beat; 0: none yet."""
    kind: str = ""
    step: int = -1
    stepped_ns: int = 0
    """When it completed that step; 0: it has completed none."""
    due_ns: int = 0
    """Since when a step is due; 0: not yet (the first step compiles)."""
    stepping_ns: int = 0
    """Time its beats gave to steps, at the last completed one."""
    step_ns: tuple[int, ...] = ()
    """What the latest steps took."""
    silent_s: float = 0.0
    """For how long it was told to be silent; 0: it is not."""
    stalled_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Median of its latest steps; 0: not known."""
        return median(self.step_ns) / NS if len(self.step_ns) >= KNOWN_MIN else 0.0


Told = tuple[Rank, list[AgentEvent]]


def kind_of(phase: str) -> str:
    """Kind of a phase as `RankPhase` tells it."""
    return STEPS if phase in STEPPING else phase


def heard(rank: Rank, beat: Beat, ns: int) -> Told:
    """A beat arrived. Of an earlier one that comes late nothing is taken."""
    if beat.seq <= rank.seq:
        return rank, []
    kind, doubted = kind_of(beat.phase), bool(rank.silent_s or rank.stalled_s)
    stepped = beat.step > rank.step
    moved = _stepped(rank, beat, ns) if stepped else rank
    due_ns = moved.due_ns
    if (stepped and rank.step >= 0) or (due_ns and kind not in (STEPS, "other")):
        due_ns = ns
    now = replace(
        moved, seq=beat.seq, heard_ns=ns, kind=kind, due_ns=due_ns, silent_s=0.0,
        stalled_s=0.0 if due_ns == ns else rank.stalled_s,
    )
    events: list[AgentEvent] = []
    if kind != rank.kind:
        events.append(RankPhase(attempt=rank.attempt, rank=rank.rank, phase=kind, step=now.step))
    if doubted and not now.stalled_s:
        events.append(RankHeard(attempt=rank.attempt, rank=rank.rank, step=now.step))
    return now, events


def _stepped(rank: Rank, beat: Beat, ns: int) -> Rank:
    """Lost beats are made up for: what their steps took is in the cumulative times of this one."""
    stepping_ns = sum(beat.ns.get(phase, 0) for phase in STEPPING)
    step_ns, stepped_ns = rank.step_ns, rank.stepped_ns
    if rank.step >= 0:  # the first beat with a step says where it begins
        steps = beat.step - rank.step
        each = max(0, stepping_ns - rank.stepping_ns) // steps
        step_ns, stepped_ns = (*step_ns, *[each] * min(steps, KNOWN_MAX))[-KNOWN_MAX:], ns
    return replace(rank, step=beat.step, stepping_ns=stepping_ns, step_ns=step_ns, stepped_ns=stepped_ns)


def looked(rank: Rank, config: SuperviseConfig, ns: int, unwatched_ns: int = 0) -> Told:
    """Time has passed, and what arrived was heard. `unwatched_ns`: for so long nobody looked."""
    rank = replace(rank, heard_ns=rank.heard_ns + unwatched_ns, due_ns=rank.due_ns and rank.due_ns + unwatched_ns)
    silent = (ns - rank.heard_ns) / NS
    if (rank.seq or rank.speaks) and silent >= _next(_silent_from(rank, config), rank.silent_s, config.beat_overdue_s):
        return replace(rank, silent_s=silent), [RankSilent(attempt=rank.attempt, rank=rank.rank, seconds=silent)]
    stalled = (ns - rank.due_ns) / NS if rank.due_ns and not rank.silent_s and config.progress_s else 0.0
    if stalled and stalled >= _next(_stalled_from(rank, config), rank.stalled_s, config.progress_s):
        event = RankStalled(attempt=rank.attempt, rank=rank.rank, seconds=stalled, step=rank.step)
        return replace(rank, stalled_s=stalled), [event]
    return rank, []


def _silent_from(rank: Rank, config: SuperviseConfig) -> float:
    """An interpreter that starts, imports or compiles may hold its lock for long."""
    if rank.step < 0 or not rank.seq:
        return FIRST_BEAT_FACTOR * config.beat_overdue_s
    return SUSPECT_S if rank.kind == STEPS else config.beat_overdue_s


def _stalled_from(rank: Rank, config: SuperviseConfig) -> float:
    early = STALL_MEDIANS * rank.step_s + STALL_S
    return min(early, config.progress_s) if rank.step_s else config.progress_s


def _next(first: float, told: float, bound: float) -> float:
    """When to tell next: at first, at each doubling, and at the bound."""
    if not told:
        return first
    return bound if told < bound <= 2 * told else 2 * told


def unwatched_ns(ns: int, looked_ns: int) -> int:
    """Of the time since the last look, that in which nobody looked."""
    return max(0, ns - looked_ns - UNWATCHED_NS) if looked_ns else 0
