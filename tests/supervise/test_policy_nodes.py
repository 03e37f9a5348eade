"""The policy of several nodes: hangs, nodes that are lost and come back, whose fault it was."""

from __future__ import annotations

import msgspec
import pytest

from packtrain.core.contract import Word
from packtrain.core.errors import (
    PacktrainError,
)
from packtrain.core.records import (
    AttemptEnded,
    ErrorSeen,
    NodeBack,
    NodeCordoned,
    NodeLost,
    NodeSuspected,
    SharedCauseSeen,
    StacksTaken,
)
from packtrain.supervise import messages as m
from packtrain.supervise.assign import places
from packtrain.supervise.events import (
    Back,
    Begin,
    Done,
    FromNode,
    Opened,
    Published,
    Silent,
    Slow,
    WrapUp,
)
from packtrain.supervise.state import RUNNING, Run
from tests.supervise.played import CONFIG, Play, actions, begin_of, owns, written


class Broken(PacktrainError):
    """What a rank of train/ says when a collective failed."""

    name = "world.broken"


BROKEN = Broken("a peer is gone")
LOST = m.HardwareSeen(verdict="lost", what="Xid 79: fell off the bus", where="0000:01:00", text="the line")


# --- hangs -------------------------------------------------------------------------------------------


def test_a_silent_rank_is_told_early_and_ended_when_it_is_certain() -> None:
    """Stacks are asked for at the first word of it; the attempt ends at `beat_overdue_s`, at once if they are there."""
    play = Play(nodes=2).run()
    asked = actions(play.edge("n1", m.RankSilent(attempt=1, rank=1, seconds=3.0)), m.TakeStacks)
    assert [node for node, _ in asked] == ["n0", "n1"]
    for rank, node in enumerate(("n0", "n1")):
        told = written(play.edge(node, m.Stacks(attempt=1, rank=rank, how="faulthandler", text="x")), StacksTaken)
        assert told[0].rank == rank
    assert actions(play.edge("n1", m.RankSilent(attempt=1, rank=1, seconds=10.0)), m.EndWorkers)
    issued = play.end_rest()
    assert "beat_overdue_s" in written(issued, AttemptEnded)[0].reason
    assert written(issued, NodeSuspected)[0].node == "n1"


def test_stacks_delay_nothing_by_more_than_two_seconds() -> None:
    """Where no stack comes the attempt ends two seconds later all the same."""
    play = Play(nodes=2).run()
    assert not actions(play.edge("n1", m.RankSilent(attempt=1, rank=1, seconds=10.0)), m.EndWorkers)
    assert not actions(play.wait(1.5), m.EndWorkers) and actions(play.wait(0.5), m.EndWorkers)


def test_a_rank_that_is_heard_again_goes_on() -> None:
    """Silence that ends before it is certain leads to nothing."""
    play = Play(nodes=2).run()
    play.edge("n1", m.RankSilent(attempt=1, rank=1, seconds=3.0))
    play.edge("n1", m.RankHeard(attempt=1, rank=1, step=5))
    assert not actions(play.wait(20), m.EndWorkers) and play.state.run.stage == RUNNING


@pytest.mark.parametrize(("texts", "blamed"), [
    ("aab", ["n2"]), ("aaa", []), ("abc", []), ("aa", []), ("bba", ["n2"]),
])
def test_a_world_without_a_step(texts: str, blamed: list[str]) -> None:
    """When all stand still the node of the one rank whose stack differs from all others is blamed, else nobody."""
    play = Play(nodes=3).run()
    for rank in range(3):
        play.edge(f"n{rank}", m.RankStalled(attempt=1, rank=rank, seconds=8.0, step=5))
    for rank, text in enumerate(texts):
        play.edge(f"n{rank}", m.Stacks(attempt=1, rank=rank, how="py-spy", text=f"at {text} 0x7f{rank}"))
    play.edge("n0", m.RankStalled(attempt=1, rank=0, seconds=60.0, step=5))
    play.wait(2)
    assert [one.node for one in written(play.end_rest(), NodeSuspected)] == blamed


# --- nodes -------------------------------------------------------------------------------------------


def test_a_silent_node_is_lost_later() -> None:
    """While all is well a silent node gets until `node_lost_s`; then its ranks are gone with it and a spare takes its
    place, the others keeping theirs."""
    play = Play(nodes=3, spares=1).run()
    play.happened(Silent(node="n1", seconds=3.0))
    assert not actions(play.wait(6.5), m.EndWorkers)
    issued = play.wait(1)
    assert written(issued, NodeLost)[0].node == "n1" and len(actions(issued, m.EndWorkers)) == 3
    assert begin_of(play.end_rest()).reason.startswith("node n1 is lost")
    assert play.members() == ["n0", "n3", "n2"]


def lost_after(play: Play, step: int = 0, comes_back: bool = True) -> float:
    """An attempt begins, completes so many steps, and its last node falls silent: how much later that is lost."""
    play.run(step)
    node = play.members()[-1]
    play.happened(Silent(node=node, seconds=3.0))
    began_s = play.now_s
    for _ in range(1000):
        if written(play.wait(0.5), NodeLost):
            break
    lost_s = play.now_s
    play.end_rest()
    if comes_back:
        play.happened(Back(node=node))
        play.did_all()
    return lost_s - began_s


def test_nodes_that_were_lost_by_mistake_have_more_time() -> None:
    """Where attempts end before a new step, one after the other, by nodes that fall silent and come back, a node has up
    to eight times as long; with the first new step it has as long as ever. Where none comes back nothing changes."""
    play = Play(nodes=2, spares=6)
    assert [lost_after(play) for _ in range(5)] == [10 * times - 3 for times in (1, 2, 4, 8, 8)]
    assert lost_after(play, step=9) == 7
    assert lost_after(play, comes_back=False) == 7, "the first to end before a new step"
    assert lost_after(play, step=12, comes_back=False) == 7
    assert [lost_after(play, comes_back=False) for _ in range(2)] == [7, 7], "what was before a new step is forgotten"
    gone = Play(nodes=2, spares=4)
    assert [lost_after(gone, comes_back=False) for _ in range(4)] == [7, 7, 7, 7]


def test_a_short_silence_is_nothing() -> None:
    """A link that flaps for less than that ends no attempt."""
    play = Play(nodes=2).run()
    play.happened(Silent(node="n1", seconds=3.0))
    play.wait(5)
    play.happened(Back(node="n1"))
    assert not actions(play.wait(20), m.EndWorkers)


def test_a_silent_node_is_not_waited_for_when_others_died() -> None:
    """Once an attempt ends nobody waits for a node that is silent."""
    play = Play(nodes=2).run()
    play.happened(Silent(node="n1", seconds=3.0))
    assert owns(play.end(0, 75, BROKEN), WrapUp)
    play.did_all()
    assert written(play.did_all(), AttemptEnded)[0].reason == "node n1 is gone"


def test_a_node_that_comes_back_puts_away_what_it_had() -> None:
    """What a lost node was told to end stays to be done; until it has, no attempt begins on it; then it is a spare."""
    play = Play(nodes=2, spares=1).run()
    play.happened(Silent(node="n1", seconds=3.0))
    play.wait(8)
    play.end_rest()
    assert written(play.happened(Back(node="n1")), NodeBack)[0].node == "n1"
    owed = [type(one.action).__name__ for one in play.state.pending.values() if one.node == "n1"]
    assert owed == ["EndWorkers", "EndAttempt"] and play.state.nodes["n1"].attempt == 1
    play.begun()
    play.did_all()
    assert play.state.nodes["n1"].attempt == 0 and play.members() == ["n0", "n2"]


def test_another_agent_means_that_workers_are_gone() -> None:
    """A new incarnation ends the attempt; edges of the old one are not heard any more, nor is anything owed to it."""
    play = Play(nodes=2).run()
    old = play.state.nodes["n1"].agent
    issued = play.join("n1", agent="b")
    assert [node for node, _ in actions(issued, m.EndWorkers)] == ["n0"]
    assert not play.happened(FromNode(node="n1", agent=old, seq=99, event=m.RankHeard(attempt=1, rank=1, step=6)))
    assert not [one for one in play.state.pending.values() if one.node == "n1"]
    assert "agent of node n1 was lost" in begin_of(play.end_rest()).reason


def test_workers_of_an_unknown_attempt_are_put_away() -> None:
    """An agent that runs workers nobody knows of is told to end them before it is used."""
    play = Play(nodes=1, join=False)
    issued = play.join("n0", attempt=7)
    assert [type(one.action).__name__ for one in issued] == ["EndWorkers", "EndAttempt"]
    play.edge("n0", m.Did(id=issued[0].id))
    assert owns(play.edge("n0", m.Did(id=issued[1].id)), Begin)


def test_without_a_spare_the_world_shrinks_and_grows_again() -> None:
    """After `replace_s` without the lost node the largest world that is left begins; nodes that are back for `grow_s`
    are taken in at the next save that is published, and not before."""
    play = Play(nodes=3, worlds=(1, 2)).run()
    play.happened(Silent(node="n0", seconds=3.0))
    play.wait(8)
    assert not owns(play.end_rest(), Begin)
    assert len(begin_of(play.wait(9)).writers) == 2 and play.members() == ["n2", "n1"]
    play.run(step=8)
    play.join("n0", agent="b")
    play.wait(29)
    assert not actions(play.happened(Published(step=9)), m.GiveOrder)
    play.wait(2)
    orders = actions(play.happened(Published(step=10)), m.GiveOrder)
    assert [order.word for _, order in orders] == [Word.STOP, Word.STOP]
    issued = play.end_rest(75)
    assert len(begin_of(issued).writers) == 3 and "grows from 2 to 3" in begin_of(issued).reason
    assert play.state.run.fruitless == 0


def test_a_node_that_cannot_launch_ends_the_attempt() -> None:
    """Its error is the reason; a node that is heard and does not answer is the same after 30 s."""
    play = Play(nodes=2)
    issued = play.begun()
    launch = next(one for one in issued if one.node == "n1")
    play.edge("n1", m.Did(id=launch.id, error="no memory"))
    assert "no memory" in play.state.run.trouble.reason  # type: ignore[union-attr]
    play = Play(nodes=2)
    play.begun()
    play.wait(31)
    assert play.state.run.trouble is not None and play.state.run.trouble.kind == "launch"


def test_the_second_blame_in_a_row_replaces() -> None:
    """The first crash is tried again on the same node, the second in a row goes on with a spare in its place."""
    play = Play(nodes=2, spares=1).run()
    (first,) = written(play.fail(1), NodeSuspected)
    assert (first.in_row, play.members()) == (1, ["n0", "n1"])
    (second,) = written(play.run(step=9).fail(1), NodeSuspected)
    assert second.in_row == 2 and second.done == "it is replaced" and play.members() == ["n0", "n2"]


def test_blames_are_remembered_by_host() -> None:
    """A host that was blamed in other runs is chosen last of those that have no place yet."""
    play = Play(nodes=4, join=False)
    play.happened(Opened(term=2, setup=play.setup, blames={"lemon": 3}))
    for node, host in (("n0", "lemon"), ("n1", "a"), ("n2", "b")):
        play.join(node, host=host)
    assert places(play.setup, play.state.nodes, 2) == ["n1", "n2"]


def test_a_shared_cause_blames_nobody() -> None:
    """The same symptom on all nodes of a small run within a minute is told as such, and no node is blamed."""
    play = Play(nodes=3).run()
    for rank in (0, 1, 2):
        play.edge(f"n{rank}", m.RankSilent(attempt=1, rank=rank, seconds=10.0))
    play.wait(2)
    issued = play.end_rest()
    (shared,) = written(issued, SharedCauseSeen)
    assert shared.nodes == ["n0", "n1", "n2"] and not written(issued, NodeSuspected)
    assert "run.shared_cause" in [error.name for error in written(issued, ErrorSeen)] and owns(issued, Begin)


def test_a_symptom_of_long_ago_is_shared_with_nobody() -> None:
    """What other nodes showed more than a minute ago does not excuse the one that shows it now."""
    play = Play(nodes=3).run()
    for rank in (0, 1):
        play.edge(f"n{rank}", m.RankSilent(attempt=1, rank=rank, seconds=3.0))
        play.edge(f"n{rank}", m.RankHeard(attempt=1, rank=rank, step=6))
    play.wait(70)
    play.edge("n2", m.RankSilent(attempt=1, rank=2, seconds=10.0))
    play.wait(2)
    assert written(play.end_rest(), NodeSuspected)[0].node == "n2"


def test_two_nodes_share_nothing() -> None:
    """In a small run a symptom that one node does not show is no shared cause."""
    play = Play(nodes=3).run()
    for rank in (0, 1):
        play.edge(f"n{rank}", m.RankSilent(attempt=1, rank=rank, seconds=10.0))
    play.wait(2)
    assert written(play.end_rest(), NodeSuspected)[0].node == "n0"


def test_cordons_nobody_asked_for_are_few() -> None:
    """A node that is blamed for the fourth time is cordoned where a spare is there, and no second node within a day."""
    play, cordoned = Play(nodes=2, spares=3).run(), []
    for step in range(6, 30):
        victim = next(n for n in play.state.ranks)
        cordoned += written(play.fail(victim), NodeCordoned)
        play.run(step=step)
    assert len(cordoned) == 1 and play.state.nodes[cordoned[0].node].cordoned


def test_cordons_are_counted_whenever_they_are_decided() -> None:
    """A kernel's word came first; then nodes are blamed by what is concluded when time is over, with a date of the wall
    clock at hand: no second one within a day, whatever that clock says."""
    play, cordoned = Play(nodes=2, spares=4).run(), []
    assert written(play.edge("n1", LOST), NodeCordoned)
    play.end_rest()
    for step in range(6, 30):
        play.run(step=step)
        for rank in (0, 1):
            play.end(rank, 1 if rank == 0 else -9)
        play.happened(Done(id=next(id for id, one in play.state.pending.items() if isinstance(one.own, WrapUp))))
        cordoned += written(play.wait(40, wall_s=2e9), NodeCordoned)
        play.did_all()
    assert max(node.blames for node in play.state.nodes.values()) >= 4 and not cordoned


def test_a_day_later_another_node_may_be_cordoned() -> None:
    """A day is one in which somebody watched: that a clock was set by a year is none."""
    play = Play(nodes=2, spares=3).run()
    assert written(play.edge("n1", LOST), NodeCordoned)
    play.now_s += 86_000
    play.wait(10, wall_s=2e9)
    play.wait(10, wall_s=2e9 + 3e7)
    assert not written(play.edge("n2", LOST), NodeCordoned)
    play.now_s += 400
    assert written(play.edge("n3", LOST), NodeCordoned)
    assert not written(play.edge("n4", LOST), NodeCordoned)


def test_cordons_of_an_older_version_count() -> None:
    """Its log has dates of the wall clock: a coordinator that goes on from there lets a day pass after them."""
    play = Play(nodes=2, spares=3).run()
    old = msgspec.json.encode(play.state.run)[:-1] + b',"cordons":[1700000000.5]}'
    play.state = msgspec.structs.replace(play.state, run=msgspec.json.decode(old, type=Run))
    play.happened(Opened(term=2, setup=play.setup))
    assert not written(play.edge("n1", LOST), NodeCordoned) and not play.state.run.cordons
    play.now_s += 86_400
    assert written(play.edge("n2", LOST), NodeCordoned)


def test_a_straggler_is_told() -> None:
    """A slow node is journalled; it is replaced only where the configuration says so and a spare is there."""
    slow = Slow(attempt=1, node="n1", step_s=1.5, median_s=1.0)
    issued = Play(nodes=2, spares=1).run().happened(slow)
    assert written(issued, NodeSuspected)[0].done == "it is told, and goes on" and not actions(issued, m.GiveOrder)
    play = Play(nodes=2, spares=1, supervise=msgspec.structs.replace(CONFIG, replace_stragglers=True)).run()
    assert len(actions(play.happened(slow), m.GiveOrder)) == 2
    assert begin_of(play.end_rest(75)).reason.startswith("node n1 is slow") and play.members() == ["n0", "n2"]


@pytest.mark.parametrize("jump_s", [86400.0, -86400.0, 1e9, -1e9])
def test_a_clock_that_jumps_ends_nothing(jump_s: float) -> None:
    """A wall clock that is set by a day, or by years, either way, while all runs: no record, no action."""
    play = Play(nodes=2, spares=1).run()
    assert not play.wait(10, wall_s=2e9)
    assert not play.wait(10, wall_s=2e9 + jump_s)
    assert not play.wait(10, wall_s=2e9)


def test_carriers_are_introduced() -> None:
    """When every carrier of the attempt is up each learns where all are; again when one is new."""
    play = Play(nodes=2).run()
    assert not play.edge("n0", m.CarrierUp(attempt=1, address="h0:1"))
    (first, _) = actions(play.edge("n1", m.CarrierUp(attempt=1, address="h1:1")), m.Peers)
    assert first[1].addresses == {"n0": "h0:1", "n1": "h1:1"}
    assert written(play.edge("n1", m.CarrierEnded(attempt=1, why="SIGKILL")), ErrorSeen)
    again = actions(play.edge("n1", m.CarrierUp(attempt=1, address="h1:2")), m.Peers)
    assert len(again) == 2 and again[0][1].addresses["n1"] == "h1:2"
