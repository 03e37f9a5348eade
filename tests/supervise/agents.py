"""Real agents for tests: processes of their own, and a coordinator that the test plays over the real link."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import psutil

from packtrain.core.platform import LocalPlatform
from packtrain.supervise import keys
from packtrain.supervise.delivery import NodeSide
from packtrain.supervise.job import Job, run_id, write_job
from packtrain.supervise.link import Listener
from packtrain.supervise.messages import Action, AgentEvent, Did, Edge, Hello, Outdated, Pulse
from packtrain.supervise.processes import Marked, Processes

T = TypeVar("T")
HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
PLATFORM = LocalPlatform()


class Coordinator:
    """One leadership, played: what it hears is its log."""

    def __init__(self, home: str, term: int, seq: int = 0, agent: str = "") -> None:
        self.home, self.term = home, term
        self.log: list[AgentEvent] = []
        self.hellos: list[Hello] = []
        self.pulses: list[Pulse] = []
        self.outdated: list[Outdated] = []
        self.listener = Listener(PLATFORM, home, "tcp://127.0.0.1:0")
        self.side: NodeSide | None = NodeSide(term, agent, seq) if agent else None
        self.seq = seq
        self.peer = b""
        keys.write_address(PLATFORM, home, msgspec.structs.replace(self.listener.address, term=term))

    def look(self) -> None:
        self.listener.wait(0.02)
        for peer, _, message in self.listener.receive().arrived:
            self.peer = peer
            match message:
                case Hello():
                    self._hello(message)
                case Pulse():
                    self.pulses.append(message)
                case Outdated():
                    self.outdated.append(message)
                case Edge() if self.side is not None and self.side.agent == message.agent and self.side.take(message):
                    self.log.append(message.event)
                    self.seq = message.seq
                    self.side.logged()
                    if isinstance(message.event, Did):
                        self.side.did(message.event.id)
        for reply in self.side.due(PLATFORM.boot_ns()) if self.side is not None and self.peer else []:
            self.listener.send(self.peer, reply)

    def _hello(self, hello: Hello) -> None:
        self.hellos.append(hello)
        if self.side is None or self.side.agent != hello.agent:
            self.side = NodeSide(self.term, hello.agent)
        self.side.hello(PLATFORM.boot_ns())

    def ask(self, id: int, action: Action) -> None:
        assert self.side is not None
        self.side.ask(id, action)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.log if isinstance(event, kind)]

    def close(self) -> None:
        self.listener.close()


class Scene:
    """A run folder, a coordinator's home, and the home of one node; another node's may be of the same run."""

    def __init__(
        self, base: pathlib.Path, worker: tuple[str, ...], node: str = "n0", run: pathlib.Path | None = None,
        **job: object,
    ) -> None:
        self.base, self.run, self.node = base, run or base / "run", node
        self.home, self.node_home = str(base / "c"), str(base / node)
        for folder in (base, self.run, self.run / "journal", base / "c", base / node):
            folder.mkdir(mode=0o700, exist_ok=True)
        env = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1", **job.pop("more_env", {}))  # type: ignore[dict-item]
        self.job = Job(
            name="run", run_folder=str(self.run), worker=worker, env=env, version="test",
            **{"carrier": (), **job},  # type: ignore[arg-type]
        )
        write_job(PLATFORM, str(base / "job.json"), self.job)
        keys.make_keys(PLATFORM, self.home)
        keys.allow(PLATFORM, self.home, node, keys.make_keys(PLATFORM, self.node_home))
        self.coordinator = Coordinator(self.home, 1)
        self.agents: list[subprocess.Popen[str]] = []
        self.before: tuple[str, ...] = ()
        """Words before the command of each agent."""

    def start(self) -> subprocess.Popen[str]:
        command = (
            *self.before, sys.executable, "-P", "-m", "packtrain.supervise.agent", "--job", str(self.base / "job.json"),
            "--node", self.node, "--home", self.node_home, "--coordinator", f"{self.home}/{keys.ADDRESS}",
        )
        agent = subprocess.Popen(
            command, env=dict(os.environ, PYTHONPATH=str(ROOT)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )
        self.agents.append(agent)
        return agent

    def joined(self) -> subprocess.Popen[str]:
        """An agent that has been welcomed."""
        known = len(self.coordinator.hellos)
        agent = self.start()
        self.until(lambda: len(self.coordinator.hellos) > known)
        return agent

    def until(self, seen: Callable[[], object], what: str = "") -> None:
        for _ in range(1500):
            self.coordinator.look()
            if seen():
                return
        said = [agent.stdout.read() for agent in self.agents if agent.poll() is not None and agent.stdout]
        raise AssertionError(f"{what} not seen; heard {self.coordinator.log[-20:]}; agents said {said}")

    def alive(self) -> list[Marked]:
        return Processes().marked(run_id(str(self.run)), self.node)

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.communicate()
        for one in self.alive():
            os.kill(one.pid, signal.SIGKILL)
        self.coordinator.close()


@contextmanager
def scene(base: pathlib.Path, worker: tuple[str, ...], **job: object) -> Iterator[Scene]:
    made = Scene(base, worker, **job)
    try:
        yield made
    finally:
        made.close()


def script(text: str) -> tuple[str, ...]:
    """A worker that runs this, with beats as `beats` and its place as `place`."""
    start = (
        "import os, signal, subprocess, sys, time\n"
        "from packtrain.core import contract\n"
        "place = contract.Place.from_env(os.environ)\n"
        "beats = contract.Beats(place.socket, place.attempt, place.rank)\n"
        "control = contract.Control(place.control, sigterm=True)\n"
    )
    return (sys.executable, "-c", start + text)


def toy_env(**toy: object) -> dict[str, str]:
    return {"TOY": json.dumps(toy)}


def gone(pids: list[int]) -> bool:
    """Whether all have ended, soon."""
    living = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(living, timeout=10)[1]
