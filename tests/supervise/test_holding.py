"""Saves are held while many nodes show the same trouble at once: the policy, played by hand."""

from __future__ import annotations

import pytest

from packtrain.core.contract import Word
from packtrain.core.records import ErrorSeen, NodeSuspected, SharedCauseSeen
from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.detect import PROGRESS_NS, Pace
from packtrain.supervise.events import Progress
from packtrain.supervise.state import RUNNING, Issued
from tests.supervise.played import Play, actions, written


def holds(issued: list[Issued]) -> list[tuple[str, int]]:
    """(node, step) of each word to hold saves."""
    orders = actions(issued, m.GiveOrder)
    return [(node, order.a) for node, order in orders if order.word is Word.HOLD]


def training(nodes: int = 3, step: int = 10, step_s: float = 1.0, **more: object) -> Play:
    play = Play(nodes=nodes, **more).run()  # type: ignore[arg-type]
    play.happened(Progress(attempt=1, step=step, step_s=step_s))
    play.wait(10)
    return play


def strike(play: Play, *nodes: str) -> list[Issued]:
    """Their carriers end, one after the other."""
    found: list[Issued] = []
    for name in nodes or play.members():
        found += play.edge(name, m.CarrierEnded(attempt=play.attempt, why="it hung and was given up"))
    return found


def test_carriers_that_end_on_all_nodes_hold_the_saves() -> None:
    """It is told once, nobody is blamed, no attempt ends, and each node gets the word to hold saves for twice a minute,
    in steps; a minute after the last of it they get the word that it is over, once."""
    play = training(step_s=2.0)
    assert not holds(strike(play, "n0", "n1"))
    issued = strike(play, "n2")
    assert holds(issued) == [(name, 10 + 60) for name in ("n0", "n1", "n2")]
    (told,) = written(issued, SharedCauseSeen)
    assert (told.symptom, told.nodes) == ("carrier ended", ["n0", "n1", "n2"])
    assert "run.shared_cause" in [error.name for error in written(issued, ErrorSeen)]
    assert not written(issued, NodeSuspected) and play.state.run.stage == RUNNING
    assert not holds(play.wait(59))
    assert holds(play.wait(2)) == [(name, 0) for name in ("n0", "n1", "n2")]
    assert not holds(play.wait(200))


def test_while_it_lasts_they_are_told_again() -> None:
    """Before the step comes until which they hold; the cause is told once."""
    play = training()
    strike(play)
    told, until = 0, [130]
    for minute in range(1, 8):
        heard = play.happened(Progress(attempt=1, step=10 + 50 * minute, step_s=1.0))
        issued = heard + play.wait(50) + strike(play)
        told += len(written(issued, SharedCauseSeen))
        until += [step for node, step in holds(issued) if node == "n0"]
        assert until[-1] > 10 + 50 * minute
    assert told == 0 and 0 not in until and len(until) >= 4


@pytest.mark.parametrize(("nodes", "struck"), [(3, ("n0", "n1")), (2, ("n0", "n1"))])
def test_some_nodes_share_nothing(nodes: int, struck: tuple[str, ...]) -> None:
    """In a small run it must be all nodes, three at least; others save on."""
    play = training(nodes)
    issued = strike(play, *struck) + play.wait(100)
    assert not holds(issued) and not written(issued, SharedCauseSeen)


def test_a_word_is_not_written_over() -> None:
    """A rank looks once a step: behind another word the one to hold waits for three steps."""
    play = training(step_s=4.0)
    play.ask("save")
    assert not holds(strike(play) + play.wait(11)) and holds(play.wait(2))


def test_who_does_not_save_is_not_told() -> None:
    """Neither a world that was told to stop, nor one that pauses, nor a program of anybody."""
    for word in ("stop", "pause"):
        play = training()
        play.ask(word)
        play.wait(10)
        assert not holds(strike(play) + play.wait(15))
    play = Play(nodes=3, plain=True)
    play.begun()
    play.did_all()
    assert written(strike(play), SharedCauseSeen) and not holds(play.wait(100))


def test_the_next_attempt_holds_as_well() -> None:
    """A cause that lasts when an attempt ends is not over with it."""
    play = training()
    strike(play)
    play.fail()
    play.run(step=20)
    assert holds(play.wait(10)) and not written(play.issued, SharedCauseSeen)


def test_how_long_a_step_takes_is_told_with_the_progress() -> None:
    """The median over the nodes that know; nobody knows: 0."""
    pace = Pace(1, 3)
    for node in ("a", "b", "c"):
        pace.heard(node, 1, 0.0)
    assert [(one.step, one.step_s) for one in pace.look(NS)] == [(1, 0.0)]  # type: ignore[union-attr]
    for node, step_s in (("a", 0.0), ("b", 2.0), ("c", 4.0)):
        pace.heard(node, 2, step_s)
    assert [one.step_s for one in pace.look(NS + PROGRESS_NS)] == [3.0]
