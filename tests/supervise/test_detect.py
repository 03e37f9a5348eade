"""Detectors and the ladder of limits, pure."""

from __future__ import annotations

import pytest

from packtrain.core.errors import Contradiction
from packtrain.core.units import NS
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.detect import Pace, Silence, WatchedClock
from packtrain.supervise.events import Progress, Slow


def test_the_clock_counts_what_is_watched() -> None:
    """Looks a moment apart add that moment; a gap adds two seconds, and a clock that jumps back nothing."""
    clock = WatchedClock(ns=100 * NS, boot_ns=7 * NS)
    assert clock.look(8 * NS) == 101 * NS
    assert clock.look(3608 * NS) == 103 * NS
    assert clock.look(5 * NS) == 103 * NS and clock.look(6 * NS) == 104 * NS


def test_silence_is_told_once_and_ended_once() -> None:
    """A node is silent after its limit, once; when it is heard again that is told once."""
    silence = Silence(3.0)
    silence.heard("a", 0)
    silence.heard("b", 0)
    silence.heard("c", 0)
    for second in range(1, 6):
        silence.heard("a", second * NS)
        silence.heard("c", second * NS)
        told = silence.look(second * NS)
        assert [one.node for one in told] == (["b"] if second == 3 else [])
    assert [one.node for one in silence.heard("b", 6 * NS)] == ["b"] and not silence.heard("b", 7 * NS)


def test_silence_of_most_is_rather_ours() -> None:
    """When most nodes fall silent at once they get twice the time."""
    silence = Silence(3.0)
    for node in "abc":
        silence.heard(node, 0)
    silence.heard("a", 3 * NS)
    assert not silence.look(4 * NS)
    silence.heard("a", 6 * NS)
    assert sorted(one.node for one in silence.look(6 * NS)) == ["b", "c"]


def test_a_node_that_was_silent_before_is_told_back() -> None:
    """A coordinator that takes over hears of those that its log says are silent."""
    silence = Silence(3.0)
    silence.silent("a", 0)
    assert not silence.look(9 * NS) and [one.node for one in silence.heard("a", 9 * NS)] == ["a"]


def test_progress_is_told_seldom() -> None:
    """The first step completed by all nodes is told at once, later ones at most every five seconds."""
    pace = Pace(attempt=2, nodes=2)
    pace.heard("a", 5, 0.0)
    assert not pace.look(0)
    pace.heard("b", 4, 0.0)
    assert pace.look(0) == [Progress(ns=0, attempt=2, step=4)]
    pace.heard("b", 6, 0.0)
    assert not pace.look(4 * NS) and pace.look(5 * NS) == [Progress(ns=5 * NS, attempt=2, step=5)]


@pytest.mark.parametrize(("step_s", "slow"), [(1.4, False), (1.45, True)])
def test_a_straggler_at_70_percent(step_s: float, slow: bool) -> None:
    """A node below 70% of the median speed for half a minute is told once; one that is faster is not."""
    pace, told = Pace(attempt=1, nodes=3), list[Progress | Slow]()
    for second in range(60):
        for node, seconds in (("a", 1.0), ("b", 1.0), ("c", step_s)):
            pace.heard(node, -1, seconds)
        told += pace.look(second * NS)
        assert not told or second >= 30
    assert [one.node for one in told if isinstance(one, Slow)] == (["c"] if slow else [])


def test_the_ladder_is_checked() -> None:
    """A limit that is not over before the one around it is refused, and the message names both."""
    assert all(rungs for rungs in SuperviseConfig().ladder())
    for wrong in (
        {"node_silent_s": 10.0}, {"go_s": 120.0}, {"progress_s": 100.0}, {"node_silent_s": 1.0}, {"nobody_s": 600.0},
        {"replace_s": 90_000.0}, {"stopped_s": 1800.0},
    ):
        with pytest.raises(Contradiction, match="raise supervise"):
            try:
                SuperviseConfig(**wrong)
            except Contradiction as error:
                raise Contradiction(error.render()) from error
