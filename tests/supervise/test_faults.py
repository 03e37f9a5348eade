"""Faults on purpose: which are allowed, whom they strike, that each is written down first, how an agent does them."""

from __future__ import annotations

import os
import signal

import msgspec
import pytest

from packtrain.core.breaking import NO_FAULT, parse_fault
from packtrain.core.contract import Place
from packtrain.core.fake import FakeProcess
from packtrain.core.records import FaultInjected, FaultMissed
from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.events import BreakAsked, Die, Write
from packtrain.supervise.faults import COORDINATOR, KINDS, OF_RANKS, WORKER, refusal, told
from packtrain.supervise.messages import Break, CarrierEnded, Did, Pulse
from tests.supervise.fake_agent import HOME, JOB, RUN, Node, launch
from tests.supervise.played import CONFIG, Play, actions, owns, written

ALLOWED = msgspec.structs.replace(CONFIG, allow_faults=True)
JOB_ALLOWED = msgspec.structs.replace(
    JOB, supervise=msgspec.structs.replace(JOB.supervise, allow_faults=True)
)


def play(**setup: object) -> Play:
    """Two nodes of two ranks, and a spare."""
    return Play(nodes=2, procs=2, spares=1, **{"supervise": ALLOWED, **setup})  # type: ignore[arg-type]


# --- what is allowed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", KINDS)
def test_nothing_is_broken_where_it_is_not_allowed(fault: str) -> None:
    """One error that names the setting; and an event that came all the same leads to nothing."""
    run = play(supervise=CONFIG).run()
    error = refusal(run.state, BreakAsked(fault=fault))
    assert error is not None and error.name == "run.faults_forbidden" and "allow_faults=true" in error.fix
    assert not run.happened(BreakAsked(fault=fault))


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (BreakAsked(fault="burn"), "no such fault: burn; there are kill, stop"),
        (BreakAsked(fault="kil-agent"), "no such fault: kil-agent; did you mean kill-agent? there are kill, stop"),
        (BreakAsked(fault="kill", seconds=3.0), "kill lasts no time"),
        (BreakAsked(fault="cut", seconds=1e9), "--for takes up to"),
        (BreakAsked(fault="kill", factor=2.0), "kill has no factor"),
        (BreakAsked(fault="slow", factor=0.5), "--factor takes 1 to"),
        (BreakAsked(fault="corrupt", rank=0), "corrupt strikes no rank"),
        (BreakAsked(fault="kill", node="n9"), "no such node: n9; there are n0, n1, n2"),
        (BreakAsked(fault="kill", rank=7), "no such rank: 7; there are 4"),
        (BreakAsked(fault="kill", node="n2"), "no rank runs on n2"),
        (BreakAsked(fault="kill", node="n0", rank=3), "rank 3 runs on n1, not on n0"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: BreakAsked, what: str) -> None:
    """Each with one message that says why."""
    error = refusal(play().run().state, asked)
    assert error is not None and error.name == "usage" and what in error.what


def test_nothing_runs() -> None:
    """Workers and carriers cannot be broken before they run; a node can."""
    waiting = play(join=False)
    waiting.join("n0")
    for fault in ("kill", "nan", "kill-carrier"):
        error = refusal(waiting.state, BreakAsked(fault=fault))
        assert error is not None and "nothing runs now" in error.what
    assert refusal(waiting.state, BreakAsked(fault="kill-agent", node="n0")) is None
    assert "none named" in str(refusal(waiting.state, BreakAsked(fault="kill-agent")))


@pytest.mark.parametrize("fault", KINDS)
def test_a_program_of_anybody_gets_what_signals_can_do(fault: str) -> None:
    """What needs its cooperation is refused by name, and what can be done is named."""
    error = refusal(play(plain=True).run().state, BreakAsked(fault=fault))
    if KINDS[fault].by == WORKER:
        assert error is not None and f"{fault} needs" in error.what and "kill, stop, segfault" in error.what
    else:
        assert error is None


# --- whom it strikes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "node", "rank"),
    [
        (BreakAsked(fault="kill"), "n1", 3), (BreakAsked(fault="kill", rank=0), "n0", 0),
        (BreakAsked(fault="kill", node="n1"), "n1", 2), (BreakAsked(fault="kill-agent"), "n1", -1),
        (BreakAsked(fault="kill-agent", rank=1), "n0", -1), (BreakAsked(fault="cut", node="n2"), "n2", -1),
        (BreakAsked(fault="corrupt"), "n1", -1),
    ],
)
def test_whom_it_strikes(asked: BreakAsked, node: str, rank: int) -> None:
    """Who is named; otherwise the last rank, or its node."""
    ((struck, action),) = actions(play().run().happened(asked), Break)
    assert (struck, action.rank, action.fault) == (node, rank, asked.fault)


@pytest.mark.parametrize("fault", KINDS)
def test_it_is_written_down_before_it_is_done(fault: str) -> None:
    """The record comes first, with how long and how much; the action after it says the same."""
    run = play().run()
    issued = run.happened(BreakAsked(fault=fault, by="me"))
    first, second = issued
    kind = KINDS[fault]
    assert isinstance(first.own, Write) and isinstance(first.own.record, FaultInjected)
    record = first.own.record
    assert (record.fault, record.attempt, record.by) == (fault, 1, "me")
    assert (record.seconds, record.factor) == (kind.seconds, kind.factor)
    if kind.by == COORDINATOR:
        assert second.own == Die() and (record.node, record.rank) == ("", -1)
    else:
        assert second.action == Break(
            attempt=1, fault=fault, rank=record.rank, seconds=kind.seconds, factor=kind.factor
        )
        assert (record.rank >= 0) == (kind.by in OF_RANKS) and second.node == record.node
    assert fault in told(run.state, BreakAsked(fault=fault))


def test_what_could_not_be_broken_is_written_down() -> None:
    """The agent says why; what was done leaves no second record."""
    run = play().run()
    ((node, _),) = actions(run.happened(BreakAsked(fault="corrupt")), Break)
    (issued,) = [one for one in run.state.pending.values() if isinstance(one.action, Break)]
    issued = run.edge(node, m.Did(id=issued.id, error="there is no checkpoint yet"))  # type: ignore[assignment]
    assert written(issued, FaultMissed) == [  # type: ignore[arg-type]
        FaultMissed(fault="corrupt", node=node, rank=-1, why="there is no checkpoint yet")
    ]
    run.happened(BreakAsked(fault="kill"))
    assert not written(run.did_all(), FaultMissed)


def test_a_coordinator_dies_once() -> None:
    """What it was to do when it died is not done by the next one."""
    run = play().run()
    assert owns(run.happened(BreakAsked(fault="kill-coordinator")), Die)
    assert not [one for one in run.state.pending.values() if isinstance(one.own, Die)]


# --- the agent -----------------------------------------------------------------------------------------


def node(**options: object) -> Node:
    """A node with rank 0."""
    made = Node(**{"job": JOB_ALLOWED, **options})  # type: ignore[arg-type]
    made.join()
    made.do(launch())
    return made


def freezing(process: FakeProcess) -> None:
    """Takes note of a SIGSTOP."""
    process.catches.add(signal.SIGSTOP)


def did(one: Node, action: Break) -> str:
    id = one.do(action)
    (told,) = [event for event in one.events(Did) if event.id == id]
    return told.error


def broken(fault: str, rank: int = 0, attempt: int = 1, **more: float) -> Break:
    return Break(attempt=attempt, fault=fault, rank=rank, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "status"), [("kill", -signal.SIGKILL), ("segfault", -signal.SIGSEGV), ("stop", None)]
)
def test_a_signal_reaches_one_worker(fault: str, status: int | None) -> None:
    """That one, as it is."""
    one = node(programs={"worker": freezing})
    (worker,) = one.children("worker")
    assert did(one, broken(fault)) == ""
    assert worker.poll() == status and (signal.SIGSTOP in worker.signals) == (fault == "stop")


def test_who_takes_part_finds_an_order() -> None:
    """In the file that the environment of its process names, begun anew with each attempt."""
    one = node()
    place = Place.from_env(one.children("worker")[0].env)
    assert place.faults == f"{HOME}/faults-0.json"
    assert parse_fault(one.platform.read(place.faults)) == NO_FAULT
    assert did(one, broken("slow", seconds=9.0, factor=2.0)) == ""
    order = parse_fault(one.platform.read(place.faults))
    assert order is not None and order.fault == "slow" and order.factor == 2.0
    assert 8 * NS < order.until_ns - one.platform.boot_ns() <= 9 * NS
    one.do(launch(attempt=2))
    one.pass_s(1.0)
    assert parse_fault(one.platform.read(place.faults)) == NO_FAULT


def test_the_carrier_is_told_how_ill_its_disk_is() -> None:
    """In a file that its command names."""
    one = node()
    (carrier,) = one.children("carrier")
    assert carrier.argv[carrier.argv.index("--faults") + 1] == f"{HOME}/faults-disk.json"
    assert did(one, broken("disk-full", rank=-1, seconds=5.0)) == ""
    order = parse_fault(one.platform.read(f"{HOME}/faults-disk.json"))
    assert order is not None and order.fault == "disk-full"


def test_where_it_is_not_allowed_nothing_looks_and_nothing_is_done() -> None:
    """Neither worker nor carrier has a file to look at, and an agent obeys no such action."""
    one = node(job=JOB)
    assert not Place.from_env(one.children("worker")[0].env).faults
    assert "--faults" not in one.children("carrier")[0].argv
    for fault in KINDS:
        assert "does not allow" in did(one, broken(fault))
    assert one.children("worker")[0].poll() is None and not one.processes.killed


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (broken("kill", rank=5), "rank 5 does not run here"), (broken("nan", rank=5), "rank 5 does not run here"),
        (broken("kill", attempt=7), "that attempt does not run here"), (broken("burn"), "no such fault here"),
        (broken("corrupt", rank=-1), "there is no checkpoint yet"),
    ],
)
def test_what_cannot_be_broken_is_said(action: Break, why: str) -> None:
    """Why, in one sentence."""
    one = node()
    one.platform.mkdir(f"{RUN}/commits")
    assert why in did(one, action)


def test_a_killed_carrier_comes_again() -> None:
    """As one that died by itself."""
    one = node()
    assert did(one, broken("kill-carrier", rank=-1)) == ""
    one.pass_s(2.0)
    assert len(one.children("carrier")) == 2 and len(one.events(CarrierEnded)) == 1


@pytest.mark.parametrize(("fault", "least", "most"), [("cut", 0, 0), ("flap", 2, 4)])
def test_a_cut_agent_says_nothing_and_comes_back(fault: str, least: int, most: int) -> None:
    """For so long no message passes (every other second of it, where it flaps); the workers go on."""
    one = node()
    one.do(broken(fault, rank=-1, seconds=6.0))
    one.link.sent.clear()
    one.pass_s(5.5)
    assert least <= len([said for said in one.link.sent if isinstance(said, Pulse)]) <= most
    one.pass_s(8.0)
    assert [said for said in one.link.sent if isinstance(said, Pulse | m.Hello)]
    assert one.children("worker")[0].poll() is None


def test_a_cut_agent_hears_nothing() -> None:
    """What is sent to it meanwhile is lost, as on a wire that is cut."""
    one = node()
    one.do(broken("cut", rank=-1, seconds=6.0))
    one.do(broken("kill"))
    one.pass_s(1.0)
    assert one.children("worker")[0].poll() is None


def test_an_agent_kills_itself() -> None:
    """With SIGKILL, and says nothing before it."""
    one = node()
    id = one.do(broken("kill-agent", rank=-1))
    assert one.processes.killed == [os.getpid()] and id not in [event.id for event in one.events(Did)]
