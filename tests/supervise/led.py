"""A run of one node led by the shipped coordinator in virtual time: its log, journal and disk are those of a fake
machine, its agent does what it is told, and its one rank lives as a test writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.core.contract import Word
from packtrain.core.errors import EXIT_AGAIN, PacktrainError
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.journal import Journal, read_folder
from packtrain.core.records import Record, SaveDone
from packtrain.supervise.coordinator import Coordinator
from packtrain.supervise.delivery import AgentSide
from packtrain.supervise.events import Finish
from packtrain.supervise.job import Job
from packtrain.supervise.keys import Address
from packtrain.supervise.link import Arrived, Read
from packtrain.supervise.messages import (
    Action,
    AskCarrier,
    Did,
    EndWorkers,
    FromCoordinator,
    GiveOrder,
    Hello,
    Launch,
    Pulse,
    RankEnded,
    RankReady,
    TellHeld,
)
from tests.checkpoint.worlds import RUN, make_run, publish_small

T = TypeVar("T")
HOME = "/home"
PATIENCE_S = 600.0
"""Virtual seconds after which a test is told that a run does not end."""
JOB = Job(name="run", run_folder=RUN, worker=("worker",), carrier=("carrier",), version="1")
End = tuple[int, PacktrainError | None]
"""Status of the rank, and the error it journalled."""
Life = Iterator[None]
"""Of a rank from GO on: a look at each `yield`; it returns an `End`."""


class Node:
    """The coordinator's link, and the agent at its other end."""

    address = Address(address="tcp://c:1", server_key="k")

    def __init__(self, run: Run, incarnation: str) -> None:
        self._run, self._inbox = run, list[Arrived]()
        self._side = AgentSide("n0", incarnation)
        self._hello = Hello(node="n0", agent=incarnation, boot_id="b", term=0, attempt=0, version="1", host="h")
        self._attempt = 0
        self._life: Life | None = None
        self.done: list[Action] = []

    def wait(self, timeout_s: float, also: Iterable[Any] = ()) -> None:
        platform = self._run.platform
        platform.pause(timeout_s)
        self._run.look()
        if self._life is not None:
            try:
                next(self._life)
            except StopIteration as end:
                self._end(*end.value)
        ns = platform.boot_ns()
        pulse = Pulse(node="n0", agent=self._hello.agent, attempt=self._attempt, step=-1)
        self._inbox += [Arrived(b"n0", "n0", one) for one in self._side.due(ns, self._hello, pulse)]

    def receive(self) -> Read:
        arrived, self._inbox = self._inbox, []
        return Read(arrived, len(arrived))

    def send(self, peer: bytes, message: FromCoordinator) -> bool:
        do = self._side.arrived(self._run.platform.boot_ns(), message)
        if do is not None:
            data = self._obey(do.action)
            self._side.did(self._run.platform.boot_ns(), Did(id=do.id, data=data))
        return True

    def _obey(self, action: Action) -> str:
        self.done.append(action)
        match action:
            case Launch() if action.ranks:
                self._attempt = action.attempt
                self.tell(RankReady(attempt=action.attempt, rank=0, facts={}))
            case GiveOrder(word=Word.GO):
                self._life = self._run.lives(action.attempt)
            case GiveOrder(word=Word.STOP):
                self._end(EXIT_AGAIN)
            case EndWorkers():
                self._end(-9)
            case TellHeld():
                return "[]"
            case AskCarrier():
                asked = json.loads(action.request)["actions"]
                return json.dumps({"done": [{**one, "error": None} for one in asked]})
        return ""

    def _end(self, status: int, error: PacktrainError | None = None) -> None:
        if self._attempt:
            told = error.as_dict() if error is not None else {}
            self.tell(RankEnded(attempt=self._attempt, rank=0, status=status, error=told))
        self._attempt, self._life = 0, None

    def tell(self, event: Any) -> None:
        self._side.happened(self._run.platform.boot_ns(), event)

    def close(self) -> None: ...


class Run:
    """`lives(attempt)`: the life of its rank. `happens(seconds)`: called at each look of a command."""

    def __init__(self, platform: type[FakePlatform] = FakePlatform) -> None:
        self.platform = platform(FakeDisk(), "host")
        self.log: CommitLog = make_run(self.platform)
        self.platform.mkdir(HOME)
        self.lives: Callable[[int], Life] = ends(0)
        self.happens: Callable[[float], object] = lambda seconds: None
        self.nodes: list[Node] = []
        self._journal = Journal(self.platform, f"{RUN}/journal", role="trainer")
        self._began_ns = 0
        self._coordinator: Coordinator | None = None

    def command(self, job: Job = JOB) -> Finish:
        """How it ends. Raises what the coordinator raises. Each command has a home of its own, as a person's has."""
        self.nodes.append(Node(self, f"a{len(self.nodes)}"))
        home, self._began_ns = f"{HOME}/{len(self.nodes)}", self.platform.boot_ns()
        self.platform.mkdir(home)
        self._coordinator = Coordinator(job, self.platform, home, self.nodes[-1])
        try:
            return self._coordinator.run()
        finally:
            self._coordinator.close()

    def look(self) -> None:
        seconds = (self.platform.boot_ns() - self._began_ns) / 1e9
        assert seconds < PATIENCE_S, "the run does not end"
        self.happens(seconds)

    def ask(self, op: str) -> dict[str, Any]:
        """A person's word."""
        assert self._coordinator is not None
        return dict(self._coordinator.answer({"op": op}))

    def save(self, attempt: int, step: int) -> Commit:
        """A save of the rank, published and journalled."""
        commit = publish_small(self.platform, self.log, attempt, step)
        self.note(SaveDone(step=step, commit=commit.number, bytes=1, stall_s=0.0, write_s=0.0))
        return commit

    def note(self, record: Record) -> None:
        """What the rank journals."""
        self._journal.write(record, durable=True)

    def done(self, kind: type[T]) -> list[T]:
        """What the agent of the last command was asked for."""
        return [one for one in self.nodes[-1].done if isinstance(one, kind)]

    def records(self, kind: type[T]) -> list[T]:
        entries = read_folder(self.platform, f"{RUN}/journal").entries
        return [entry.record for entry in entries if isinstance(entry.record, kind)]


def ends(status: int, error: PacktrainError | None = None, after: int = 5) -> Callable[[int], Life]:
    """Every rank does nothing for so many looks and ends like this."""

    def life(attempt: int) -> Iterator[None]:
        for _ in range(after):
            yield
        return status, error

    return life


def saves(run: Run, steps: Sequence[int], status: int = 0) -> Callable[[int], Life]:
    """Every rank publishes these steps, those above what it began from, and ends with the last."""

    def life(attempt: int) -> Iterator[None]:
        begun = next(one for one in run.log.all() if one.kind == "begin" and one.attempt == attempt)
        for step in steps:
            if step > begun.step:
                for _ in range(10):
                    yield
                run.save(attempt, step)
        return status, None

    return life
