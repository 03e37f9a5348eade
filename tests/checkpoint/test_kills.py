"""200 real kill -9 of workers and carriers in the middle of saves: the head always restores, and so does the one
before."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.worlds import big_state, same_bits

KILLS = 200
KILLS_PER_RUN = 20
SAVES = 4
OPERATIONS = (4, 75)
"""Changes of files from the first a carrier makes when it is up, over about three saves: where it dies is drawn from
these."""
WAIT_S = 60.0


class Children:
    """The fork server, and what its children report."""

    def __init__(self) -> None:
        self._reports, write_end = os.pipe()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.children", str(write_end)], stdin=subprocess.PIPE,
            pass_fds=[write_end], cwd=Path(__file__).parents[2],
        )
        os.close(write_end)
        self._partial = b""
        self.events: list[tuple[str, str]] = []
        self._taken = 0

    def start(self, **spec: object) -> str:
        self._tell(spec)
        return str(spec["id"])

    def kill(self, name: str) -> None:
        """SIGKILL; returns when the child is gone, whether it lived until then or not."""
        if not self._has_ended(name):
            self._tell({"kill": name})
            self.wait_for(name, "exit")

    def signal(self, name: str, signum: int) -> None:
        """Any other signal; does not wait."""
        self._tell({"kill": name, "signal": signum})

    def wait_for(self, *words: str) -> str:
        """Read on to the next event (of that child, with that word) and return it."""
        while True:
            while self._taken < len(self.events):
                name, event = self.events[self._taken]
                self._taken += 1
                assert not event.startswith("raised"), (name, event)
                if f"{name} {event}".startswith(" ".join(words)):
                    return event
            self._read()

    def next_event(self) -> tuple[str, str]:
        if self._taken == len(self.events):
            self._read()
        self._taken += 1
        return self.events[self._taken - 1]

    def _has_ended(self, name: str) -> bool:
        return any(who == name and event.startswith("exit") for who, event in self.events)

    def _read(self) -> None:
        ready, _, _ = select.select([self._reports], [], [], WAIT_S)
        assert ready, f"nothing happened for {WAIT_S} s: {self.events[-5:]}"
        data = os.read(self._reports, 1 << 16)
        assert data, "the fork server ended"
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            name, _, event = line.decode().partition(" ")
            self.events.append((name, event))

    def _tell(self, message: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(message).encode() + b"\n")
        self._server.stdin.flush()

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        os.close(self._reports)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children()
    yield server
    server.close()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    """A short path in memory where there is one: a kill leaves the page cache as it is, so no disk is needed."""
    here = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="pt-", dir=here)
    yield folder
    shutil.rmtree(folder)


def must_load(run: str, commit: Commit, writers: int) -> None:
    checkpoint = open_checkpoint(LocalPlatform(), run, commit)
    assert checkpoint.manifest.step == commit.step
    assert checkpoint.verify() == []
    for piece in big_state(commit.attempt, commit.step, writers, None):
        assert same_bits(checkpoint.read(piece.spec.name), piece.array), commit


class Run:
    """One run folder, and what its attempts were told."""

    def __init__(self, folder: str, children: Children, rng: random.Random) -> None:
        os.makedirs(f"{folder}/checkpoints")
        self.folder = folder
        self.children = children
        self.rng = rng
        self.writers = [f"r{i:05d}" for i in range(rng.choice([1, 1, 2]))]
        self.log = CommitLog(LocalPlatform(), f"{folder}/commits")
        self.log.probe()
        self.published = [0]
        """Numbers of commits that a worker was told of."""
        self.left_alive: list[str] = []
        """Carriers of attempts whose workers are dead: the next attempt begins in spite of them."""

    def kill_once(self, key: str) -> str:
        """Begin an attempt, let it restore and save, kill one of its processes at a drawn moment, then all the
        others."""
        rng, children = self.rng, self.children
        begin = self.log.begin(None, self.writers, "node")
        victim = rng.choice(["worker", "carrier", "carrier at an operation"])
        common = {
            "run": self.folder, "socket": f"{self.folder}/s{begin.attempt}", "begin": begin.number,
            "writers": len(self.writers),
        }
        dies_at = rng.randint(*OPERATIONS) if victim == "carrier at an operation" else 0
        carrier = children.start(id=f"{key}c", role="carrier", dies_at=dies_at, **common)
        children.wait_for(carrier, "ready")
        workers = [
            children.start(
                id=f"{key}{name}", role="worker", writer=name, buffers=f"{self.folder}/buffers", saves=SAVES, **common
            )
            for name in self.writers
        ]
        moment = self.watch(victim, carrier, workers)
        for name in [*workers, *self.left_alive]:
            children.kill(name)
        self.left_alive = [carrier]
        if victim != "worker" or rng.random() < 0.5:
            children.kill(self.left_alive.pop())
        return f"{victim}, {moment}"

    def watch(self, victim: str, carrier: str, workers: list[str]) -> str:
        """Until the victim is dead, after a drawn number of reports or at its own hand; returns the last report."""
        left = self.rng.randint(1, 3 * SAVES * len(self.writers))
        alive, moment = set(workers), ""
        while alive:
            name, event = self.children.next_event()
            if name not in (*workers, carrier):
                continue
            if event.startswith("exit"):
                alive.discard(name)
                if name == carrier:
                    break
                continue
            moment = event.split()[0]
            if moment == "published":
                self.published.append(int(event.split()[1]))
            left -= 1
            if left == 0 and victim != "carrier at an operation":
                self.children.kill(carrier if victim == "carrier" else self.rng.choice(workers))
                break
        return moment

    def judge(self) -> list[Commit]:
        """The head restores and the save before it loads; nothing a worker was told of is missing; no dead attempt
        spoke."""
        commits = CommitLog(LocalPlatform(), f"{self.folder}/commits").all()
        assert self.published[-1] <= len(commits)
        for before, commit in pairwise(commits):
            assert commit.parent == before.number
            assert commit.attempt == before.attempt + (commit.kind == "begin"), commit
        saves = [commit for commit in commits if commit.kind == "save"]
        for commit in saves[-2:]:
            must_load(self.folder, commit, len(self.writers))
        return saves


def test_200_kills(children, memory):
    """After each kill -9 of a worker or carrier in mid-save the head restores bit for bit and the published save
    before it loads, while what was told to be published is in the log; the next attempt goes on from there, old
    carriers or not."""
    rng = random.Random(2)
    moments: Counter[str] = Counter()
    saves = 0
    for first in range(0, KILLS, KILLS_PER_RUN):
        run = Run(f"{memory}/{first}", children, rng)
        for kill in range(first, first + KILLS_PER_RUN):
            moments[run.kill_once(f"{kill}.")] += 1
            published = run.judge()
        for commit in published:
            must_load(run.folder, commit, len(run.writers))
        saves += len(published)
        for name in run.left_alive:
            children.kill(name)
        shutil.rmtree(run.folder)
    assert saves > KILLS / 2, f"the kills came too early to test anything: {moments}"
    victims = {moment.partition(",")[0] for moment in moments}
    assert len(victims) == 3 and len(moments) > 4, f"too few moments: {moments}"
    inside = sum(n for moment, n in moments.items() if moment.partition(", ")[2] in ("fills", "offered", "failed"))
    assert inside >= KILLS / 2, f"too few kills landed between the filling and the outcome of a save: {moments}"
