"""What befalls a member of a world between the decision that its attempt begins and the start of its workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.json import decode, encode

from packtrain.core.records import AttemptEnded, NodeSuspected
from packtrain.monitor.kernel import LEAVE, LOST
from packtrain.supervise import messages as m
from packtrain.supervise.events import Begin, BringBack, Done, Silent, WrapUp
from packtrain.supervise.state import BEGINNING, BRINGING, LAUNCHING, WRAPPING, Issued, State
from tests.supervise.played import CONFIG, Play, actions, owns, written


def lose(play: Play, node: str) -> list[Issued]:
    return play.happened(Silent(node=node, seconds=3.0)) + play.wait(30)


def hardware(verdict: str) -> Callable[[Play, str], list[Issued]]:
    def seen(play: Play, node: str) -> list[Issued]:
        return play.edge(node, m.HardwareSeen(verdict=verdict, what="off the bus", where="PCI:1", text="Xid 79"))

    return seen


def maintenance(play: Play, node: str) -> list[Issued]:
    return play.ask("drain", node, at_s=1000.0) + play.wait(1, wall_s=1000.0 - CONFIG.grace_s)


BEFALLS: dict[str, Callable[[Play, str], list[Issued]]] = {
    "lost": lose,
    "drained": lambda play, node: play.ask("drain", node),
    "maintenance": maintenance,
    "its agent leaves": lambda play, node: play.edge(node, m.NodeLeaves(grace_s=10.0)),
    "cordoned": lambda play, node: play.ask("cordon", node),
    "replaced": lambda play, node: play.ask("replace", node),
    "device lost": hardware(LOST),
    "device fails": hardware(LEAVE),
}


def bring(play: Play) -> int:
    (one,) = [one for one in play.state.pending.values() if isinstance(one.own, BringBack)]
    return one.id


def settled(play: Play) -> list[Issued]:
    """Whatever was asked of nodes is done, until nothing more follows."""
    found: list[Issued] = []
    while issued := play.did_all():
        found += issued
    return found


@pytest.mark.parametrize("away", [False, True])
def test_all_workers_of_an_attempt_read_one_spec(away: bool) -> None:
    """The one that was decided as it began, also of a carrier that goes ahead; a coordinator after it knows the same.
    The next attempt has its own."""
    play = Play(nodes=2)
    launches = actions(play.begun(spec=3, away=away), m.Launch)
    assert decode(encode(play.state), type=State) == play.state
    if away:
        launches += actions(play.happened(Done(id=bring(play))), m.Launch)
    assert [launch.spec for _, launch in launches] == [3] * (2 + away)
    play.end_rest(1)
    assert {launch.spec for _, launch in actions(play.begun(spec=4), m.Launch)} == {4}


@pytest.mark.parametrize("how", ["trains", "plain", "away"])
@pytest.mark.parametrize("node", ["n0", "n1"])
@pytest.mark.parametrize("befalls", sorted(BEFALLS))
def test_no_worker_starts_where_none_is_to_be(befalls: str, node: str, how: str) -> None:
    """Before the attempt has begun: it ends without a worker, and the next one begins on the spare instead."""
    play = Play(nodes=2, spares=1, plain=how == "plain")
    assert play.state.run.stage == BEGINNING
    BEFALLS[befalls](play, node)
    issued = play.begun(away=how == "away")
    assert not actions(issued, m.Launch) and not owns(issued, BringBack) and len(written(issued, AttemptEnded)) == 1
    assert owns(issued, Begin) and node not in play.members() and "n2" in play.members()
    play.begun()
    play.did_all()
    assert play.attempt == 2 and {rank.node for rank in play.state.ranks.values()} == set(play.members())


@pytest.mark.parametrize("node", ["n0", "n1"])
@pytest.mark.parametrize("befalls", sorted(BEFALLS))
def test_no_worker_starts_where_none_is_to_be_any_more(befalls: str, node: str) -> None:
    """The same while a checkpoint is brought back: nobody waits for that."""
    play = Play(nodes=2, spares=1)
    play.begun(away=True)
    play.did_all()
    issued = BEFALLS[befalls](play, node) + settled(play)
    assert not actions(issued, m.Launch) and len(written(issued, AttemptEnded)) == 1
    assert play.state.run.stage == BEGINNING and node not in play.members() and "n2" in play.members()


def test_a_node_that_is_silent_for_a_moment_begins() -> None:
    """Silence is no loss yet: whether it becomes one is found while its workers start."""
    play = Play(nodes=2, spares=1)
    play.happened(Silent(node="n1", seconds=3.0))
    assert [node for node, _ in actions(play.begun(), m.Launch)] == ["n0", "n1"]
    issued = play.wait(30)
    play.end_rest()
    assert written(issued + play.issued, NodeSuspected)[0].node == "n1"


def test_a_node_that_was_replaced_begins_where_nobody_can_take_its_place() -> None:
    """Aside, or suspect, it is the last to be chosen, and no reason to begin again and again."""
    play = Play(nodes=2, spares=1)
    play.ask("replace", "n0")
    play.begun()
    play.ask("replace", "n1")  # the spare is n0, which is no better
    issued = play.begun()
    assert len(actions(issued, m.Launch)) == 2 and not written(issued, AttemptEnded)


def test_one_that_is_lost_before_its_workers_is_blamed_as_any_other() -> None:
    """And its attempt counts as one that a lost node ended, of which there may not be any number."""
    play = Play(nodes=2, spares=1)
    lose(play, "n1")
    assert [one.node for one in written(play.begun(), NodeSuspected)] == ["n1"] and play.state.run.disturbed == 1


# --- what an answer of the past means: nothing ----------------------------------------------------------


def nodes_did(play: Play) -> None:
    """All that they were asked to; the coordinator itself is slow."""
    for issued in list(play.state.pending.values()):
        if issued.node:
            play.edge(issued.node, m.Did(id=issued.id))


def not_waited_for() -> tuple[Play, int]:
    """The agent that publishes is replaced, so the wrap-up is not waited for any more; it is still under way."""
    play = Play(nodes=2).run()
    play.end(0, 1)
    play.end(1, -9)
    (late,) = [one.id for one in play.state.pending.values() if isinstance(one.own, WrapUp)]
    play.join("n0", agent="b")
    assert late not in play.state.pending
    nodes_did(play)
    assert play.state.run.stage == BEGINNING
    return play, late


def test_an_old_wrap_up_launches_nothing() -> None:
    """It is over while the next attempt waits for its checkpoint: the workers wait on."""
    play, late = not_waited_for()
    play.begun(away=True)
    assert not actions(play.happened(Done(id=late)), m.Launch) and play.state.run.stage == BRINGING
    assert len(actions(play.happened(Done(id=bring(play))), m.Launch)) == 2 and play.state.run.stage == LAUNCHING


@pytest.mark.parametrize("first", ["old", "own"])
def test_an_old_wrap_up_ends_no_other(first: str) -> None:
    """While the next attempt is wrapped up its own retention is waited for, and only that."""
    play, late = not_waited_for()
    play.begun()
    nodes_did(play)
    play.ready()
    for number in (0, 1):
        play.end(number, 0)
    assert play.state.run.stage == WRAPPING
    (own,) = [id for id, one in play.state.pending.items() if isinstance(one.own, WrapUp)]
    if first == "old":
        assert not actions(play.happened(Done(id=late)), m.EndAttempt) and play.state.run.stage == WRAPPING
    assert len(actions(play.happened(Done(id=own)), m.EndAttempt)) == 2
