"""Slots sent to a peer, and fetched back, over the real link: encrypted TCP on loopback, cut, held up and capped."""

from __future__ import annotations

import pathlib
import queue
import shutil
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.asking import Around
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.fetching import Fetch
from packtrain.checkpoint.lending import Lend, Lending
from packtrain.checkpoint.link import LinkClient, LinkServer
from packtrain.checkpoint.neighbours import Neighbours, lending_of
from packtrain.checkpoint.rounds import Round
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import BufferFolder, choose, held, held_in, memory_folder, peer_folder
from packtrain.core.errors import PacktrainError, PeerCopyFailed, PeerLost, SlotDamaged
from packtrain.core.pinned import Pinned, make_pinned
from packtrain.core.platform import LocalPlatform
from packtrain.core.transfer import Rate, unlimited
from packtrain.core.units import MIB
from tests.checkpoint.cable import Cable
from tests.checkpoint.test_slots import Client
from tests.checkpoint.worlds import make_run

WAIT_S = 60.0
FLOATS = 9 * MIB // 4
"""Three blocks."""


class Node(LocalPlatform):
    """One of several on this machine. Waiting takes no time."""

    def __init__(self, name: str) -> None:
        self.name = name

    def node(self) -> str:
        return self.name

    def sleep(self, seconds: float) -> None:
        return None


class Pair:
    """Two nodes with a carrier's part each, and a cable from n0 to n1."""

    def __init__(self, run: str) -> None:
        self.run, self.names = run, ["n0", "n1"]
        self.writers = ("r00000", "r00001")
        self.log = make_run(LocalPlatform(), run)
        self.begun = self.log.begin(0, self.writers, "n0")
        make_pinned(LocalPlatform(), f"{run}/run.pem")
        self.servers: dict[str, LinkServer] = {}
        self.lendings: dict[str, Lending] = {}
        self.savers: dict[str, Saver] = {}
        self.warned: queue.SimpleQueue[PacktrainError] = queue.SimpleQueue()
        self.disk_works = threading.Event()
        self.disk_works.set()
        self.before: dict[str, int] = {}
        """As `Round.before`, of each node."""
        self.cable = Cable(lambda: self.servers["n1"].address)
        self.carriers()

    def carriers(self) -> None:
        """New ones on both nodes."""
        for server in self.servers.values():
            server.stop()
        pinned = Pinned(f"{self.run}/run.pem")
        for name in self.names:
            reach = partial(self._reach, Node(name), pinned)
            around = Around(name, reach, lambda: self.names)
            lending = Lending(Node(name), self.run, self.begun, around, WAIT_S, self.warn)
            self.lendings[name] = lending
            self.servers[name] = LinkServer(Node(name), "127.0.0.1", pinned, lending.answers)
            self.servers[name].start()
            lending.start()

    def warn(self, error: PacktrainError) -> None:
        assert self.disk_works.wait(WAIT_S)
        self.warned.put(error)

    def _reach(self, platform: Node, pinned: Pinned, node: str) -> LinkClient:
        return LinkClient(platform, lambda: self.cable.address if node == "n1" else self.servers[node].address, pinned)

    def close(self) -> None:
        for name in self.names:
            self.servers[name].stop()
            self.lendings[name].stop()
        self.cable.close()
        for name in self.names:
            for folder in (memory_folder(self.run, name), peer_folder(self.run, name)):
                shutil.rmtree(folder, ignore_errors=True)

    def remember(self, name: str, step: int) -> Lend:
        """A slot of 9 MiB of that node's writer, and the words with which it is lent."""
        writer = self.writers[self.names.index(name)]
        if name not in self.savers:
            where = BufferFolder(memory_folder(self.run, name), slots=True, lends=True)
            self.savers[name] = Saver(Node(name), where, Client(), 1, writer, 60.0, self.begun, True)
        spec = fmt.TensorSpec(writer, "float32", (FLOATS,), ("x",))
        piece = fmt.LocalTensor(spec, ((0, FLOATS),), np.full(FLOATS, step, np.float32))
        begins = Round(step, self.before.get(name, 0))
        assert self.savers[name].remember(step, [piece], {"data_index": step}, begins) is not None
        self.savers[name].wait_all(0.0)
        line = self.savers[name]._client.told[-1]
        return Lend(**{key: value for key, value in line.items() if key != "op"})

    def lend(self, lend: Lend) -> object:
        """As a carrier does it: to the thread, and what that said."""
        said: list[object] = []
        over = threading.Event()
        self.lendings["n0"].lend(lend, lambda result: (said.append(result), over.set()))
        assert over.wait(WAIT_S)
        self.savers["n0"]._client.ended.append({"id": lend.id, "ok": True})
        self.before["n0"] = lend.step if isinstance(said[0], dict) else lend.before
        return said[0]

    def kept(self) -> list[tuple[str, int]]:
        return sorted((one.writer, one.step) for one in held(Node("n1"), self.run) if not one.own)


@pytest.fixture
def pair(tmp_path: pathlib.Path, memory_disk: None) -> Iterator[Pair]:
    made = Pair(str(tmp_path))
    try:
        yield made
    finally:
        made.close()


def test_there_and_back(pair: Pair) -> None:
    """A slot goes to the peer, its node loses its memory, the next attempt begins from the peer's copy, and what is
    fetched is bit for bit what was lent; a cut on the way costs less than what was left."""
    first = pair.remember("n0", 1)
    assert isinstance(pair.lend(first), dict) and pair.kept() == [("r00000", 1)]
    second = pair.remember("n0", 2)
    [sent] = [one for one in held_in(Node("n0"), memory_folder(pair.run, "n0")) if one.slot.step == 2]
    image = pathlib.Path(sent.image).read_bytes()
    pair.cable.cut_after = 6 * MIB
    assert isinstance(pair.lend(second), dict) and pair.kept() == [("r00000", 1), ("r00000", 2)]
    assert pair.cable.joined == 3
    pair.remember("n1", 2)
    shutil.rmtree(memory_folder(pair.run, "n0"))
    chosen = choose([one for name in pair.names for one in held(Node(name), pair.run)], pair.begun)
    assert chosen.memory is not None and chosen.memory[1] == 2 and chosen.holders["r00000"] == ("n1",)
    pair.begun = pair.log.begin(None, pair.writers, "n0", memory=chosen.memory)
    pair.carriers()
    pair.cable.cut_after = 6 * MIB
    found = pair.lendings["n0"].fetching.fetch(Fetch(1, {"r00000": "n1"}))
    assert found == {"fetched": len(image)}
    [one] = held_in(Node("n0"), memory_folder(pair.run, "n0"))
    assert one.sha256 == sent.sha256 and pathlib.Path(one.image).read_bytes() == image


def test_a_peer_that_is_gone_costs_copies_and_no_more(pair: Pair) -> None:
    """While nobody answers each copy fails with its reason, said once; what was kept before stays; then it goes on."""
    assert isinstance(pair.lend(pair.remember("n0", 1)), dict)
    pair.cable.refuses = True
    for step in (2, 3):
        found = pair.lend(pair.remember("n0", step))
        assert isinstance(found, PeerCopyFailed) and "does not answer" in found.what
    assert "does not answer" in pair.warned.get(timeout=WAIT_S).what and pair.warned.empty()
    assert pair.kept() == [("r00000", 1)]
    pair.cable.refuses = False
    assert isinstance(pair.lend(pair.remember("n0", 4)), dict) and pair.kept() == [("r00000", 1), ("r00000", 4)]


def test_a_disk_that_hangs_holds_up_no_outcome(pair: Pair) -> None:
    """A copy fails while the run's disk takes no warning: its worker hears of it all the same, and the next is sent."""
    pair.disk_works.clear()
    pair.cable.refuses = True
    assert isinstance(pair.lend(pair.remember("n0", 1)), PeerCopyFailed)
    pair.cable.refuses = False
    assert isinstance(pair.lend(pair.remember("n0", 2)), dict)
    assert pair.warned.empty()
    pair.disk_works.set()
    assert "step 1 of r00000" in pair.warned.get(timeout=WAIT_S).what


def test_a_flipped_byte_of_a_kept_slot_is_found_by_name(pair: Pair) -> None:
    """Damage in the first block of what a peer kept, with much behind it: the fetch says block, writer and node, and
    the slot is chosen by nobody any more."""
    pair.lend(pair.remember("n0", 1))
    pair.remember("n1", 1)
    shutil.rmtree(memory_folder(pair.run, "n0"))
    chosen = choose([one for name in pair.names for one in held(Node(name), pair.run)], pair.begun)
    [kept] = held_in(Node("n1"), peer_folder(pair.run, "n1"))
    with open(kept.image, "r+b") as file:
        file.seek(1 * MIB)
        file.write(b"\xff")
    pair.begun = pair.log.begin(None, pair.writers, "n0", memory=chosen.memory)
    pair.carriers()
    found = pair.lendings["n0"].fetching.fetch(Fetch(1, {"r00000": "n1"}))
    assert isinstance(found, SlotDamaged) and "block 0 of r00000, step 1" in found.what and "node n1" in found.what
    assert held_in(Node("n1"), peer_folder(pair.run, "n1")) == []


class Reached(Neighbours):
    """Three nodes; whose carrier is asked is noted, and nobody answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def nodes(self) -> list[str]:
        return ["n0", "n1", "n2"]

    def client(self, node: str, rate: Rate = unlimited) -> LinkClient:
        self.asked.append(node)
        raise PeerLost("nobody is there", where=node, fix="")


def test_a_copy_goes_outside_its_failure_domain(pair: Pair) -> None:
    """The next node in order is asked to keep it, unless both are lost together: then that after it."""
    lend = pair.remember("n0", 1)
    for domains, peer in (({}, "n1"), ({"n0": "rack", "n1": "rack"}, "n2")):
        config, around = CheckpointConfig(failure_domains=domains), Reached()
        lending = lending_of(Node("n0"), pair.run, pair.begun, around, config, pair.warn)
        assert isinstance(lending.bring(lend), PeerCopyFailed) and set(around.asked) == {peer}
