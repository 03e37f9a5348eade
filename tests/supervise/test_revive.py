"""What died of a run on this machine is started again, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from packtrain.core.fake import FakeDisk, FakePlatform, FakeProcess
from packtrain.core.fake_process import Program
from packtrain.core.records import AgentStarted
from packtrain.core.units import NS
from packtrain.supervise import local
from packtrain.supervise.console import FINISH
from packtrain.supervise.job import Job, write_job
from packtrain.supervise.revive import TRIES_MAX, AgentsHere, CoordinatorHere, Tried, Tries, tried
from tests.supervise.fake_agent import HOME, Node, launch

RUN, BASE = "/runs/small", "/base"
NAMES = ("n0", "n1")


class Machine:
    """A run whose coordinator and agents are scripted. `heard_ns`: when the coordinator last said something."""

    def __init__(self, program: Program | int | None = None) -> None:
        self.started: list[FakeProcess] = []
        self.times: list[float] = []
        self.program = program if program is not None else self.lives
        self.platform = self.process(FakeDisk())
        for folder in (RUN, "/proc", *(f"{BASE}/{name}" for name in ("c", *NAMES))):
            self.platform.mkdir(folder)
        self.live = local.Live(RUN, BASE, self.platform.node(), dict.fromkeys(NAMES, 1))
        self.platform.write_new(f"{RUN}/{local.LIVE}", msgspec.json.encode(self.live))
        job = Job(name="small", run_folder=RUN, worker=(), carrier=(), version="1")
        write_job(self.platform, f"{BASE}/{local.JOB}", job)
        self.heard_ns = 0

    def process(self, disk: FakeDisk) -> FakePlatform:
        return FakePlatform(disk, "here", programs=lambda argv: self._start)

    def _start(self, process: FakeProcess) -> object:
        self.started.append(process)
        self.times.append(round(self.platform.boot_ns() / NS))
        return self.program if isinstance(self.program, int) else self.program(process)

    def lives(self, process: FakeProcess) -> None:
        """Until it is killed; seen in /proc meanwhile."""
        self.platform.mkdir(f"/proc/{process.pid}")
        self.platform.write_replacing(f"/proc/{process.pid}/cmdline", "\0".join(process.argv).encode())

    def kill(self, process: FakeProcess) -> None:
        process.send_signal(9)
        self.platform.unlink(f"/proc/{process.pid}/cmdline")

    def finish(self, exit_code: int, term: int) -> None:
        said = msgspec.json.encode(local.Finish(exit_code=exit_code, term=term))
        self.platform.write_replacing(f"{BASE}/c/{FINISH}", said)

    def agent(self, node: str, platform: FakePlatform | None = None) -> CoordinatorHere:
        platform = platform or self.platform
        return CoordinatorHere(platform, local.Keeper(platform, self.live, {}), node)

    def pass_s(self, seconds: float, *looks: Callable[[int], object]) -> None:
        end_ns = self.platform.boot_ns() + round(seconds * NS)
        while self.platform.boot_ns() < end_ns:
            for look in looks:
                look(self.platform.boot_ns())
            self.platform.pause(0.1)

    def looks(self, *agents: CoordinatorHere) -> list[Callable[[int], object]]:
        return [lambda ns, agent=agent: agent.look(ns, self.heard_ns) for agent in agents]  # type: ignore[misc]


def test_tries_come_later_and_later_and_end() -> None:
    """At once, then after 1, 2, 4 .. 60 s; one that lived for five seconds counts from anew; the last is the last."""
    tries, times, ns = Tries(), list[int](), 0
    while len(times) < 9:
        if tries.due(ns):
            tries.tried(ns)
            times.append(ns // NS)
        ns += NS
    assert times == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    tries.lives(tries.last_ns + 4 * NS)
    assert tries.count == 9
    tries.lives(tries.last_ns + 5 * NS)
    assert tries.count == 0 and tries.due(tries.last_ns)
    for _ in range(TRIES_MAX):
        tries.tried(0)
    assert tries.given_up and not tries.due(10**6 * NS)


# --- a coordinator, by agents -------------------------------------------------------------------------


def test_a_coordinator_that_is_missed_is_started_by_one_agent() -> None:
    """Not before six seconds of silence; once, though two agents miss it; again when that one was heard and died."""
    machine = Machine()
    agents = machine.looks(machine.agent("n0"), machine.agent("n1"))
    machine.pass_s(5, *agents)
    assert not machine.started
    machine.pass_s(30, *agents)
    (first,) = machine.started
    assert first.argv[-2:] == ["--by", "the agent of n0, try 1"] and f"{BASE}/c" in first.argv
    assert tried(machine.platform, machine.live) == Tried("n0", 1, False)
    machine.heard_ns = machine.platform.boot_ns()
    machine.pass_s(2, *agents)
    assert tried(machine.platform, machine.live) == Tried("n0", 0, False)
    machine.kill(first)
    machine.pass_s(8, *agents)
    assert len(machine.started) == 2


def test_an_agent_that_dies_leaves_the_task_to_another() -> None:
    """The lock is the kernel's: it goes with its holder."""
    machine = Machine(1)
    mortal = machine.process(machine.platform.disk)
    machine.pass_s(8, *machine.looks(machine.agent("n0", mortal)))
    second, before = machine.looks(machine.agent("n1")), len(machine.started)
    machine.pass_s(8, *second)
    assert len(machine.started) == before
    mortal.kill()
    machine.pass_s(2, *second)
    assert "the agent of n1, try 1" in machine.started[before].argv


def test_one_that_ends_at_its_start_makes_no_storm() -> None:
    """Ten minutes of it are fifteen tries."""
    machine = Machine(1)
    machine.pass_s(600, *machine.looks(machine.agent("n0"), machine.agent("n1")))
    first = machine.times[0]
    assert [round(time - first) for time in machine.times[:7]] == [0, 1, 3, 7, 15, 31, 63] and len(machine.times) == 15


@pytest.mark.parametrize(
    ("exit_code", "term", "starts"), [(0, 3, 0), (75, 3, 0), (78, 0, 0), (70, 0, 0), (75, 0, 1)]
)
def test_what_has_ended_stays_ended(exit_code: int, term: int, starts: int) -> None:
    """A run that is done, or was stopped, gets no coordinator any more; nor one whose coordinator said that another
    would end as it did. Where the world was in the way it is tried again."""
    machine = Machine()
    machine.finish(exit_code, term)
    machine.pass_s(60, *machine.looks(machine.agent("n0")))
    assert len(machine.started) == starts


def test_an_agent_that_was_stopped_has_missed_nobody() -> None:
    """Silence counts from when it looks again."""
    machine = Machine()
    looks = machine.looks(machine.agent("n0"))
    machine.pass_s(4, *looks)
    machine.platform.pause(100)
    machine.pass_s(5, *looks)
    assert not machine.started
    machine.pass_s(3, *looks)
    assert len(machine.started) == 1


# --- agents, by the coordinator -----------------------------------------------------------------------


def test_agents_that_died_are_started_but_for_those_told_to_leave() -> None:
    """Each once while it lives, under its name, told with how often; and where they run is written down."""
    machine, told = Machine(), list[AgentStarted]()
    here = AgentsHere(machine.platform, RUN, f"{BASE}/c", {})
    asked, refused = list[str](), list[bool]()
    assert here.live is not None
    machine.platform.faults = lambda op, path, count: asked.append(path)
    machine.pass_s(3, lambda ns: told.extend(here.look(ns, {"n1"})), lambda ns: here.write(lambda *_: False))
    assert not [path for path in asked if path.startswith(RUN)], "its disk may hang"
    for _ in range(2):
        here.write(lambda kind, call, then: not refused.append(then(call())))  # type: ignore[func-returns-value]
    assert len(refused) == 1
    (n0,) = machine.started
    assert n0.argv[n0.argv.index("--node") + 1] == "n0" and told == [AgentStarted(node="n0", tries=1)]
    found = local.find(machine.platform, RUN)
    assert found is not None and found.agents == {"n0": n0.pid, "n1": 1} == here.live.agents  # type: ignore[union-attr]
    machine.kill(n0)
    machine.pass_s(3, lambda ns: told.extend(here.look(ns, ())))
    assert [(one.node, one.tries) for one in told] == [("n0", 1), ("n0", 2), ("n1", 1)]
    machine.pass_s(100, lambda ns: here.look(ns, ()))
    assert len(machine.started) == 3 and (here.tries("n0"), here.given_up()) == (0, [])


def test_agents_that_end_at_their_start_are_given_up() -> None:
    """After so many tries, and the last one says so."""
    machine, told = Machine(1), list[AgentStarted]()
    here = AgentsHere(machine.platform, RUN, f"{BASE}/c", {})
    for _ in range(TRIES_MAX + 5):
        told += here.look(machine.platform.boot_ns(), {"n1"})
        machine.platform.pause(61)
    assert len(told) == TRIES_MAX and [one.given_up for one in told[-2:]] == [False, True]
    assert here.given_up() == ["n0"]


def test_agents_of_another_home_are_not_ours() -> None:
    """A coordinator that does not live where the run was started here starts nobody."""
    machine = Machine()
    here = AgentsHere(machine.platform, RUN, "/elsewhere/c", {})
    machine.pass_s(5, lambda ns: here.look(ns, ()))
    assert not machine.started and here.live is None


# --- an agent that could not be told ------------------------------------------------------------------


def ended(node: Node, term: int) -> None:
    """A coordinator that has said so in its home, and nothing since."""
    said = msgspec.json.encode(local.Finish(exit_code=0, term=term))
    node.platform.write_replacing(f"{HOME}/{FINISH}", said)


def test_an_agent_that_was_cut_off_when_the_run_ended_leaves() -> None:
    """With its workers, once it has heard nothing for six seconds."""
    node = Node()
    node.join(term=2)
    node.do(launch(), term=2)
    ended(node, term=2)
    node.pass_s(4)
    (worker,) = node.children("worker")
    assert node.agent.exit_code is None and worker.poll() is None
    node.pass_s(4)
    assert node.agent.exit_code == 0 and worker.poll() == -9


@pytest.mark.parametrize(("heard", "term"), [(2, 1), (2, 0), (0, 1)])
def test_another_end_is_not_that_of_this_run(heard: int, term: int) -> None:
    """That of an earlier term, or of a coordinator that could not go on; nor is one believed by an agent that never
    heard a coordinator: that may be of a run which was given again since."""
    node = Node()
    if heard:
        node.join(term=heard)
        node.do(launch(), term=heard)
    else:
        node.platform.write_new(f"{HOME}/term", b"1")
        node.agent = node.incarnation()
    ended(node, term)
    node.pass_s(60)
    assert node.agent.exit_code is None


def test_an_agent_whose_home_is_gone_leaves() -> None:
    """Whoever deletes the homes of a run ends it."""
    node = Node()
    node.join()
    node.do(launch())
    for name in node.platform.listdir(HOME):
        node.platform.unlink(f"{HOME}/{name}")
    node.platform.rmdir(HOME)
    node.pass_s(2)
    assert node.agent.exit_code == 0 and [one.poll() for one in node.children("worker")] == [-9]
