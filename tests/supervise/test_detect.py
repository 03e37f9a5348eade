"""Detectors and the ladder of limits, pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.errors import Contradiction
from packtrain.core.units import NS
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.detect import EARLY_S, NOBODY_NS, NOBODY_PART, OURS_FACTOR, Pace, Silence, WatchedClock
from packtrain.supervise.events import Progress, Silent, Slow


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


@pytest.mark.parametrize(("back_s", "told"), [(5, 0), (60, 10)])
def test_silence_of_all_is_rather_ours_also_where_they_take_turns(back_s: int, told: int) -> None:
    """Nodes that speak each second, each at a moment of its own, are late one after the other when our link is cut:
    all have twice the time, and nobody was silent where it comes back before that."""
    silence, found = Silence(3.0), list[Silent]()
    for tick in range(200):
        ns = tick * NS // 10
        if not NS < ns < back_s * NS:
            silence.heard(f"n{tick % 10}", ns)
        found += silence.look(ns)
    assert len(found) == told and all(one.seconds >= 6.0 for one in found)


@pytest.mark.parametrize("node_silent_s", [2.0, 3.0, 10.0])
def test_one_neighbour_is_enough_to_know_that_our_link_is_there(node_silent_s: float) -> None:
    """At every limit that the job may have, pulses of one node that come a little late are no silence of all: the
    other is found at its limit."""
    silence, found = Silence(node_silent_s - EARLY_S), list[Silent]()
    for tick in range(400):
        ns = tick * NS // 20
        if tick % 21 == 0:
            silence.heard("a", ns)
        if tick % 21 == 0 and tick < 100:
            silence.heard("b", ns)
        found += silence.look(ns)
    assert [one.node for one in found] == ["b"] and found[0].seconds <= node_silent_s


def test_a_node_that_was_silent_before_is_told_back() -> None:
    """A coordinator that takes over hears of those that its log says are silent."""
    silence = Silence(3.0)
    silence.silent("a", 0)
    assert not silence.look(9 * NS) and [one.node for one in silence.heard("a", 9 * NS)] == ["a"]


def test_who_comes_back_takes_turns() -> None:
    """After a coordinator began, its nodes may come one after the other for as long as that takes; who is not heard
    within the limit after the last of them is silent."""
    silence = Silence(3.0)
    for node in "abcdefgh":
        silence.expect(node, 0)
    for second in range(1, 15):
        for node in "abcdef"[: second // 2]:
            assert not silence.heard(node, second * NS)
        assert not silence.look(second * NS)
    assert not silence.look(12 * NS + 3 * NS - 1)
    for node in "abcdef":
        silence.heard(node, 15 * NS)
    assert [(one.node, one.seconds) for one in silence.look(15 * NS)] == [("g", 3.0), ("h", 3.0)]


class Scanned:
    """What `Silence` must conclude, by looking at every node each time."""

    def __init__(self, limit_ns: int) -> None:
        self.limit_ns, self.since, self.silent = limit_ns, dict[str, int](), set[str]()
        self.last_ns, self.ours_ns = 0, -limit_ns

    def heard(self, node: str, ns: int) -> bool:
        if self.since and self.nobody(ns):
            self.ours_ns = ns
        self.since[node] = self.last_ns = ns
        was = node in self.silent
        self.silent.discard(node)
        return was

    def nobody(self, ns: int) -> bool:
        return ns - self.last_ns >= max(NOBODY_PART * self.limit_ns, NOBODY_NS)

    def look(self, ns: int) -> set[str]:
        quiet = {node: ns - since for node, since in self.since.items() if node not in self.silent}
        over = {node for node, passed in quiet.items() if passed >= self.limit_ns}
        ours = self.nobody(ns) or ns - self.ours_ns < self.limit_ns
        if len(quiet) >= 2 and (ours or len(quiet) < 2 * len(over)):
            over = {node for node in over if quiet[node] >= OURS_FACTOR * self.limit_ns}
        self.silent |= over
        return over


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2 * NS)), max_size=80))
def test_silence_is_what_a_look_at_every_node_finds(story: list[tuple[int, int]]) -> None:
    """Whoever is heard and whenever it is looked: the queue finds the same nodes at the same looks, and the same ends
    of silence. 4 stands for a look."""
    silence, scanned, ns = Silence(3.0), Scanned(3 * NS), 0
    for what, passed_ns in story:
        ns += passed_ns
        if what == 4:
            assert {one.node for one in silence.look(ns)} == scanned.look(ns)
        else:
            assert bool(silence.heard(str(what), ns)) == scanned.heard(str(what), ns)


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
