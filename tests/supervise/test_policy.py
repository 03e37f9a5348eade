"""The policy of several nodes, pure: what follows what."""

from __future__ import annotations

import pytest

from packtrain.core.contract import Word
from packtrain.core.errors import (
    CheckpointDamaged,
    CheckpointUnreadable,
    CommitUnknown,
    GuardRollback,
    PacktrainError,
    SaveFailed,
    SlotDamaged,
    StoppedOnRequest,
    WrongModel,
    error_named,
)
from packtrain.core.records import (
    AttemptEnded,
    ErrorSeen,
    NodeCordoned,
    NodeDrained,
    NodeSuspected,
    OrderGiven,
    WorldChosen,
)
from packtrain.supervise import messages as m
from packtrain.supervise.asked import refusal
from packtrain.supervise.events import (
    Asked,
    Begin,
    Begun,
    BringBack,
    Done,
    WrapUp,
)
from packtrain.supervise.state import BEGINNING, ENDING, LAUNCHING, RUNNING, WAITING
from tests.supervise.played import CONFIG, Play, actions, begin_of, finish, owns, written


class Broken(PacktrainError):
    """What a rank of train/ says when a collective failed."""

    name = "world.broken"


BROKEN = Broken("a peer is gone")


# --- an attempt begins -------------------------------------------------------------------------------


def test_begins_when_all_nodes_are_there() -> None:
    """With the last of its nodes a run begins at once: ranks go to nodes in order, and every rank is a writer."""
    play = Play(nodes=2, procs=2, join=False)
    assert not owns(play.join("n0"), Begin)
    begin = begin_of(play.join("n1"))
    assert begin.writers == ("r00000", "r00001", "r00002", "r00003") and begin.node == "n0"
    launched = actions(play.begun(master="n0:7", restore="3:ab"), m.Launch)
    assert [(node, launch.ranks) for node, launch in launched] == [("n0", (0, 1)), ("n1", (2, 3))]
    assert {(launch.world_size, launch.master, launch.restore) for _, launch in launched} == {(4, "n0:7", "3:ab")}


def test_nodes_that_do_not_come_are_not_waited_for_for_ever() -> None:
    """After `nodes_s` a run begins on the largest world that the nodes fill; those left over are spares."""
    play = Play(nodes=4, worlds=(1, 2), join=False)
    for name in ("n0", "n1", "n2"):
        play.join(name)
    assert not owns(play.wait(19), Begin)
    assert len(begin_of(play.wait(2)).writers) == 2
    (chosen,) = written(play.begun(), WorldChosen)
    assert (chosen.nodes, chosen.spares, chosen.wanted) == (["n0", "n1"], ["n2"], 4)


def test_a_run_that_no_node_comes_for_ends() -> None:
    """Where no world can be filled for `nobody_s` the run ends with 75 and says how many came."""
    play = Play(nodes=3, join=False)
    play.join("n0")
    assert not owns(play.wait(499), Begin)
    play.wait(2)
    end = finish(play)
    assert end.exit_code == 75 and end.error["name"] == "run.nodes_missing" and "1 of 3" in end.error["what"]


def test_all_ready_and_of_one_mind_go() -> None:
    """GO is given once, with id 1, when the last rank is ready with the same facts."""
    play = Play(nodes=2)
    play.begun()
    assert not actions(play.edge("n0", m.RankReady(attempt=1, rank=0, facts={"step": "4"})), m.GiveOrder)
    orders = actions(play.edge("n1", m.RankReady(attempt=1, rank=1, facts={"step": "4"})), m.GiveOrder)
    assert [(node, order.order, order.word) for node, order in orders] == [("n0", 1, Word.GO), ("n1", 1, Word.GO)]
    assert play.state.run.stage == RUNNING


def test_ranks_that_differ_do_not_begin() -> None:
    """A rank with other facts than most is named with what differs; its node is replaced by a spare; the second time in
    a row ends the run with 78."""
    play = Play(nodes=3, spares=1)
    for _ in range(2):
        play.begun()
        for number, rank in play.state.ranks.items():
            told = {"code": "b" if number == 1 else "a"}
            play.edge(rank.node, m.RankReady(attempt=play.attempt, rank=number, facts=told))
        assert play.state.run.stage == ENDING
        issued = play.end_rest()
    end = finish(play)
    assert end.exit_code == 78 and end.error["name"] == "run.ranks_differ" and "rank 1 differs in code" in end.reason
    assert play.members() == ["n0", "n3", "n2"] and written(issued, AttemptEnded)


def test_a_rank_that_is_never_ready_ends_the_attempt() -> None:
    """After `go_s` the attempt ends, and the node whose ranks were missing is blamed."""
    play = Play(nodes=2)
    play.begun()
    play.did_all()
    play.edge("n0", m.RankReady(attempt=1, rank=0, facts={}))
    assert not actions(play.wait(39), m.EndWorkers)
    assert actions(play.wait(2), m.EndWorkers)
    (suspected,) = written(play.end_rest(), NodeSuspected)
    assert suspected.node == "n1"


def test_a_plain_program_is_not_waited_for() -> None:
    """A program that sends no `ready` runs from its launch on, and is given no GO."""
    play = Play(nodes=2, plain=True)
    assert not actions(play.begun(), m.GiveOrder) and play.state.run.stage == RUNNING


@pytest.mark.parametrize(("stopped", "key", "blamed"), [(True, "stopped_s", "n1"), (False, "progress_s", "")])
def test_an_idle_program_is_started_again(stopped: bool, key: str, blamed: str) -> None:
    """A program that does nothing ends, with stacks asked for; its node is blamed only where it was stopped there."""
    play = Play(nodes=2, plain=True)
    play.begun()
    play.did_all()
    idle = m.RankIdle(attempt=play.attempt, rank=1, seconds=12, stopped=stopped)
    assert [node for node, _ in actions(play.edge("n1", idle), m.TakeStacks)] == ["n0", "n1"]
    assert len(actions(play.wait(3), m.EndWorkers)) == 2
    play.end(0, -9)
    play.end(1, -9)
    ended = play.did_all() + play.did_all()
    assert key in written(ended, AttemptEnded)[0].reason
    assert [record.node for record in written(ended, NodeSuspected)] == ([blamed] if blamed else [])
    assert owns(ended, Begin)


def test_a_program_that_got_sigterm_is_stopped_not_done() -> None:
    """However a program of anybody ends after it was asked to, the others may finish, and the run is not done."""
    for statuses in ((0, 0), (-15, -15), (0, 143), (-15, 75)):
        play = Play(nodes=2, plain=True)
        play.begun()
        play.did_all()
        play.ask("stop", by="SIGINT")
        assert not actions(play.end(0, statuses[0]), m.EndWorkers)
        assert not actions(play.wait(20), m.EndWorkers)
        play.end(1, statuses[1])
        ended = play.did_all() + play.did_all()
        assert written(ended, AttemptEnded)[0] == AttemptEnded(
            attempt=1, exit_code=75, reason="stopped on request"
        ), statuses
        play.did_all()
        assert play.state.run.exit_code == 75


def test_a_peer_that_breaks_while_stopping_is_part_of_it() -> None:
    """Ranks that lose their peers to SIGTERM complain of that; another complaint is a crash."""
    for tail, code in (("RuntimeError: Connection closed by peer", 75), ("ZeroDivisionError", 1)):
        play = Play(nodes=2, plain=True)
        play.begun()
        play.did_all()
        play.ask("stop", by="SIGINT")
        play.end(0, -15)
        play.end(1, 1, tail=tail)
        assert written(play.did_all() + play.did_all(), AttemptEnded)[0].exit_code == code


def test_ranks_of_a_program_may_end_at_their_own_time() -> None:
    """One rank that is done hurries none of the others; all done is done, and 78 of one ends the run."""
    for last, code in ((0, 0), (78, 78)):
        play = Play(nodes=2, plain=True)
        play.begun()
        play.did_all()
        play.end(0, 0)
        assert not actions(play.wait(3000), m.EndWorkers)
        play.end(1, last)
        play.did_all()
        play.did_all()
        play.did_all()
        assert play.state.run.exit_code == code and play.state.run.stage in ("leaving", "finished")


def test_what_was_taken_away_is_brought_back_first() -> None:
    """Where the checkpoint is away only the carrier of rank 0's node is started, and the workers when it is back."""
    play = Play(nodes=2)
    issued = play.begun(away=True)
    assert [(node, launch.ranks) for node, launch in actions(issued, m.Launch)] == [("n0", ())]
    (bring,) = [one.id for one in issued if isinstance(one.own, BringBack)]
    assert [launch.ranks for _, launch in actions(play.happened(Done(id=bring)), m.Launch)] == [(0,), (1,)]


def test_an_attempt_that_cannot_begin_is_tried_later_and_later() -> None:
    """A commit log that cannot be read is tried after pauses that grow, and ends the run with 75 after eight times; at
    once where no attempt has begun yet, and so does a log that another coordinator has moved on."""
    play, pauses = Play(nodes=1).run(), []
    play.fail()
    error = CommitUnknown("EIO", where="commits", fix="look").as_dict()
    while play.state.run.stage != "leaving":
        begin = next(one for one in play.state.pending.values() if isinstance(one.own, Begin))
        play.happened(Begun(id=begin.id, error=error))
        waited = 0.0
        while play.state.run.stage == WAITING:
            play.wait(0.5)
            waited += 0.5
        pauses.append(waited)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 0] and finish(play).exit_code == 75
    play = Play(nodes=1)
    play.happened(Begun(id=next(iter(play.state.pending)), error=error))
    end = finish(play)
    assert (end.exit_code, end.error) == (75, error)
    play = Play(nodes=1).run()
    play.fail()
    begin = next(one.id for one in play.state.pending.values() if isinstance(one.own, Begin))
    play.happened(Begun(id=begin, error=error_named("commits.stale", "another").as_dict()))
    assert play.state.run.stage == "leaving"


# --- an attempt ends ---------------------------------------------------------------------------------


def test_any_death_ends_all() -> None:
    """A rank that dies ends the others at once; when all are gone the carriers finish, and the next attempt begins."""
    play = Play(nodes=3).run()
    killed = actions(play.end(1, -9), m.EndWorkers)
    assert [node for node, _ in killed] == ["n0", "n2"]
    play.end(0, -9)
    (wrap,) = owns(play.end(2, -9), WrapUp)
    assert not wrap.done
    ended = actions(play.did_all(), m.EndAttempt)
    assert [node for node, _ in ended] == ["n0", "n1", "n2"]
    issued = play.did_all()
    assert not begin_of(issued).back
    (record,) = written(issued, AttemptEnded)
    assert record.exit_code == -9 and "SIGKILL" in record.reason


def test_all_zero_is_done() -> None:
    """A run whose ranks all exit 0 wraps up as done, its agents leave, and it ends with 0."""
    play = Play(nodes=2).run()
    play.end(0, 0)
    (wrap,) = owns(play.end(1, 0), WrapUp)
    assert wrap.done
    play.did_all()
    assert len(actions(play.did_all(), m.Leave)) == 2
    assert (finish(play).exit_code, play.state.run.error) == (0, {})


def test_78_of_any_rank_ends_the_run() -> None:
    """A refused configuration is never started again, whoever else died of what; its error is the run's."""
    play = Play(nodes=2).run()
    play.end(1, -6)
    play.end(0, 78, WrongModel("another model"))
    play.end_rest()
    end = finish(play)
    assert end.exit_code == 78 and end.error["name"] == "checkpoint.other_model"


def test_the_cause_is_not_a_consequence() -> None:
    """The rank that says its peer is gone, or aborts with such words, is not blamed, though it is heard first."""
    play = Play(nodes=3).run()
    play.end(0, 75, BROKEN)
    play.end(2, -6, tail="gloo: Connection reset by peer")
    issued = play.fail(1, -11)
    (ended,) = written(issued, AttemptEnded)
    assert "SIGSEGV" in ended.reason and written(issued, NodeSuspected)[0].node == "n1"


def test_a_consequence_alone_blames_nobody() -> None:
    """Where only consequences are heard the attempt ends with what they say and no node is blamed."""
    play = Play(nodes=2).run()
    play.end(0, 75, BROKEN)
    play.wait(6)
    issued = play.end_rest()
    assert written(issued, AttemptEnded)[0].reason == "a peer is gone" and not written(issued, NodeSuspected)


def test_a_killed_rank_is_not_the_cause() -> None:
    """What died after we killed it explains nothing."""
    play = Play(nodes=2).run()
    play.end(1, 1, tail="ValueError: x")
    (ended,) = written(play.end_rest(), AttemptEnded)
    assert ended.exit_code == 1 and "ValueError" in ended.reason


def test_ranks_leave_together() -> None:
    """A rank that asks to be started again gives the others five seconds; one that is done gives them the grace."""
    play = Play(nodes=2).run()
    play.end(0, 75)
    assert not actions(play.wait(4), m.EndWorkers) and actions(play.wait(2), m.EndWorkers)
    play = Play(nodes=2).run()
    play.end(0, 0)
    assert not actions(play.wait(29), m.EndWorkers) and actions(play.wait(2), m.EndWorkers)


def test_a_last_save_without_a_home_ends_the_run() -> None:
    """Exit 75 because nothing could be saved is not tried again on the same disk."""
    play = Play(nodes=2).run()
    play.fail(0, 75, SaveFailed("disk full"))
    assert finish(play).error["name"] == "checkpoint.save_failed"


def test_a_worker_that_cannot_be_killed_is_not_waited_for() -> None:
    """A rank that hangs in a dead disk holds up nothing after 15 s, and its node is not used until it is gone."""
    play = Play(nodes=2, spares=1).run()
    play.end(0, 1)
    assert not owns(play.wait(14), WrapUp) and owns(play.wait(2), WrapUp)
    end = next(one for one in play.did_all() if one.node == "n1" and isinstance(one.action, m.EndAttempt))
    for issued in list(play.state.pending.values()):
        if issued.node == "n0":
            play.edge("n0", m.Did(id=issued.id))
    assert begin_of(play.wait(26)).writers and play.members() == ["n0", "n2"]
    play.edge("n1", m.Did(id=end.id))
    assert play.state.nodes["n1"].attempt == 0


def test_a_port_in_use_is_nobodys_fault() -> None:
    """Another attempt begins at once, with another port, and no node is blamed."""
    issued = Play(nodes=2).run().fail(0, 1, tail="OSError: [Errno 98] Address already in use")
    assert owns(issued, Begin) and not written(issued, NodeSuspected)


# --- from where the next attempt begins ----------------------------------------------------------------


def test_a_crash_loop_ends_the_run() -> None:
    """Three attempts in a row without a new step, three from the save before: then the run ends with 70."""
    play, backs = Play(nodes=1).run(), []
    while True:
        issued = play.fail()
        if not owns(issued, Begin):
            break
        backs.append(begin_of(issued).back)
        play.run(step=5)
    assert backs == [0, 0, 0, 1, 0, 0]
    assert finish(play).error["name"] == "run.no_progress"


def test_progress_resets_the_count() -> None:
    """An attempt that completes a new step gives the run its tries again."""
    play = Play(nodes=1).run()
    for step in range(6, 30):
        assert not begin_of(play.fail()).back
        play.run(step=step)


def ends(play: Play, *errors: PacktrainError) -> Begin | None:
    """Attempts that end with 75 and these errors, each after the same step; the last one's next begin."""
    for number, error in enumerate(errors, 1):
        issued = play.fail(0, 75, error)
        if number < len(errors):
            play.run(step=5)
    return begin_of(issued) if owns(issued, Begin) else None


def test_where_the_next_attempt_begins() -> None:
    """A damaged checkpoint is tried once more, then the one before; a damaged slot means disk; the guard goes back."""
    damaged, guard = CheckpointDamaged("crc"), GuardRollback("bad twice")
    first, second = ends(Play(nodes=1).run(), damaged), ends(Play(nodes=1).run(), damaged, damaged)
    assert first is not None and second is not None and (first.back, second.back) == (0, 1)
    slot = ends(Play(nodes=1).run(), SlotDamaged("gone"))
    assert slot is not None and (slot.back, slot.memory) == (0, False)
    rolled = ends(Play(nodes=1).run(), guard)
    assert rolled is not None and rolled.back == 1


def test_rollbacks_are_bounded() -> None:
    """Three rollbacks without a step above the highest end the run; progress counts from the older step in between."""
    play, guard = Play(nodes=1).run(), GuardRollback("bad twice")
    for _ in range(3):
        assert ends(play, guard) is not None
        play.begun(step=2, rolled_back=True)
        assert play.state.run.best_step == 2
        play.did_all()
        play.ready()
        play.progress(5)
    assert ends(play, guard) is None and "3 rollbacks" in finish(play).error["what"]


def test_a_disk_that_refuses_is_tried_later_and_later() -> None:
    """Attempts that cannot read go back to no other save, begin after pauses that grow, and end in 75 after eight."""
    play, pauses = Play(nodes=1).run(), []
    while True:
        issued = play.fail(0, 75, CheckpointUnreadable("EIO"))
        if play.state.run.stage != WAITING:
            break
        waited = 0.0
        while not owns(issued, Begin):
            issued = play.wait(0.5)
            waited += 0.5
        pauses.append(waited)
        assert not begin_of(issued).back
        play.run(step=-1)
    assert pauses == [1, 2, 4, 8, 16, 30, 30] and finish(play).error["name"] == "checkpoint.unreadable"


def test_lost_nodes_are_no_lack_of_progress() -> None:
    """Attempts that a lost agent ended before a new step do not count as a crash loop, but not for ever."""
    play, attempts = Play(nodes=1).run(), 0
    while play.state.run.stage == RUNNING and attempts < 100:
        attempts += 1
        play.join("n0", agent=f"b{attempts}")
        play.did_all()
        play.did_all()
        if play.state.run.stage == BEGINNING:
            play.run(step=5)
    assert attempts == 31


# --- words -------------------------------------------------------------------------------------------


def test_stop_saves_and_stops() -> None:
    """Stop is one order to all nodes; ranks that exit 75 after it end the run with 75 and no attempt begins."""
    play = Play(nodes=2).run()
    issued = play.ask("stop", by="SIGINT")
    assert [(node, order.order, order.word) for node, order in actions(issued, m.GiveOrder)] == [
        ("n0", 2, Word.STOP), ("n1", 2, Word.STOP),
    ]
    assert written(issued, OrderGiven)[0].word == "stop"
    play.end_rest(75)
    end = finish(play)
    assert end.exit_code == 75 and end.error["name"] == "run.stopped_on_request" and end.reason == "stopped on request"


def test_stop_is_bounded_by_the_grace_and_by_asking_twice() -> None:
    """What has not stopped after `grace_s` is killed; asked again, to do it at once, at once; both are not clean."""
    play = Play(nodes=1).run()
    play.ask("stop")
    assert not actions(play.wait(29), m.EndWorkers) and actions(play.wait(2), m.EndWorkers)
    play.end_rest()
    assert "not cleanly" in finish(play).error["what"]
    play = Play(nodes=1).run()
    play.ask("stop")
    assert actions(play.ask("stop", at_once=True), m.EndWorkers)


def test_a_stop_that_is_said_again_changes_nothing() -> None:
    """Who heard no answer says it again, and the workers save as they were told; nor does `at_once` kill what was never
    asked to stop."""
    play = Play(nodes=1).run()
    assert [one.word for _, one in actions(play.ask("stop", at_once=True), m.GiveOrder)] == [Word.STOP]
    assert not any(play.ask("stop", by=by) for by in ("SIGINT", "packtrain stop"))
    play.end_rest(75)
    assert finish(play).reason == "stopped on request"


@pytest.mark.parametrize("when", ["waiting", "beginning", "launching"])
def test_stop_before_the_first_step(when: str) -> None:
    """Asked to stop while nodes are waited for, while it begins or before GO, a run ends with 75 and begins nothing."""
    play = Play(nodes=1, join=when != "waiting")
    if when == "launching":
        play.begun()
        assert play.state.run.stage == LAUNCHING
    play.ask("stop")
    if when == "beginning":
        assert not actions(play.begun(), m.Launch)
    play.end_rest(75)
    play.wait(1)
    assert play.state.run.exit_code == 75 and play.state.run.stage in ("leaving", "finished")


def test_pause_outlives_an_attempt() -> None:
    """A paused run that has to begin again pauses again right after GO; resume goes on."""
    play = Play(nodes=1).run()
    assert actions(play.ask("pause"), m.GiveOrder)[0][1].word == Word.PAUSE
    play.fail()
    play.begun()
    words = [(order.order, order.word) for _, order in actions(play.ready(), m.GiveOrder)]
    assert words == [(1, Word.GO), (2, Word.PAUSE)]
    assert actions(play.ask("resume"), m.GiveOrder)[0][1] == m.GiveOrder(attempt=2, order=3, word=Word.RESUME)


def test_an_order_to_end_is_not_followed_by_another() -> None:
    """Workers that compile hear the last order alone: what is said after a stop or a drain must not take its place."""
    play = Play(nodes=1).run()
    assert actions(play.ask("stop", by="somebody"), m.GiveOrder)[0][1].word == Word.STOP
    for op in ("pause", "resume", "save"):
        assert "the run stops (somebody)" in refusal(play.state, Asked(op=op))
    drained = Play(nodes=2, spares=1).run()
    assert actions(drained.ask("drain", "n1"), m.GiveOrder)[0][1].word == Word.DRAIN
    for op in ("pause", "save", "resume", "pause"):
        assert not actions(drained.ask(op), m.GiveOrder) and not refusal(drained.state, Asked(op=op))
    assert drained.state.run.paused, "of the next attempt"


def test_drain_goes_on_without_the_node() -> None:
    """A drained node's world saves and ends, and the next attempt begins with a spare in its place; uncordon takes it
    back as a spare."""
    play = Play(nodes=2, spares=1).run()
    assert {order.word for _, order in actions(play.ask("drain", "n0"), m.GiveOrder)} == {Word.DRAIN}
    issued = play.end_rest(75)
    assert play.members() == ["n2", "n1"] and "drained" in begin_of(issued).reason
    assert play.state.run.fruitless == 0 and not written(issued, ErrorSeen)
    play.run()
    play.ask("uncordon", "n0")
    assert not play.state.nodes["n0"].draining


def test_a_drain_is_no_stop() -> None:
    """Workers say that they were stopped; the attempt's end names the node and who asked, and warns of nothing. A save
    that failed is told by its own name."""
    play = Play(nodes=2, spares=1).run()
    told = written(play.ask("drain", "n1", by="packtrain drain"), NodeDrained)
    assert told == [NodeDrained(node="n1", by="packtrain drain", in_world=True)]
    assert not written(play.ask("drain", "n1", by="again"), NodeDrained), "said once"
    issued = play.end_rest(75, StoppedOnRequest("stopped after step 5 as ordered, saved as commit 3"))
    assert [one.reason for one in written(issued, AttemptEnded)] == ["node n1 is drained (packtrain drain)"]
    assert not written(issued, ErrorSeen) and play.members() == ["n0", "n2"]
    play.run()
    play.ask("drain", "n0")
    issued = play.end_rest(75, SaveFailed("the disk is full"))
    assert [one.reason for one in written(issued, AttemptEnded)] == ["the disk is full"]


def test_a_drained_spare_is_told() -> None:
    """It has no ranks, so no order is given; the record says so."""
    play = Play(nodes=2, spares=1).run()
    issued = play.ask("drain", "n2", by="me")
    assert written(issued, NodeDrained) == [NodeDrained(node="n2", by="me", in_world=False)]
    assert not actions(issued, m.GiveOrder)


def test_a_drain_that_takes_too_long_is_named() -> None:
    """Why the workers were to stop is told with that they did not; of a stop that is known."""
    play = Play(nodes=2, spares=1).run()
    play.ask("drain", "n1", by="me")
    play.wait(CONFIG.grace_s + 1)
    (ended,) = written(play.end_rest(-9), AttemptEnded)
    assert ended.reason == "node n1 is drained (me); not stopped 30 s after they were asked to (supervise.grace_s)"
    stopped = Play(nodes=2, spares=1).run()
    stopped.ask("stop", by="SIGINT")
    stopped.wait(CONFIG.grace_s + 1)
    (ended,) = written(stopped.end_rest(-9), AttemptEnded)
    assert ended.reason.startswith("not stopped 30 s")


def test_an_agent_that_is_told_to_end_drains_its_node() -> None:
    """Its workers were told by itself; the world ends with it, and goes on elsewhere."""
    play = Play(nodes=2, spares=1).run()
    play.edge("n1", m.NodeLeaves(grace_s=20))
    assert [one.by for one in written(play.issued, NodeDrained)] == ["its agent was told to end"]
    assert not actions(play.issued, m.GiveOrder)
    play.end_rest(75)
    assert play.members() == ["n0", "n2"]


def test_planned_maintenance_drains_before_its_date() -> None:
    """A node that will be away is drained two graces before."""
    play = Play(nodes=2, spares=1).run()
    play.ask("drain", "n0", at_s=1000.0)
    assert not actions(play.wait(1, wall_s=939.0), m.GiveOrder)
    assert actions(play.wait(1, wall_s=940.0), m.GiveOrder)


def test_save_replace_and_cordon() -> None:
    """Save is an order; replace stops for a spare; cordon holds from the next attempt on."""
    play = Play(nodes=2, spares=1).run()
    assert actions(play.ask("save"), m.GiveOrder)[0][1].word == Word.SAVE
    assert actions(play.ask("replace", "n0"), m.GiveOrder)[0][1].word == Word.STOP
    play.end_rest(75)
    assert play.members() == ["n2", "n1"]
    play.begun()
    play.did_all()
    play.ready()
    assert written(play.ask("cordon", "n1"), NodeCordoned)[0].node == "n1" and play.state.run.stage == RUNNING
    play.progress(9)
    play.fail()
    assert play.members() == ["n2", "n0"]


def test_words_that_cannot_be_obeyed_are_refused() -> None:
    """Each refusal says why: unknown words and nodes, no spare, no world left, nothing running."""
    play = Play(nodes=2).run()
    for word, why in (
        (Asked(op="dance"), "no such word"), (Asked(op="drain", node="x"), "no such node"),
        (Asked(op="replace", node="n0"), "no spare"), (Asked(op="cordon", node="n0"), "no world"),
        (Asked(op="save"), ""), (Asked(op="stop"), ""),
    ):
        assert (why in refusal(play.state, word)) if why else not refusal(play.state, word)
    assert "nothing runs" in refusal(Play(nodes=2).state, Asked(op="save"))
