"""The policy of several nodes: what is heard twice, of another attempt, or from another coordinator's workers."""

from __future__ import annotations

from packtrain.core.errors import CarrierHung, CheckpointDamaged
from packtrain.core.records import AttemptEnded, CarrierGivenUp, ErrorSeen, HomeBack
from packtrain.supervise import messages as m
from packtrain.supervise.events import Begin, Begun, CarrierWanted, FromNode, Joined, Opened, WrapUp
from packtrain.supervise.policy import decide
from packtrain.supervise.state import CLOSING, RUNNING, Issued, evolve
from tests.supervise.played import Play, actions, begin_of, owns, written


def test_nothing_is_consumed_twice() -> None:
    """An edge that is repeated, and an answer to an action that was answered, change nothing."""
    play = Play(nodes=1)
    begin = next(iter(play.state.pending))
    play.begun()
    assert not play.happened(Begun(id=begin, attempt=9, begin=20)) and play.attempt == 1
    play.edge("n0", m.CarrierUp(attempt=1, address="h:1"))
    before = play.state
    again = FromNode(node="n0", agent="a", seq=play.state.nodes["n0"].seq, event=m.CarrierEnded(attempt=1, why="x"))
    assert not play.happened(again) and play.state == before


def test_what_is_told_of_another_attempt_is_passed_over() -> None:
    """Edges of an attempt that is over change nothing in the one that runs."""
    play = Play(nodes=1).run()
    play.fail()
    play.run()
    play.edge("n0", m.RankSilent(attempt=1, rank=0, seconds=10.0))
    play.edge("n0", m.RankEnded(attempt=1, rank=0, status=-9))
    assert play.state.run.stage == RUNNING and play.state.run.trouble is None


def test_ids_of_two_terms_are_never_the_same() -> None:
    """A coordinator that goes on from the same log under another term gives other ids to its actions."""
    first, second = Play(nodes=1, join=False), Play(nodes=1, join=False)
    second.happened(Opened(term=2, setup=second.setup))
    assert not {one.id for one in first.join("n0")} & {one.id for one in second.join("n0")}


def test_a_step_heard_of_at_the_end_counts() -> None:
    """The last step that a rank's end tells is progress, though no rollup told of it."""
    play = Play(nodes=1).run(step=5)
    play.fail()
    play.run(step=5)
    play.end(0, 1, step=9)
    play.end_rest()
    assert (play.state.run.fruitless, play.state.run.best_step) == (0, 9)


def test_a_rank_that_leaves_before_go_is_not_waited_for() -> None:
    """Until GO the others wait for it: one that ends ends all at once."""
    play = Play(nodes=2)
    play.begun()
    play.did_all()
    assert actions(play.end(0, 75, CheckpointDamaged("crc")), m.EndWorkers)


def test_trouble_ends_with_its_attempt() -> None:
    """What ended one attempt is forgotten in the next."""
    play = Play(nodes=2).run()
    play.edge("n1", m.RankSilent(attempt=1, rank=1, seconds=10.0))
    play.wait(2)
    play.end_rest()
    assert play.state.run.trouble is None
    play.run(step=9)
    assert "exit code 1" in begin_of(play.fail()).reason


def test_workers_of_another_coordinator_are_put_away() -> None:
    """An agent that is known and says it runs a later attempt than any here was told so by another coordinator."""
    play = Play(nodes=2, join=False)
    play.join("n0")
    issued = play.join("n0", attempt=7)
    assert [type(one.action).__name__ for one in issued] == ["EndWorkers", "EndAttempt"]
    assert not owns(play.join("n1"), Begin)


def test_retention_is_asked_of_one_carrier_at_a_time() -> None:
    """A request goes to the node that publishes, while an attempt runs, and the next one only after its answer."""
    play = Play(nodes=2).run()
    assert [node for node, _ in actions(play.happened(CarrierWanted(request="{}")), m.AskCarrier)] == ["n0"]
    assert not actions(play.happened(CarrierWanted(request="{}")), m.AskCarrier)
    play.did_all()
    assert actions(play.happened(CarrierWanted(request="{}")), m.AskCarrier)


def test_only_the_node_that_was_asked_can_say_that_it_did() -> None:
    """An outcome with the id of another node's action leaves that one to be done."""
    play = Play(nodes=2)
    launch = next(one for one in play.begun() if one.node == "n1")
    play.edge("n0", m.Did(id=launch.id))
    assert launch.id in play.state.pending
    play.edge("n1", m.Did(id=launch.id))
    assert launch.id not in play.state.pending


def test_a_carrier_that_was_given_up_is_on_record() -> None:
    """As a record and as the warning that its agent worded; that a home answers again is one, too. One that ended by
    itself is a warning only, and what not even SIGKILL ends is one."""
    play = Play(nodes=2).run()
    hung = CarrierHung("it hung", where="/disk", fix="look").as_dict()
    given_up = m.CarrierEnded(attempt=1, why="has hung", given_up=True, quarantine=("/disk",), error=hung)
    issued = play.edge("n1", given_up)
    assert written(issued, CarrierGivenUp) == [CarrierGivenUp(reason="has hung", quarantine=["/disk"], node="n1")]
    assert [seen.name for seen in written(issued, ErrorSeen)] == ["checkpoint.carrier_hung"]
    issued = play.edge("n1", m.CarrierHomeBack(attempt=1, path="/disk"))
    assert written(issued, HomeBack) == [HomeBack(path="/disk", node="n1")]
    issued = play.edge("n0", m.CarrierEnded(attempt=1, why="exit code 3"))
    assert not written(issued, CarrierGivenUp)
    assert [seen.name for seen in written(issued, ErrorSeen)] == ["checkpoint.carrier_lost"]
    issued = play.edge("n0", m.Unkillable(attempt=1, what="rank 0", pid=7, seconds=5.0))
    (seen,) = written(issued, ErrorSeen)
    assert seen.name == "run.process_hangs" and seen.severity == "warning" and "process 7" in seen.what


def test_a_stop_while_a_checkpoint_is_brought_back_is_clean() -> None:
    """No worker was started: 75, stopped on request, and the record of the attempt says the same."""
    play = Play(nodes=1)
    play.begun(away=True)
    play.did_all()
    play.ask("stop")
    ended = play.did_all() + play.did_all() + play.did_all()
    assert [(one.exit_code, one.reason) for one in written(ended, AttemptEnded)] == [(75, "stopped on request")]
    run = play.state.run
    assert (run.exit_code, run.error["name"], run.error["what"]) == (
        75, "run.stopped_on_request", "stopped on request"
    )


def test_what_an_agent_was_asked_ends_with_it() -> None:
    """Whether that was decided long before another one came to its node, or at the same look: the new one has no such
    workers. What a node was asked that has the agent it had stays, and no id is given twice."""
    play = Play(nodes=3).run()
    ready = play.state
    edge = m.RankSilent(attempt=1, rank=0, seconds=4.0)
    silent = FromNode(ns=play.ns, node="n0", agent="a", seq=ready.nodes["n0"].seq + 1, event=edge)
    new = [Joined(ns=play.ns, node=name, agent="b") for name in ("n1", "n2")]
    apart, together = ready, decide(ready, silent, *new)
    for event in (silent, *new):
        apart = evolve(apart, *decide(apart, event))
    for state in (apart, evolve(ready, *together)):
        asked = {(one.node, type(one.action)) for one in state.pending.values()}
        assert asked == {("n0", m.TakeStacks), ("n0", m.EndWorkers)}
    issued = [record for record in together if isinstance(record, Issued)]
    assert len({one.id for one in issued}) == len(issued) and {one.node for one in issued} == {"n0", ""}


def test_nobody_owes_what_is_not_waited_for() -> None:
    """An attempt whose publishing node is gone is not wrapped up, also where both are found at the same look; what is
    for the journal is written."""
    play = Play(nodes=2).run()
    play.join("n0", agent="b")
    issued = play.end(1, -9)
    assert play.state.run.stage == CLOSING and not owns(issued, WrapUp)
    assert not [one for one in play.state.pending.values() if isinstance(one.own, WrapUp)]
