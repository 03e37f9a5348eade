"""The agent in virtual time: what it starts, tells, obeys once, and how it ends."""

from __future__ import annotations

import signal
import sys

import msgspec

from packtrain.core.contract import Beat, Order, Place, Ready, Word, parse_order
from packtrain.core.fake import fail
from packtrain.core.journal import Journal
from packtrain.core.records import ErrorSeen
from packtrain.core.units import NS
from packtrain.supervise import keys
from packtrain.supervise.agent import ALONE_NS, DRAIN_ID, LAST_WORDS_S
from packtrain.supervise.keys import Address
from packtrain.supervise.messages import (
    CarrierEnded,
    CarrierUp,
    Did,
    EndAttempt,
    EndWorkers,
    GiveOrder,
    Hello,
    Leave,
    NodeLeaves,
    Outdated,
    Peers,
    Pulse,
    RankEnded,
    RankHeard,
    RankPhase,
    RankReady,
    RankSilent,
    TakeStacks,
    TellHeld,
)
from packtrain.supervise.processes import MARK, Marked, end_leftovers
from packtrain.supervise.ranks import KNOWN_MIN
from tests.supervise.fake_agent import HOME, JOB, RUN, Node, launch, stubborn


def started(ranks: tuple[int, ...] = (0,), **options: object) -> Node:
    node = Node(**options)  # type: ignore[arg-type]
    node.join()
    node.do(launch(ranks=ranks))
    return node


def control(node: Node) -> Order | None:
    return parse_order(node.platform.read(f"{HOME}/control.json"))


def test_it_says_hello_until_it_is_welcome_and_then_pulses() -> None:
    """Each second, with the highest term it has seen."""
    node = Node()
    node.pass_s(3.5)
    assert node.link.calls == [Address(address="tcp://c:1", server_key="k", term=1)]
    assert len([m for m in node.link.sent if isinstance(m, Hello)]) == 4
    node.join(term=4)
    node.link.sent.clear()
    node.pass_s(3.5)
    assert {type(m) for m in node.link.sent} == {Pulse} and len(node.link.sent) in (3, 4)


def test_hello_waits_for_the_connection_and_no_longer() -> None:
    """What is said before it is made is lost: it is said again at each look until it leaves, and then once a second."""
    node = Node()
    node.link.refuses = 5
    node.pass_s(0.3)
    assert node.link.refuses == 0 and [type(message) for message in node.link.sent] == [Hello]
    node.pass_s(1.0)
    assert [type(message) for message in node.link.sent] == [Hello, Hello]


def test_what_is_refused_later_comes_again_in_its_own_time() -> None:
    """A link that takes no more is not pressed: pulses and edges go on at their pace."""
    node = Node()
    node.join()
    node.link.refuses = 1000
    node.pass_s(3.0)
    assert 3 <= 1000 - node.link.refuses <= 8


def test_a_launch_starts_carrier_and_workers_with_what_they_need() -> None:
    """The environment of each rank, nothing of another packtrain's, the mark in every child, no order in force."""
    node = started(ranks=(2, 3))
    node.do(GiveOrder(attempt=1, order=1, word=Word.SAVE))
    first, second = node.children("worker")
    assert node.events(Did) == [Did(id=1), Did(id=2)]
    place = Place.from_env(second.env)
    assert (place.run, place.attempt, place.rank, place.local_rank, place.world_size) == (RUN, 1, 3, 1, 2)
    assert (place.master_addr, place.master_port, place.fresh, place.node) == ("host", 123, True, "n0")
    assert first.env["A"] == "1" and "PACKTRAIN_OLD" not in first.env and first.log_path == f"{RUN}/logs/0001/2.log"
    (carrier,) = node.children("carrier")
    assert carrier.argv[1:7] == ["--run", RUN, "--socket", f"{HOME}/carrier", "--begin", "1"]
    assert all(child.env[MARK].startswith("run/n0/") for child in (first, second, carrier))
    assert "PACKTRAIN_ATTEMPT" not in carrier.env
    assert control(node) == Order(1, Word.SAVE)


def test_what_is_restored_reaches_the_workers() -> None:
    """commit:digest as the coordinator chose it, never fresh besides; and the number of the spec that all read."""
    node = Node()
    node.join()
    node.do(launch(restore="41:abc", spec=3))
    place = Place.from_env(node.children("worker")[0].env)
    assert place.restore == (41, "abc") and not place.fresh and place.spec == 3


def test_an_action_is_done_once() -> None:
    """Repeated ids start nothing, whatever they say; they are answered."""
    node = started()
    for _ in range(3):
        node.do(launch(), id=1)
        node.do(launch(attempt=2), id=1)
    assert len(node.children("worker")) == 1 and node.events(Did)[0] == Did(id=1)


def test_a_lower_term_is_refused() -> None:
    """It is told so, and nothing of what it asks is done."""
    node = Node()
    node.join(term=5)
    node.do(launch(), term=4)
    assert not node.children("worker")
    assert [m for m in node.link.sent if isinstance(m, Outdated)] == [Outdated(node="n0", term=5)]


def test_a_new_incarnation_remembers_the_term() -> None:
    """Also across its own death: the file in its home says so."""
    node = Node()
    node.join(term=5)
    node.agent = node.incarnation()
    node.join(term=4)
    node.do(launch(), term=4)
    assert not node.children("worker")


def test_beats_become_edges() -> None:
    """A phase when its kind changes, silence and its end; beats of another attempt or rank are nobody's."""
    node = started()
    for step in range(20):
        node.beat("step", step)
    node.beat("save", 19)
    node.beat("step", 100, attempt=9)
    node.beat("step", 100, rank=5)
    node.beat("step", 20)
    node.pass_s(3.2)
    node.beat("step", 21)
    phases = [(e.phase, e.step) for e in node.events(RankPhase)]
    assert phases == [("steps", 0), ("save", 19), ("steps", 20)]
    assert [round(e.seconds) for e in node.events(RankSilent)] == [3]
    assert [e.step for e in node.events(RankHeard)] == [21]
    assert [m for m in node.link.sent if isinstance(m, Pulse)][-1].attempt == 1


def test_the_end_of_a_worker_is_told_with_its_reason() -> None:
    """Status, last step, the last error it journalled in this attempt, the end of its log."""
    node = Node()
    old = Journal(node.platform, f"{RUN}/journal")
    old.write(ErrorSeen(severity="error", name="old.error", what="of an earlier attempt"), durable=True)
    node.join()
    node.do(launch())
    node.beat("step", 7)
    (worker,) = node.children("worker")
    worker.print("Traceback: boom\n")
    mine = Journal(worker.platform, f"{RUN}/journal")
    mine.write(ErrorSeen(severity="error", name="guard.rollback", what="w", where="x", fix="y"), durable=True)
    mine.write(ErrorSeen(severity="warning", name="some.warning", what="no reason"), durable=True)
    worker.exit(75)
    node.pass_s(0.2)
    error = {"name": "guard.rollback", "what": "w", "where": "x", "fix": "y"}
    assert node.events(RankEnded) == [
        RankEnded(attempt=1, rank=0, status=75, step=7, error=error, tail="Traceback: boom\n")
    ]


def test_an_end_without_a_word_is_told_too() -> None:
    """An error of an earlier attempt is not this one's reason."""
    node = Node()
    Journal(node.platform, f"{RUN}/journal").write(ErrorSeen(severity="error", name="old", what=""), durable=True)
    node.pass_s(1)
    node.join()
    node.do(launch())
    node.children("worker")[0].exit(-9)
    node.pass_s(0.2)
    assert node.events(RankEnded) == [RankEnded(attempt=1, rank=0, status=-9)]


def test_workers_are_ended_with_what_they_started() -> None:
    """SIGKILL to each, and to whatever left its group but has the mark of this attempt; nobody else is touched."""
    node = started(ranks=(0, 1))
    mark = node.children("worker")[0].env[MARK]
    node.processes.strays = [Marked(77, mark, "1"), Marked(78, mark, ""), Marked(79, mark, "2")]
    node.do(EndWorkers(attempt=1, reason="hung"))
    node.pass_s(0.2)
    assert [(e.rank, e.status) for e in node.events(RankEnded)] == [(0, -9), (1, -9)]
    assert node.processes.killed == [77] and node.children("carrier")[0].poll() is None
    node.do(EndWorkers(attempt=1, reason="again"))
    node.do(EndWorkers(attempt=9, reason="never here"))
    assert [did.error for did in node.events(Did)] == ["", "", "", ""]


def test_an_attempt_ends_when_its_carrier_has_finished_or_must() -> None:
    """SIGTERM, then SIGKILL at its bound; only then the action is done."""
    node = started(programs={"carrier": stubborn})
    node.children("worker")[0].exit(0)
    node.do(EndAttempt(attempt=1, carrier_s=10.0))
    (carrier,) = node.children("carrier")
    node.pass_s(9)
    assert carrier.signals == [signal.SIGTERM] and len(node.events(Did)) == 1
    node.pass_s(2)
    node.join()
    assert carrier.poll() == -9 and node.events(Did)[1:] == [Did(id=2)]
    node.do(EndAttempt(attempt=1))
    node.do(launch(attempt=2))
    assert [did.error for did in node.events(Did)] == ["", "", "", ""] and len(node.children("worker")) == 2


def test_a_later_attempt_ends_an_earlier_one_first() -> None:
    """Its coordinator may not know of those workers: they are killed, their ends told, then the new ones start. An
    earlier attempt, or the same again, starts nothing."""
    node = started()
    node.do(launch(attempt=3))
    node.pass_s(0.2)
    assert [child.poll() for child in node.children("worker")] == [-9, None]
    assert [(e.attempt, e.status) for e in node.events(RankEnded)] == [(1, -9)]
    node.do(launch(attempt=2))
    node.do(launch(attempt=3))
    errors = [did.error for did in node.events(Did)]
    assert errors == ["", "", "another attempt begins, or began, here", "attempt 3 has begun here already"]
    assert len(node.children("worker")) == 2


def test_a_carrier_may_go_ahead_of_the_workers() -> None:
    """A launch without ranks starts it alone; the ranks of the same attempt find it running."""
    node = Node()
    node.join()
    node.do(launch(ranks=()))
    assert not node.children("worker") and len(node.children("carrier")) == 1
    node.do(launch(ranks=(0, 1)))
    assert len(node.children("worker")) == 2 and len(node.children("carrier")) == 1


def test_ready_is_told_once() -> None:
    """Said again and again until it may go; another rank's, another attempt's and other facts are told apart."""
    node = started()
    for facts in ({"step": "3"}, {"step": "3"}, {"step": "4"}):
        node.ears.said += [Ready(1, 0, 1, facts), Ready(1, 7, 1, facts), Ready(2, 0, 1, facts)]
        node.pass_s(0.1)
    assert node.events(RankReady) == [
        RankReady(attempt=1, rank=0, facts={"step": "3"}), RankReady(attempt=1, rank=0, facts={"step": "4"})
    ]


def test_a_launch_that_the_machine_refuses_leaves_nothing() -> None:
    """The second worker cannot be started: the first ends, the answer says why."""
    node = Node()
    node.join()
    spawned: list[int] = []

    def refuse(op: str, path: str, n: int) -> object:
        if op == "spawn":
            spawned.append(n)
        return fail(12) if op == "spawn" and len(spawned) == 3 else None

    node.platform.faults = refuse  # type: ignore[assignment]
    node.do(launch(ranks=(0, 1)))
    node.pass_s(0.2)
    assert "cannot begin here" in node.events(Did)[0].error
    assert all(child.poll() is not None for child in node.platform.children)
    node.platform.faults = None
    node.do(launch(attempt=2))
    assert node.events(Did)[1].error == ""


def test_a_carrier_that_ends_is_started_again_later_and_later() -> None:
    """At once, after 1 s, 2 s, 4 s; the worker is not touched; each end is told."""
    node = started(programs={"carrier": 3})
    node.pass_s(7.5)
    assert len(node.children("carrier")) == 5
    assert {e.why for e in node.events(CarrierEnded)} == {"exit code 3"}
    assert node.children("worker")[0].poll() is None


def test_carriers_of_several_nodes_find_each_other() -> None:
    """Where it listens is told once it says so; where the others do is put where it looks."""
    node = started(job=msgspec.structs.replace(JOB, nodes=2))
    node.platform.write_replacing(f"{HOME}/carrier.address", b'{"address": "host:9"}')
    node.pass_s(0.3)
    assert node.events(CarrierUp) == [CarrierUp(attempt=1, address="host:9")]
    node.do(Peers(attempt=1, addresses={"n0": "host:9", "n1": "other:8"}))
    assert node.platform.read_json(f"{HOME}/peers.json") == {"n0": "host:9", "n1": "other:8"}


def test_what_does_not_run_here_is_said() -> None:
    """Orders and questions for another attempt, or before any, are answered with an error."""
    node = Node()
    node.join()
    for action in (
        GiveOrder(attempt=3, order=1, word=Word.STOP), TakeStacks(attempt=3), Peers(attempt=3, addresses={}),
    ):
        node.do(action)
    assert {did.error for did in node.events(Did)} == {"attempt 3 does not run here"}


def test_what_is_held_in_memory_is_told() -> None:
    """Before any attempt, too: a JSON list, or why not."""
    node = Node()
    node.join()
    node.do(TellHeld())
    node.pass_s(0.2)
    node.platform.faults = lambda op, path, n: fail(5) if op == "exists" else None
    node.do(TellHeld())
    node.pass_s(0.2)
    good, bad = node.events(Did)
    assert good == Did(id=1, data="[]") and "cannot be told" in bad.error


def test_without_a_coordinator_the_workers_go_on_and_the_next_one_hears_all() -> None:
    """It calls again after 6 s, then later, and another one at once; what ended meanwhile is told to that one."""
    node = started()
    node.beat("step", 1)
    node.pass_s(20)
    assert [call.address for call in node.link.calls] == ["tcp://c:1"] * 3
    keys.write_address(node.platform, HOME, Address(address="tcp://c:2", server_key="k", term=2))
    node.children("worker")[0].exit(1)
    node.pass_s(1.2)
    assert node.link.calls[-1].address == "tcp://c:2" and len(node.children("worker")) == 1
    assert not node.events(RankEnded)
    node.join(term=2)
    assert [e.status for e in node.events(RankEnded)] == [1]


def test_an_address_of_a_lower_term_is_not_called() -> None:
    """A coordinator that was replaced is not gone back to."""
    node = Node()
    node.join(term=3)
    calls = len(node.link.calls)
    node.pass_s(20)
    assert len(node.link.calls) == calls


def test_nobody_needs_an_agent_alone_for_ten_minutes() -> None:
    """Without a coordinator and without workers it ends itself; with a worker it stays."""
    node = started()
    node.pass_s(ALONE_NS / NS + 60, look_s=1.0)
    assert node.agent.exit_code is None
    node.children("worker")[0].exit(0)
    node.pass_s(ALONE_NS / NS - 5, look_s=1.0)
    assert node.agent.exit_code is None
    node.pass_s(10, look_s=1.0)
    assert node.agent.exit_code == 0


def test_sigterm_drains() -> None:
    """Told, the word DRAIN above every order, nothing new is started; killed at the end of the grace."""
    node = started()
    node.do(GiveOrder(attempt=1, order=4, word=Word.SAVE))
    node.requests.arrive(signal.SIGTERM)
    node.pass_s(0.2)
    assert node.events(NodeLeaves) == [NodeLeaves(grace_s=5.0)]
    assert control(node) == Order(4 + DRAIN_ID, Word.DRAIN)
    node.do(launch(attempt=2))
    assert node.events(Did)[-1].error == "this node goes away"
    node.pass_s(4)
    assert node.agent.exit_code is None
    node.pass_s(1.5)
    assert node.agent.exit_code == 75
    assert all(child.poll() == -9 for child in node.platform.children)


def test_sigterm_with_workers_that_stop_ends_soon() -> None:
    """Their ends are told, the coordinator has a moment for its last words; asked twice it ends at once."""
    node = started()
    node.requests.arrive(signal.SIGTERM)
    node.pass_s(0.2)
    node.children("worker")[0].exit(75)
    node.pass_s(0.2)
    assert [e.status for e in node.events(RankEnded)] == [75] and node.agent.exit_code is None
    node.pass_s(LAST_WORDS_S)
    assert node.agent.exit_code == 75
    twice = started()
    twice.requests.arrive(signal.SIGTERM)
    twice.requests.arrive(signal.SIGINT)
    twice.pass_s(0.2)
    assert twice.agent.exit_code == 75 and twice.children("worker")[0].poll() == -9


def test_standbys_are_started_when_nothing_waits_for_the_processor() -> None:
    """Not while a worker begins or compiles, nor between two attempts; once a few steps are known, or a spare has been
    idle for long."""
    job = msgspec.structs.replace(JOB, worker=(sys.executable, "w.py"), preload=("decimal",))
    node = Node(job, programs={sys.executable: stubborn})

    def warm() -> int:
        return sum("--socket" in child.argv[1:] and child.argv[1] == "-c" for child in node.platform.children)

    node.join()
    node.do(launch())
    node.beat("init", -1)
    node.pass_s(5)
    assert warm() == 0
    node.beat("compile", 0)
    node.pass_s(5)
    assert warm() == 0
    for step in range(KNOWN_MIN + 1):
        node.seq += 1
        node.ears.said.append(Beat(node.seq, 1, 0, 1, "step", step, {"step": step * NS}))
        node.pass_s(0.2)
    assert warm() == 1
    spare = Node(job, programs={sys.executable: stubborn})
    spare.pass_s(29)
    assert not spare.platform.children
    spare.pass_s(2)
    assert len(spare.platform.children) == 1
    spare.requests.arrive(signal.SIGTERM)
    spare.pass_s(LAST_WORDS_S + 0.2)
    assert spare.platform.children[0].poll() == -9


def test_leave_ends_everything() -> None:
    """Done is said on the way out."""
    node = started()
    node.do(Leave(reason="done"))
    assert node.agent.exit_code == 0 and node.events(Did)[-1] == Did(id=2)
    assert all(child.poll() == -9 for child in node.platform.children)


def test_a_control_file_that_cannot_be_written_is_a_signal() -> None:
    """STOP and DRAIN reach the workers as SIGTERM; of other words it is said that they did not."""
    node = started(programs={"worker": stubborn})
    node.platform.faults = lambda op, path, n: fail(28) if op == "create" and "control" in path else None
    node.do(GiveOrder(attempt=1, order=1, word=Word.STOP))
    node.do(GiveOrder(attempt=1, order=2, word=Word.SAVE))
    assert node.children("worker")[0].signals == [signal.SIGTERM]
    errors = [did.error for did in node.events(Did)]
    assert errors[1] == "" and errors[2].startswith(f"{HOME}/control.json: ")


def test_what_an_agent_writes_waits_for_no_disk() -> None:
    """A disk that takes seconds to sync must not make a node look silent: a launch, orders, peers, a higher term."""
    node = Node()
    before = len(node.disk.trace)
    node.join(term=2)
    node.do(launch(), term=2)
    node.do(GiveOrder(attempt=1, order=1, word=Word.GO), term=2)
    node.do(Peers(attempt=1, addresses={}), term=2)
    node.do(EndWorkers(attempt=1, reason=""), term=2)
    node.pass_s(0.2)
    assert len(node.events(Did)) == 4 and node.events(RankEnded)
    assert not [step for step in node.disk.trace[before:] if "fsync" in step[1]]


def test_leftovers_of_another_incarnation_are_ended() -> None:
    """All of them, whatever attempt; its own are not touched; one that does not go is reported and not waited for."""
    node = Node()
    node.processes.strays = [Marked(1, "run/n0/old", "3"), Marked(2, "run/n0/older", ""), Marked(3, "run/n0/me", "")]
    assert end_leftovers(node.platform, node.processes, "run", "n0", "me") == []
    assert node.processes.killed == [1, 2]
    node.processes.strays = [Marked(4, "run/n0/old", "")]
    node.processes.kill = lambda pid: None  # type: ignore[method-assign]
    assert end_leftovers(node.platform, node.processes, "run", "n0", "me") == [4]


def test_time_asleep_is_held_against_nobody() -> None:
    """A machine that slept for an hour: no silence is told for it."""
    node = started()
    node.beat("step", 1)
    node.beat("step", 2)
    node.platform.pause(3600)
    node.pass_s(0.5)
    assert not node.events(RankSilent)
