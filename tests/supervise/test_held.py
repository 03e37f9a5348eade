"""A run of several nodes begins from memory: who is asked, for how long, what is taken, where it goes."""

from __future__ import annotations

import pathlib

import msgspec
import pytest

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.slots import Held
from packtrain.core.platform import LocalPlatform
from packtrain.monitor.fold import Facts
from packtrain.supervise import messages as m
from packtrain.supervise.beginning import Beginnings
from packtrain.supervise.coordinator import setup_of
from packtrain.supervise.events import Begin, Done, Opened
from packtrain.supervise.held import taken
from packtrain.supervise.job import Job
from packtrain.supervise.policy import decide
from packtrain.supervise.state import WAITING, Node, State, evolve
from tests.supervise.played import Play, actions, begin_of, owns

WRITERS = ("r00000", "r00001")
BEGUN = Commit(number=1, kind="begin", attempt=1, step=-1, parent=0, nonce="n", writers=WRITERS)


def slot(node: str, rank: int, step: int = 7, own: bool = True, begin: str = "n", attempt: int = 1) -> Held:
    return Held(
        begin=begin, attempt=attempt, step=step, writer=WRITERS[rank], node=node, sha256=f"{rank}.{step}", own=own
    )


def text(*helds: Held) -> str:
    return msgspec.json.encode(helds).decode()


def ended(**options: bool) -> Play:
    """Two nodes and a spare whose first attempt has just ended, so that the next one is due."""
    play = Play(nodes=2, spares=1, memory=options.pop("memory", True), **options).run()
    play.fail()
    return play


def done(play: Play) -> list:
    """The coordinator, and both nodes that run, do all that they were asked to; n2 does nothing."""
    found = []
    for one in list(play.state.pending.values()):
        if one.own is not None:
            found += play.happened(Done(id=one.id))
        elif one.node != "n2" and not isinstance(one.action, m.TellHeld):
            found += play.edge(one.node, m.Did(id=one.id))
    return found


def answer(play: Play, node: str, data: str = "[]", error: str = "") -> list:
    id = next(
        one.id for one in reversed(play.state.pending.values())
        if one.node == node and isinstance(one.action, m.TellHeld)
    )
    return play.edge(node, m.Did(id=id, data=data, error=error))


# --- who is asked, and for how long ------------------------------------------------------------------


def test_every_free_node_is_asked_and_the_last_answer_begins() -> None:
    """When an attempt has ended each node, the spare too, is asked what it holds; the next begins with the last answer,
    not before, and what was told is there when it does and forgotten once it has begun."""
    play = ended()
    assert [node for node, _ in actions(play.issued, m.TellHeld)] == ["n0", "n1", "n2"]
    assert not owns(answer(play, "n0", text(slot("n0", 0))), Begin) and not owns(play.wait(5), Begin)
    assert not owns(answer(play, "n1", text(slot("n1", 1))), Begin)
    assert begin_of(answer(play, "n2")).memory
    assert play.state.nodes["n1"].held == text(slot("n1", 1))
    launched = actions(play.begun(7, memory=True, restore="3:d", memory_from={"n1": {"r00001": "n0"}}), m.Launch)
    assert [(node, one.memory, one.restore, one.memory_from) for node, one in launched] == [
        ("n0", True, "3:d", {}), ("n1", True, "3:d", {"r00001": "n0"})
    ]
    assert all(node.held is None for node in play.state.nodes.values())


def test_a_node_that_does_not_tell_is_waited_for_six_seconds() -> None:
    """One that is heard and does not answer, or whose look failed, holds nothing; the attempt begins without it."""
    play = ended()
    answer(play, "n0", text(slot("n0", 0)))
    answer(play, "n1", error="what is in memory cannot be told")
    assert not owns(play.wait(5.5), Begin)
    assert begin_of(play.wait(0.5)).memory
    assert [play.state.nodes[name].held for name in ("n0", "n1", "n2")] == [text(slot("n0", 0)), "", None]


@pytest.mark.parametrize("late", [True, False])
def test_an_answer_that_comes_too_late_counts_for_nothing(late: bool) -> None:
    """What a node told of the last attempt while the next one runs is not taken for the one after that; it is asked
    again, whether it has answered by then or not."""
    play = ended()
    answer(play, "n0")
    answer(play, "n1")
    play.wait(6)
    play.begun(7)
    if late:
        answer(play, "n2", text(slot("n2", 0)))
    assert play.state.nodes["n2"].held is None
    done(play)
    play.ready()
    play.end(0, 1)
    play.end(1, -9)
    issued = [one for _ in range(3) for one in done(play)]
    assert [node for node, _ in actions(issued, m.TellHeld)] == ["n0", "n1", "n2"]


def test_a_lost_node_is_not_waited_for_and_a_new_agent_is_asked_anew() -> None:
    """Silence ends the wait for a node; an agent that took another's place is asked itself."""
    play = ended()
    answer(play, "n0")
    answer(play, "n1", text(slot("n1", 1)))
    assert [node for node, _ in actions(play.join("n1", "b"), m.TellHeld)] == ["n1"]
    assert play.state.nodes["n1"].held is None
    begin_of(answer(play, "n1") + play.join("n2", "b", attempt=9))


@pytest.mark.parametrize("why", ["first", "none kept", "distrusted", "back"])
def test_nobody_is_asked_where_nothing_may_be_taken(why: str) -> None:
    """Not before the first attempt of a run, not where workers keep nothing in memory, not after memory failed, not
    when the next attempt goes back: it begins at once."""
    play = Play(nodes=1, join=False, memory=why != "none kept")
    if why != "first":
        run = msgspec.structs.replace(play.state.run, attempt=3, memory=why != "distrusted", back=int(why == "back"))
        play.state = msgspec.structs.replace(play.state, run=run)
    issued = play.join("n0")
    assert begin_of(issued) and not actions(issued, m.TellHeld)


def test_nodes_are_asked_while_others_are_waited_for() -> None:
    """Where too few nodes are there, those that are have told by the time the last one comes."""
    play = Play(nodes=2, join=False, memory=True)
    play.happened(Opened(term=1, setup=play.setup, attempt=4))
    play.state = msgspec.structs.replace(play.state, run=msgspec.structs.replace(play.state.run, attempt=4))
    assert actions(play.join("n0"), m.TellHeld)
    answer(play, "n0")
    play.wait(3)
    assert [node for node, _ in actions(play.join("n1"), m.TellHeld)] == ["n1"]
    assert begin_of(answer(play, "n1"))


def test_a_stop_waits_for_no_answer() -> None:
    """Asked to stop meanwhile the run ends at once."""
    play = ended()
    assert [node for node, _ in actions(play.ask("stop"), m.Leave)] == ["n0", "n1", "n2"]


# --- what is taken, and where it goes ----------------------------------------------------------------


def nodes(*names: str, **held: str) -> dict[str, Node]:
    """In their places; those that are not named and hold something wait as spares."""
    return {
        name: Node(slot=names.index(name) if name in names else -1, held=held.get(name))
        for name in dict.fromkeys((*held, *names))
    }


def test_what_lies_where_its_rank_is_does_not_move() -> None:
    """The same nodes take the newest whole step, newer than the disk, and nothing moves."""
    found = taken(
        nodes("n0", "n1", n0=text(slot("n0", 0), slot("n0", 0, 8)), n1=text(slot("n1", 1))), WRITERS, BEGUN, 5
    )
    assert found.memory is not None and found.memory[:2] == (1, 7) and not found.moves
    assert found.note == "step 7 from memory: 2 steps newer than the newest on disk"


def test_a_lost_node_s_slot_comes_from_its_peer() -> None:
    """A spare that took the place fetches what a peer kept, from there; a peer that takes the place fetches from
    itself, which puts it where its workers look."""
    kept = text(slot("n0", 0), slot("n0", 1, own=False))
    assert taken(nodes("n0", "n2", n0=kept, n2="[]"), WRITERS, BEGUN, -1).moves == {"n2": {"r00001": "n0"}}
    assert taken(nodes("n2", "n0", n0=kept, n2="[]"), WRITERS, BEGUN, -1).moves == {
        "n2": {"r00000": "n0"}, "n0": {"r00001": "n0"}
    }


def test_a_smaller_world_takes_all_slots() -> None:
    """Slots of ranks that are no more stay with the node that has them."""
    kept = text(slot("n0", 0), slot("n0", 1, own=False))
    assert taken(nodes("n0", n0=kept), WRITERS[:1], BEGUN, -1).moves == {"n0": {"r00001": "n0"}}


def test_only_nodes_that_take_part_count_and_each_for_itself() -> None:
    """A slot on a node that waits cannot be had; what a node says of another one, or no list at all, is nothing. Why
    nothing is taken is said where something was there."""
    told = nodes("n0", "n1", n0=text(slot("n0", 0), slot("n1", 1)), n1="{]", n2=text(slot("n2", 1)))
    found = taken(told, WRITERS, BEGUN, -1)
    assert found.memory is None and "nobody has r00001 of step 7" in found.note
    assert taken(nodes("n0", "n1"), WRITERS, BEGUN, -1).note == ""


# --- its record --------------------------------------------------------------------------------------


class Begun:
    """A run of two nodes whose first attempt holds step 7 in memory."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.platform = LocalPlatform()
        job = Job(name="r", run_folder=str(folder), worker=(), carrier=(), version="t", nodes=2)
        self.log = CommitLog(self.platform, f"{folder}/commits")
        self.log.probe()
        self.first = self.log.begin(None, WRITERS, "n0")
        term = self.log.take_term("c", "d").term
        self.beginnings = Beginnings(self.platform, job, self.log, term)

    def again(self, back: int = 0, memory: bool = True) -> tuple:
        nonce = self.first.nonce
        state = State(nodes=nodes(
            "n0", "n1", n0=text(slot("n0", 0, begin=nonce)), n1=text(slot("n1", 1, begin=nonce))
        ))
        asked = Begin(reason="t", writers=WRITERS, node="n0", back=back, memory=memory)
        return self.beginnings.begin(3, asked, state, Facts())


def test_the_record_says_what_is_restored(tmp_path: pathlib.Path) -> None:
    """`begin` names attempt, step and digest; workers get its number with that digest; the journal gets the
    reason. An attempt that left nothing of its own is begun again from the same."""
    run = Begun(tmp_path)
    begun, record = run.again()
    assert record.memory is not None and record.memory[:2] == (1, 7) and record.step == 7
    assert begun.memory and begun.step == 7 and begun.restore == f"{record.number}:{record.memory[2]}"
    assert begun.note == "step 7 from memory: nothing is on disk yet" and not begun.away
    again, record_again = run.again()
    assert record_again.memory == record.memory and again.restore == f"{record_again.number}:{record.memory[2]}"


def test_an_attempt_has_the_spec_that_was_the_newest_as_it_began(tmp_path: pathlib.Path) -> None:
    """Whether or not anybody told the coordinator of it; what is no spec, or is being written, does not count."""
    run = Begun(tmp_path)
    assert run.again()[0].spec == 0
    (tmp_path / "spec").mkdir()
    for name, newest in (("0001", 1), ("0002.toml.new-1f", 1), ("copy", 1), ("0009", 9), ("10000", 10000)):
        (tmp_path / "spec" / (name if "." in name else f"{name}.toml")).write_text("")
        assert run.again()[0].spec == newest, name


@pytest.mark.parametrize("options", [{"memory": False}, {"back": 1}])
def test_nothing_is_taken_where_it_may_not_be(options: dict, tmp_path: pathlib.Path) -> None:
    """After damage in memory, and on the way back, the disk alone counts."""
    begun, record = Begun(tmp_path).again(**options)
    assert record.memory is None and not begun.memory and begun.restore == "" and begun.note == ""


def test_a_job_without_copies_in_memory_is_not_asked() -> None:
    """Programs of anybody, and runs that keep nothing in memory, have no such wait."""
    job = Job(name="r", run_folder="/r", worker=(), carrier=(), version="t", nodes=2)
    off = CheckpointConfig(memory_every_steps=0)
    assert setup_of(job).memory
    assert not setup_of(msgspec.structs.replace(job, plain=True)).memory
    assert not setup_of(msgspec.structs.replace(job, checkpoint=off)).memory


def test_what_was_told_survives_a_coordinator() -> None:
    """A coordinator that goes on from the log knows what was told, and asks nobody twice."""
    play = ended()
    answer(play, "n0", text(slot("n0", 0)))
    state = play.state
    records = decide(state, Opened(ns=play.ns, term=2, setup=play.setup))
    for record in records:
        state = evolve(state, record)
    assert state.run.stage == WAITING and state.nodes["n0"].held == text(slot("n0", 0))
    assert sum(isinstance(one.action, m.TellHeld) for one in state.pending.values()) == 2
