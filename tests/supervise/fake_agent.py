"""An agent in virtual time: scripted workers, a link made of two lists, and processes that leave nothing behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from packtrain.core.contract import Beat, Ready
from packtrain.core.fake import FakeDisk, FakePlatform, FakeProcess
from packtrain.core.fake_process import FakeSocket, Life, Program
from packtrain.core.platform import Crew, Process
from packtrain.core.units import NS
from packtrain.supervise import keys
from packtrain.supervise.agent import Agent
from packtrain.supervise.bell import Bell
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.job import Job
from packtrain.supervise.keys import Address
from packtrain.supervise.messages import Action, AgentEvent, Do, Edge, FromAgent, FromCoordinator, Launch, Welcome
from packtrain.supervise.place import Place
from packtrain.supervise.processes import Marked, Processes
from packtrain.supervise.quiet import Usage
from packtrain.supervise.requests import Requests

T = TypeVar("T")
RUN, HOME = "/runs/small", "/node/n0"
JOB = Job(
    name="small", run_folder=RUN, worker=("worker",), carrier=("carrier",), env={"A": "1", "PACKTRAIN_OLD": "1"},
    version="1", supervise=SuperviseConfig(grace_s=5.0),
)


class FakeLink:
    def __init__(self, platform: FakePlatform) -> None:
        self.platform = platform
        self.calls: list[Address] = []
        self.sent: list[FromAgent] = []
        self.inbox: list[FromCoordinator] = []
        self.refuses = 0
        """So many messages more find a connection that is still being made."""

    def call(self, address: Address) -> None:
        self.calls.append(address)

    def send(self, message: FromAgent) -> bool:
        if self.refuses:
            self.refuses -= 1
            return False
        self.sent.append(message)
        return True

    def receive(self) -> list[FromCoordinator]:
        arrived, self.inbox = self.inbox, []
        return arrived

    def wait(self, timeout_s: float, also: Iterable[Any] = ()) -> None:
        self.platform.pause(timeout_s)


class FakeEars:
    path = f"{HOME}/beats"

    def __init__(self) -> None:
        self.said: list[Beat | Ready] = []

    def arrived(self) -> list[Beat | Ready]:
        arrived, self.said = self.said, []
        return arrived


class FakeProcesses(Processes):
    """Groups of one; strays are what a test puts there."""

    def __init__(self) -> None:
        self.strays: list[Marked] = []
        self.killed: list[int] = []
        self.marks: dict[int, str] = {}

    def adopt_orphans(self) -> None: ...

    def bury_orphans(self, ours: Iterable[int]) -> None: ...

    def kill_group(self, process: Process) -> None:
        process.send_signal(signal.SIGKILL)

    def terminate_group(self, process: Process) -> None:
        process.send_signal(signal.SIGTERM)

    def group_lives(self, process: Process) -> bool:
        return process.poll() is None

    def usage(self) -> dict[int, Usage]:
        return {}

    def kill(self, pid: int) -> None:
        self.killed.append(pid)
        self.strays = [one for one in self.strays if one.pid != pid]

    def marked(self, run: str, node: str) -> list[Marked]:
        return list(self.strays)

    def mark(self, pid: int) -> str:
        return self.marks.get(pid, "")


class Node:
    """An agent, and the coordinator that the test plays."""

    def __init__(
        self, job: Job = JOB, programs: dict[str, Program | int] | None = None,
        platform: type[FakePlatform] = FakePlatform,
    ) -> None:
        self.disk = FakeDisk()
        self.programs: dict[str, Program | int] = {"worker": catching, "carrier": catching, **(programs or {})}
        self.platform = platform(self.disk, "n0", programs=lambda argv: self.programs.get(argv[0]))
        for folder in (RUN, f"{RUN}/journal", HOME):
            self.platform.mkdir(folder)
        self.link, self.ears = FakeLink(self.platform), FakeEars()
        self.processes, self.requests = FakeProcesses(), Requests()
        self.job, self.seq, self.id, self.heard = job, 0, 0, 0
        self.agent = self.incarnation()
        keys.write_address(self.platform, HOME, Address(address="tcp://c:1", server_key="k", term=1))

    def incarnation(self, bell: Bell | None = None) -> Agent:
        place = Place("n0", HOME, "host", self.platform.token(), "run")
        return Agent(
            self.job, place, self.platform, self.link, self.ears, self.processes, self.requests, f"{HOME}/address",
            bell=bell,
        )

    def pass_s(self, seconds: float, look_s: float = 0.05) -> None:
        end_ns = self.platform.boot_ns() + round(seconds * NS)
        while self.agent.exit_code is None:
            self.agent.turn()
            if self.platform.boot_ns() >= end_ns:
                break
            self.platform.pause(look_s)

    def join(self, term: int = 1) -> None:
        self.pass_s(0.1)
        self.link.inbox.append(Welcome(term=term, seq=self.heard))
        self.pass_s(0.1)

    def do(self, action: Action, id: int = 0, term: int = 1) -> int:
        self.id += 1
        self.link.inbox.append(Do(term=term, id=id or self.id, action=action))
        self.pass_s(0.1)
        return id or self.id

    def events(self, kind: type[T]) -> list[T]:
        """Each once, however often it was said."""
        edges = {m.seq: m.event for m in self.link.sent if isinstance(m, Edge)}
        return [event for _, event in sorted(edges.items()) if isinstance(event, kind)]

    def happened(self) -> list[AgentEvent]:
        return self.events(object)  # type: ignore[arg-type]

    def beat(self, phase: str, step: int, attempt: int = 1, rank: int = 0) -> None:
        self.seq += 1
        self.ears.said.append(Beat(self.seq, attempt, rank, 1, phase, step, {}))
        self.pass_s(0.05)

    def children(self, name: str) -> list[FakeProcess]:
        return [child for child in self.platform.children if child.argv[0] == name]


def catching(process: FakeProcess) -> None:
    """Lives until it is killed, or ends on SIGTERM."""


def stubborn(process: FakeProcess) -> None:
    process.catches.add(signal.SIGTERM)


def answering(says: Callable[[dict[str, Any]], object], leaves: Callable[[], bool] = lambda: False) -> Program:
    """A carrier that answers each line with what `says` makes of it, None: not at all, "": it closes the connection; it
    exits with 3 when it `leaves`."""

    def program(process: FakeProcess) -> Life:
        listener = process.platform.stream_listener(process.argv[process.argv.index("--socket") + 1])
        listener.setblocking(False)
        clients: list[FakeSocket] = []
        while not leaves():
            with suppress(BlockingIOError):
                clients.append(listener.accept()[0])  # type: ignore[arg-type]
                clients[-1].setblocking(False)
            for client in clients:
                _reply(client, says)
            clients = [client for client in clients if not client.ended]
            yield 0.05
        return 3

    return program


def _reply(client: FakeSocket, says: Callable[[dict[str, Any]], object]) -> None:
    with suppress(BlockingIOError):
        for line in client.recv(1 << 16).splitlines():
            answer = says(json.loads(line))
            if answer == "":
                client.close()
            elif answer is not None:
                client.sendall(json.dumps(answer).encode() + b"\n")


class Slow(FakePlatform):
    """Errands are done when a test says so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.works: list[Callable[[], object]] = []

    def crew(self, threads: int) -> Crew:
        return _Later(self.works)


class _Later(Crew):
    def __init__(self, works: list[Callable[[], object]]) -> None:
        self._works = works

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        self._works.append(work)
        return lambda: None

    def close(self) -> None: ...


def launch(attempt: int = 1, ranks: Sequence[int] = (0,), restore: str = "", spec: int = 0) -> Launch:
    return Launch(
        attempt=attempt, begin=attempt, ranks=tuple(ranks), world_size=len(ranks), master="host:123", restore=restore,
        spec=spec,
    )
