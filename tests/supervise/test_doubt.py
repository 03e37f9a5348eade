"""Nodes that may compute wrong numbers: what a guard's verdict leads to, played by hand."""

from __future__ import annotations

import pytest

from packtrain.core.contract import Word
from packtrain.core.records import GuardVerdict, NodeSuspected, ReplayOrdered
from packtrain.supervise import messages as m
from packtrain.supervise.doubt import KEPT, doubt_of
from packtrain.supervise.events import Doubted, Published
from packtrain.supervise.state import BEGINNING, CLOSING, ENDING, WAITING, WRAPPING, Issued
from tests.supervise.played import Play, actions, begin_of, written


def verdict(rerun: str, reason: str = "non_finite") -> GuardVerdict:
    return GuardVerdict(step=7, reason=reason, rerun=rerun, policy="used", digest=1, rerun_digest=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rerun", "reason", "suspect"),
    [
        ("clean", "spike", True), ("different", "non_finite", True), ("same", "spike", False),
        ("unknown", "non_finite", False), ("same", "copies_differ", True), ("unknown", "copies_differ", True),
    ],
)
def test_what_makes_hardware_suspect(rerun: str, reason: str, suspect: bool) -> None:
    """Bits that a rerun does not repeat, and copies that differ; a batch that is bad again is not the hardware's."""
    assert bool(doubt_of(verdict(rerun, reason))) is suspect


def test_other_records_say_nothing_of_it() -> None:
    """Whatever else is journalled."""
    assert doubt_of(NodeSuspected(node="n0", reason="", in_row=1, done="")) == ""


def doubt(play: Play, step: int = 9, attempt: int = 0) -> list[Issued]:
    return play.happened(Doubted(attempt=attempt or play.attempt, step=step, reason="its rerun gave other bits"))


def test_a_suspect_node_is_replaced_and_its_steps_are_to_be_replayed() -> None:
    """Alone in its world it is the one: marked, saved and replaced by the spare, on which the steps since the last save
    are to be replayed; the attempt after next does not take it back, until a person says so."""
    play = Play(nodes=1, spares=1).run()
    play.happened(Published(step=6))
    issued = doubt(play)
    (ordered,) = written(issued, ReplayOrdered)
    assert (ordered.first, ordered.last, ordered.nodes, ordered.on) == (6, 9, ["n0"], ["n1"])
    assert ordered.result == "pending" and ordered.halves == [] and "other bits" in ordered.reason
    (suspected,) = written(issued, NodeSuspected)
    assert suspected.node == "n0" and "a spare takes its place" in suspected.done
    assert [order.word for _, order in actions(issued, m.GiveOrder)] == [Word.STOP]
    play.end(0, 75)
    assert begin_of(play.end_rest()).node == "n1"
    for step in (20, 30):  # that it got further with another node says nothing of this one
        play.run(step=step)
        play.fail()
        assert play.members() == ["n1"] and play.state.nodes["n0"].suspect
    play.ask("uncordon", "n0")
    assert not play.state.nodes["n0"].suspect


def test_without_a_spare_it_goes_on() -> None:
    """Marked, and told; the replay waits for a node. Before any save it begins from what the attempt restored."""
    play = Play(nodes=1).run()
    issued = doubt(play)
    (ordered,) = written(issued, ReplayOrdered)
    assert (ordered.first, ordered.on) == (4, []) and play.state.nodes["n0"].suspect
    assert "no spare" in written(issued, NodeSuspected)[0].done and not actions(issued, m.GiveOrder)


def test_of_several_nodes_none_is_blamed() -> None:
    """Which one it was nobody knows: the plan is to replay with one half replaced, then with the other."""
    play = Play(nodes=3, spares=2).run()
    issued = doubt(play)
    (ordered,) = written(issued, ReplayOrdered)
    assert ordered.halves == [["n0"], ["n1", "n2"]] and ordered.on == ["n3", "n4"]
    assert not written(issued, NodeSuspected) and not actions(issued, m.GiveOrder)
    assert not any(node.suspect for node in play.state.nodes.values())


def test_an_attempt_is_replayed_once() -> None:
    """A broken device gives such a verdict every few steps: one order an attempt; and the last ones are remembered."""
    play = Play(nodes=2).run()
    assert written(doubt(play, 9), ReplayOrdered) and not written(doubt(play, 11), ReplayOrdered)
    for attempt in range(2, KEPT + 4):
        play.fail(tail=f"{attempt}")
        play.run(step=10 * attempt)
        assert written(doubt(play, 10 * attempt), ReplayOrdered)
    assert len(play.state.run.replays) == KEPT and play.state.run.replays[-1].attempt == play.attempt


def test_nobody_answers_for_the_attempt_before() -> None:
    """A verdict that is read when another attempt runs, or one of a trainer that did not tell its attempt, says nothing
    of the nodes that run now; nor does any before there are nodes."""
    assert not doubt(Play(join=False))
    for stage in ("running", BEGINNING):
        play = Play(nodes=1, spares=1).run()
        play.fail()
        if stage == "running":
            play.run()
        assert play.state.run.stage == stage
        for attempt in (play.attempt - 1, -1) if stage == "running" else (play.attempt,):
            assert not doubt(play, attempt=attempt)
        assert not any(node.suspect for node in play.state.nodes.values()) and not play.state.run.replays


@pytest.mark.parametrize("stage", [ENDING, WRAPPING, CLOSING, WAITING])
def test_a_verdict_may_be_read_when_its_attempt_ends(stage: str) -> None:
    """The rank that gave it ended by it, which is heard at once; the journal is read a moment later. It counts all the
    same: its node is left, without a word to workers that end anyway."""
    play = Play(nodes=1, spares=1, procs=2, memory=True).run()
    play.end(0, 1)
    if stage != ENDING:
        play.end(1, -9)
    if stage in (CLOSING, WAITING):
        play.did_all()
    if stage == WAITING:  # for what nodes hold in memory
        play.did_all()
    assert play.state.run.stage == stage
    issued = doubt(play)
    (ordered,) = written(issued, ReplayOrdered)
    assert (ordered.attempt, ordered.nodes, ordered.on) == (1, ["n0"], ["n1"])
    assert written(issued, NodeSuspected)[0].node == "n0" and not actions(issued, m.GiveOrder)
    if stage == ENDING:
        play.end(1, -9)
    while play.did_all():
        pass
    assert play.state.run.stage == BEGINNING and play.members() == ["n1"]
