"""Three carriers with two workers each, real processes: killed in the middle of saves, stopped, cut off. What is
published loads bit for bit, every worker hears how its saves ended, and the next one works."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter

import msgspec
import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.core.pinned import make_pinned
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.cable import Cable
from tests.checkpoint.test_kills import Children, children, memory, must_load  # noqa: F401
from tests.checkpoint.worlds import make_run

OPERATIONS = (10, 120)
"""Changes of files from the first a carrier makes when it is up, over some five saves: where it dies is drawn."""
NODES, EACH = 3, 2
KILLS, KILLS_SOAK = 8, 50


class Cluster:
    """An attempt over nodes of this machine, and agents that start what died and tell the others where it is."""

    def __init__(self, folder: str, children: Children, deadline_s: float = 30.0) -> None:  # noqa: F811
        self.folder, self.children, self.deadline_s = folder, children, deadline_s
        self.log = make_run(LocalPlatform(), folder)
        self.writers = [f"r{i:05d}" for i in range(NODES * EACH)]
        self.peers = f"{folder}/peers"
        make_pinned(LocalPlatform(), f"{folder}/run.pem")
        self.cables: dict[str, Cable] = {}
        self.addresses: dict[str, str] = {}
        self.carriers: dict[str, str] = {}
        """Node -> id of the child."""
        self.published: dict[str, int] = {}
        """Writer -> the latest step that it was told is published."""
        self.dead: list[str] = []
        """Nodes whose carrier has died since somebody looked."""
        self.workers: list[str] = []
        self.started = 0

    def begin(self, signum: int = signal.SIGKILL, **deaths: int) -> None:
        """An attempt: carriers, of which `deaths` says when each gets that signal, then workers."""
        self.attempt = self.log.begin(None, self.writers, "n0")
        for i in range(NODES):
            self.start(f"n{i}", deaths.get(f"n{i}", 0), signum)
        self.workers = [
            self.children.start(
                id=f"{writer}.a{self.attempt.attempt}", role="stayer", run=self.folder, writer=writer,
                attempt=self.attempt.attempt, writers=len(self.writers),
                buffers=f"{self.folder}/buffers{self.attempt.attempt}",
                socket=self.socket(f"n{i // EACH}"), deadline_s=self.deadline_s,
            )
            for i, writer in enumerate(self.writers)
        ]

    def socket(self, node: str) -> str:
        return f"{self.folder}/{node}.a{self.attempt.attempt}"

    def start(self, node: str, dies_at: int = 0, signum: int = signal.SIGKILL) -> None:
        """A carrier on that node; whoever was there before is dead."""
        self.started += 1
        if os.path.exists(self.socket(node)):
            os.unlink(self.socket(node))
        self.carriers[node] = self.children.start(
            id=f"{node}.{self.started}", role="carrier", run=self.folder, socket=self.socket(node), node=node,
            begin=self.attempt.number, dies_at=dies_at, signal=signum, peers=self.peers,
        )
        while self.next() != (self.carriers[node], "ready"):
            pass
        self.addresses[node] = LocalPlatform().read_json(f"{self.socket(node)}.address")["address"]
        self.tell()

    def others(self, node: str) -> list[str]:
        """Writers of the other nodes."""
        return [writer for i, writer in enumerate(self.writers) if f"n{i // EACH}" != node]

    def tell(self) -> None:
        where = {node: self.cables[node].address if node in self.cables else at for node, at in self.addresses.items()}
        LocalPlatform().write_replacing(self.peers, msgspec.json.encode(where))

    def next(self) -> tuple[str, str]:
        """The next thing that happened, to whom."""
        name, event = self.children.next_event()
        assert not event.startswith("raised"), (name, event)
        if event.startswith("published") and name in self.workers:
            writer = name.partition(".")[0]
            self.published[writer] = max(self.published.get(writer, -1), int(event.split()[1]))
        node = name.partition(".")[0]
        if event.startswith("exit") and self.carriers.get(node) == name:
            assert event == "exit -9", (name, event)
            self.dead.append(node)
        return name, event

    def wait_until_all(self, step: int) -> None:
        """Every worker was told that this step, or a later one, is published."""
        while len(self.published) < len(self.writers) or min(self.published.values()) < step:
            self.next()

    def finish(self) -> list[int]:
        """All publish two more steps and end; returns what is published, each of which loads."""
        last = max([*self.published.values(), -1]) + 3
        LocalPlatform().write_replacing(f"{self.folder}/until", str(last).encode())  # read by all while it is written
        alive = set(self.workers)
        while alive:
            name, event = self.next()
            if name in alive and event.startswith("exit"):
                assert event == "exit 0", (name, event)
                alive.discard(name)
        self.end()
        return self.judge()

    def end(self) -> None:
        for name in [*self.workers, *self.carriers.values()]:
            self.children.kill(name)
        for cable in self.cables.values():
            cable.close()

    def judge(self) -> list[int]:
        """Every published step loads bit for bit, in order, and by the attempt that was the last begun."""
        begun, steps = 0, []
        for commit in CommitLog(LocalPlatform(), f"{self.folder}/commits").all():
            if commit.kind == "begin":
                begun, steps = commit.attempt, []
                continue
            assert commit.attempt == begun, f"dead attempt {commit.attempt} published after {begun} began"
            assert commit.step > max(steps, default=-1), commit
            must_load(self.folder, commit, len(self.writers))
            steps.append(commit.step)
        assert all(step in steps for step in self.published.values()), "told as published, and not in the log"
        return steps


def kill_again_and_again(cluster: Cluster, kills: int, rng: random.Random) -> Counter[str]:
    """Carriers die at drawn changes of files; each is started again and may die again. Returns who died."""
    cluster.begin(**{f"n{i}": rng.randint(*OPERATIONS) for i in range(NODES)})
    died: Counter[str] = Counter()
    while died.total() < kills:
        cluster.next()
        while cluster.dead:
            node = cluster.dead.pop()
            died[node] += 1
            cluster.start(node, rng.randint(*OPERATIONS) if died.total() <= kills - NODES else 0)
    return died


def test_kills_of_carriers(children, memory):  # noqa: F811
    """Carriers of three nodes die and come back in mid-save, the publishing one too: workers go on, whatever is
    published loads, and all of them publish again in the end."""
    cluster = Cluster(memory, children)
    died = kill_again_and_again(cluster, KILLS, random.Random(4))
    assert set(died) == {"n0", "n1", "n2"}, died
    assert len(cluster.finish()) > 1


@pytest.mark.soak
def test_many_kills_of_carriers(children, memory):  # noqa: F811
    """The same fifty times."""
    cluster = Cluster(memory, children)
    died = kill_again_and_again(cluster, KILLS_SOAK, random.Random(5))
    assert set(died) == {"n0", "n1", "n2"}, died
    assert len(cluster.finish()) > KILLS_SOAK // 4


@pytest.mark.parametrize("node", ["n1", pytest.param("n0", marks=pytest.mark.soak)])
def test_a_stopped_carrier(children, memory, node):  # noqa: F811
    """A carrier that is stopped in mid-save, the publishing one too, costs each worker saves that fail at their
    deadline, and no more: when it goes on, all publish again."""
    cluster = Cluster(memory, children, deadline_s=1.0)
    cluster.begin(signal.SIGSTOP, **{node: 60})
    while cluster.next() != (cluster.carriers[node], "signalled"):
        pass
    waiting = set(cluster.others(node))
    while waiting:
        name, event = cluster.next()
        if event.startswith("failed"):
            waiting.discard(name.partition(".")[0])
    children.signal(cluster.carriers[node], signal.SIGCONT)
    assert len(cluster.finish()) > 1


@pytest.mark.parametrize("operations", [30, *(pytest.param(n, marks=pytest.mark.soak) for n in range(31, 42))])
def test_an_older_attempt_wakes_up(children, memory, operations):  # noqa: F811
    """The publishing carrier is stopped in mid-save; a newer attempt begins, and publishes. When the old carrier wakes
    it publishes nothing, and its workers are told to stop, on all nodes."""
    cluster = Cluster(memory, children)
    cluster.begin(signal.SIGSTOP, n0=operations)
    while cluster.next() != (cluster.carriers["n0"], "signalled"):
        pass
    old, old_workers, old_peers = cluster.carriers["n0"], set(cluster.workers), cluster.peers
    cluster.peers = f"{memory}/new/peers"
    os.mkdir(f"{memory}/new")
    shutil.copy(f"{memory}/run.pem", f"{memory}/new/run.pem")
    leftovers = list(cluster.carriers.values())
    cluster.published = {}
    cluster.begin()
    cluster.wait_until_all(1)
    children.signal(old, signal.SIGCONT)
    while old_workers:
        name, event = cluster.next()
        if name in old_workers and event.startswith("exit"):
            assert event == "exit 0", (name, event)
            old_workers.discard(name)
    for name in leftovers:
        children.kill(name)
    assert len(cluster.finish()) > 1 and old_peers != cluster.peers
