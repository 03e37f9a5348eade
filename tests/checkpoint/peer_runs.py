"""Three nodes on one machine, a carrier and a worker each: real processes that can be killed, and memory that goes."""

from __future__ import annotations

import json
import os
import random
import shutil

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.holding import is_true
from packtrain.checkpoint.reader import restoring
from packtrain.checkpoint.slots import (
    RECORD,
    Held,
    bringing,
    choose,
    held,
    held_in,
    memory_folder,
    named_by,
    peer_folder,
)
from packtrain.core.contract import CarrierClient
from packtrain.core.pinned import make_pinned
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.test_kills import Children
from tests.checkpoint.worlds import big_state, make_run, same_bits

NODES = ("n0", "n1", "n2")
PEER = {"n0": "n1", "n1": "n2", "n2": "n0"}
WRITERS = tuple(f"r{i:05d}" for i in range(3))
HOMES = dict(zip(WRITERS, NODES))
FETCH_S = 30.0


class Node(LocalPlatform):
    """One of them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def node(self) -> str:
        return self.name


class PeerRun:
    """A run and its attempts. `go`: up to which step workers may remember."""

    def __init__(self, folder: str, children: Children) -> None:
        self.folder, self.children = folder, children
        self.platform = LocalPlatform()
        self.log = make_run(self.platform, folder)
        make_pinned(self.platform, f"{folder}/run.pem")
        self.begun = self.log.begin(0, WRITERS, "n0")
        self.addresses: dict[str, str] = {}
        self.carriers: dict[str, str] = {}
        self._count = 0
        self.key = f"{os.path.basename(folder)}."
        self._started: set[str] = set()

    def start(self) -> None:
        """Carriers and workers of the attempt that began."""
        self.go(self.begun.step)
        for node in NODES:
            self.carrier(node)

    def workers(self) -> None:
        for writer, node in HOMES.items():
            self._started.add(self.worker(node))
            self.children.start(
                id=self.worker(node), role="member", run=self.folder, node=node, writer=writer, socket=self.socket(node)
            )

    def carrier(self, node: str, dies_at: int = 0) -> str:
        """A new one; where there was one at its socket, that is gone. All are told where it is."""
        self._count += 1
        name = self.carriers[node] = f"{self.key}{node}c{self._count}"
        for path in (self.socket(node), f"{self.socket(node)}.address"):
            if os.path.exists(path):
                os.unlink(path)
        self._started.add(name)
        self.children.start(
            id=name, role="carrier", run=self.folder, node=node, socket=self.socket(node), begin=self.begun.number,
            dies_at=dies_at, peers=f"{self.folder}/peers",
        )
        self.heard(f"{name} ")
        if self.platform.exists(f"{self.socket(node)}.address"):
            self.addresses[node] = self.platform.read_json(f"{self.socket(node)}.address")["address"]
            self.platform.write_replacing(f"{self.folder}/peers", json.dumps(self.addresses).encode())
        return name

    def socket(self, node: str) -> str:
        return f"{self.folder}/{node}.sock"

    def worker(self, node: str) -> str:
        return f"{self.key}{node}w{self.begun.attempt}"

    @property
    def first(self) -> int:
        """The first step that the workers of this attempt remember; step 0 is no round."""
        return max(1, self.begun.step + 1)

    def go(self, step: int) -> None:
        self.platform.write_replacing(f"{self.folder}/go", str(step).encode())

    def heard(self, *wanted: str) -> None:
        """Wait until each of these was reported, in any order."""
        while not all(any(f"{who} {event}".startswith(one) for who, event in self.children.events) for one in wanted):
            self.children.next_event()

    def copied(self, step: int) -> None:
        """All go to that step, and each has its copy at its peer."""
        self.go(step)
        self.heard(*(f"{self.worker(node)} copied {step}" for node in NODES))

    def kill(self, *names: str) -> None:
        for name in self._started.intersection(names):
            self.children.kill(name)

    def end(self) -> None:
        """Everything of the attempt is killed."""
        for node in NODES:
            self.kill(self.worker(node), self.carriers[node])

    def lose(self, node: str) -> None:
        """The machine: its processes, and its memory."""
        self.kill(self.worker(node), self.carriers[node])
        for folder in (memory_folder(self.folder, node), peer_folder(self.folder, node)):
            shutil.rmtree(folder, ignore_errors=True)

    def helds(self) -> list[Held]:
        return [one for node in NODES for one in held(Node(node), self.folder)]

    def go_on(self) -> Commit:
        """The next attempt begins from memory: slots move, and what each node is to read is bit for bit what its writer
        had at that step."""
        chosen = choose(self.helds(), self.begun)
        assert chosen.memory is not None, chosen.note
        self.begun = self.log.begin(None, WRITERS, "n0", memory=chosen.memory)
        self.start()
        for node, writers in bringing(chosen, HOMES).items():
            said = self.fetch(node, writers)
            assert said["ok"] is True, (node, writers, said)
        for node in NODES:
            self.must_restore(node)
        return self.begun

    def fetch(self, node: str, writers: dict[str, str]) -> dict[str, object]:
        client = CarrierClient(self.socket(node))
        assert client.tell({"op": "fetch", "id": 1, "writers": writers, "deadline_s": FETCH_S})
        said = client.wait(1, FETCH_S)
        client.close()
        assert said is not None, "the carrier did not answer"
        return said

    def must_restore(self, node: str) -> None:
        """As a rank on that node: what its writer had, read from its own memory."""
        memory = self.begun.memory
        assert memory is not None
        told = [
            b"\n".join(
                self.platform.read(one.image + RECORD)
                for one in named_by(memory, held_in(self.platform, memory_folder(self.folder, other)))
            )
            for other in NODES
        ]
        [writer] = [writer for writer, home in HOMES.items() if home == node]
        with restoring(Node(node), self.folder, self.begun.number, memory[2], lambda data: told) as checkpoint:
            for piece in big_state(self.origin(memory), memory[1], 3, writer):
                assert same_bits(checkpoint.read(piece.spec.name, piece.box), piece.array), (node, writer)

    @staticmethod
    def origin(memory: tuple[int, int, str]) -> int:
        """Attempt whose worker made that state."""
        return memory[0]

    def must_be_true(self) -> None:
        """Whatever claims to be a slot is one, and of each writer two images at most are kept for a peer."""
        for node in NODES:
            for folder in (memory_folder(self.folder, node), peer_folder(self.folder, node)):
                if os.path.isdir(folder):
                    assert all(is_true(self.platform, one) for one in held_in(self.platform, folder)), folder
            names = os.listdir(folder) if os.path.isdir(folder) else []
            images = [name.partition(".")[0] for name in names if RECORD not in name]
            assert all(images.count(writer) <= 2 for writer in images), names

    def remove(self) -> None:
        for node in NODES:
            for folder in (memory_folder(self.folder, node), peer_folder(self.folder, node)):
                shutil.rmtree(folder, ignore_errors=True)


def kill_and_go_on(run: PeerRun, rng: random.Random) -> None:
    """One attempt: all have a step at their peers, then something is killed in the middle of the next copies, then a
    node is lost with its memory; the next attempt begins from a step that is no older."""
    run.workers()
    first = run.first
    run.copied(first)
    victim = rng.choice(NODES)
    scene = rng.choice(["sender", "holder", "holder comes back", "both in turn", "in the middle"])
    if scene == "in the middle":
        run.kill(run.carriers[PEER[victim]])
        run.carrier(PEER[victim], dies_at=rng.randint(3, 30))
    run.go(first + 1)
    run.heard(f"{run.worker(victim)} fills {first + 1}")
    run.platform.sleep(rng.random() * 0.01)
    if scene in ("holder", "holder comes back", "both in turn"):
        run.kill(run.carriers[PEER[victim]])
    if scene in ("holder comes back", "both in turn"):
        run.carrier(PEER[victim])
    if scene == "both in turn":
        run.platform.sleep(rng.random() * 0.01)
        run.kill(run.carriers[victim])
    run.lose(victim)
    run.end()
    run.must_be_true()
    begin = run.go_on()
    assert begin.memory is not None and begin.memory[1] in (first, first + 1), (scene, begin.memory, first)
