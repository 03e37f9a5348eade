"""Recoveries of worlds that break, in virtual time: their parts explain the whole."""

from __future__ import annotations

import itertools

import pytest

from packtrain.core.journal import METRICS_NS, Entry
from packtrain.core.records import AttemptReached, StepDone
from packtrain.core.units import NS
from packtrain.monitor.recovery import UNEXPLAINED, recoveries
from packtrain.supervise import messages as m
from packtrain.supervise.events import Silent
from tests.supervise.played import Play, written
from tests.supervise.test_simulated import FAULTS_S, HEALED_S, world_of

SEEDS = 20
NOT_WRITTEN = {"kill coordinator", "two leaders"}
TOLD_LATE_S = METRICS_NS / NS
"""What an agent says of a rank that hangs may be under way for long; its last step seems nearer by so much at most."""


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_the_parts_are_the_time_without_steps(first: int) -> None:
    """Whatever befalls a cluster, the recoveries of a run that ended well are all the time between its first step and
    its last in which it took none. A second of them is unexplained only where a coordinator was killed: it may take
    what it was about to write with it."""
    for seed in range(first, first + 10):
        sim, faults = world_of(seed)
        sim.run(FAULTS_S + HEALED_S)
        rows = recoveries(sim.entries)
        unexplained = [row for row in rows if UNEXPLAINED in row.seconds]
        assert not unexplained or NOT_WRITTEN & set(faults), seed
        told_s = sum(row.total_s for row in rows if row.attempt >= _first_attempt(sim.entries))
        late_s = TOLD_LATE_S * sum("silent" in row.cause or "no step" in row.cause for row in rows)
        assert -late_s - 1e-6 <= told_s - _without_steps_s(sim.entries) <= 1e-6, seed


def _first_attempt(entries: list[Entry]) -> int:
    """That completed a step."""
    return next(int(entry.writer.removeprefix("trainer")) for entry in entries if isinstance(entry.record, StepDone))


def _without_steps_s(entries: list[Entry]) -> float:
    """Between the last step of one attempt and the first one of another."""
    steps = [entry for entry in entries if isinstance(entry.record, StepDone)]
    pairs = itertools.pairwise(steps)
    return sum((after.ns - before.ns) / NS for before, after in pairs if after.writer != before.writer)


def points(issued: list) -> list[tuple[int, str]]:
    return [(record.attempt, record.point) for record in written(issued, AttemptReached)]


def test_each_point_is_written_once() -> None:
    """`started` with the last node's workers, `go` with the word; `noticed` with the first sign of the end, and not
    again when the others follow; of the next attempt anew."""
    play = Play(nodes=2)
    play.begun()
    launches = [id for id, one in play.state.pending.items() if isinstance(one.action, m.Launch)]
    assert points(play.edge("n0", m.Did(id=launches[0]))) == []
    assert points(play.edge("n1", m.Did(id=launches[1]))) == [(1, "started")]
    assert points(play.ready()) == [(1, "go")]
    told = play.edge("n1", m.RankEnded(attempt=1, rank=1, status=-9, since_step_s=0.5))
    assert points(told) == [(1, "noticed")] and written(told, AttemptReached)[0].since_step_s == 0.5
    assert points(play.edge("n0", m.RankEnded(attempt=1, rank=0, status=-9))) == []


def test_an_older_launch_is_no_reason_to_wait() -> None:
    """A lost node never says that it started an earlier attempt's workers; the next attempt's are started all the
    same."""
    play = Play(nodes=1, spares=1)
    play.begun()
    play.happened(Silent(node="n0", seconds=3.0))
    play.wait(30)
    play.did_all()
    play.wait(12)
    play.begun()
    assert [one.node for one in play.state.pending.values() if isinstance(one.action, m.Launch)].count("n0") == 1
    assert (2, "started") in points(play.did_all())


def test_ranks_that_are_done_are_no_end() -> None:
    """Ranks that exit 0 may wait for the others for as long as these take: that is no end yet; a plan is at once."""
    play = Play(nodes=2)
    play.begun()
    play.did_all()
    play.ready()
    assert points(play.edge("n0", m.RankEnded(attempt=1, rank=0, status=0))) == []
    assert points(play.edge("n1", m.RankEnded(attempt=1, rank=1, status=1))) == [(1, "noticed")]
    drained = Play(nodes=2, spares=1)
    drained.begun()
    drained.did_all()
    drained.ready()
    assert points(drained.ask("drain", "n1")) == [(1, "noticed")]
