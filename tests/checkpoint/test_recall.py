"""Restores from the memory of several nodes: each image is read where it lies, and all ranks get what they want."""

from __future__ import annotations

import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.deal import Deal
from packtrain.checkpoint.gather import gather
from packtrain.checkpoint.reader import restoring
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import RECORD, BufferFolder, choose, held, held_in, memory_folder
from packtrain.core.errors import SlotDamaged
from packtrain.core.fake import FakeDisk, FakePlatform, fail
from tests.checkpoint.fabrics import Between, Board, together
from tests.checkpoint.test_slots import Client
from tests.checkpoint.worlds import RUN, big_state, make_run, same_bits

WRITERS = ("r00000", "r00001", "r00002")
HOMES = {"r00000": "n0", "r00001": "n1", "r00002": "n1"}


class Nodes:
    """Two nodes with a shared run folder and each its own memory; what three writers remembered at step 5."""

    def __init__(self):
        self.disk = FakeDisk()
        self.platforms = {node: FakePlatform(self.disk, node) for node in ("n0", "n1")}
        self.log = make_run(self.platforms["n0"])
        self.platforms["n0"].mkdir("/dev/shm")
        begun = self.log.begin(0, WRITERS, "n0")
        for writer, node in HOMES.items():
            where = BufferFolder(memory_folder(RUN, node), slots=True)
            saver = Saver(self.platforms[node], where, Client(), 1, writer, 60.0, begun)
            assert saver.remember(5, big_state(1, 5, 3, writer), {"data_index": 5}) is not None
            saver.wait_all(0.0)
        self.chosen = choose([one for p in self.platforms.values() for one in held(p, RUN)], begun)
        self.begin = self.log.begin(None, WRITERS, "n0", memory=self.chosen.memory)

    def images(self, node):
        return held_in(self.platforms[node], memory_folder(RUN, node))

    def restore(self, nodes, faults=lambda rank, op, path: None):
        """By one rank on each of `nodes`, which wants a third of the rows, and all of the stamp: what each got, or how
        it failed, and which images it read."""
        board = Board(len(nodes), lambda rank, shift, window: window)
        got, failed = [{} for _ in nodes], [None] * len(nodes)
        platforms = [
            FakePlatform(self.disk, node, faults=lambda op, path, n, r=rank: faults(r, op, path))
            for rank, node in enumerate(nodes)
        ]

        def run(rank):
            try:
                self._one(platforms[rank], Between(board, rank), len(nodes), got[rank])
            except Exception as error:
                failed[rank] = error

        together(len(nodes), run)
        return got, failed

    def _one(self, platform, fabric, ranks, got):
        begin = CommitLog(platform, f"{RUN}/commits").begun()
        with restoring(platform, RUN, begin.number, begin.memory[2], fabric.share) as checkpoint:
            thirds = [[rank for rank in range(ranks) if rank % 3 == third] for third in range(3)]
            wanted = {
                name: {((32 * third, 32 * third + 32), (0, n)): those for third, those in enumerate(thirds) if those}
                for name, n in (("w", 1024), ("m", 7))
            } | {"stamp": {((0, 2),): tuple(range(ranks))}}
            deal = Deal(checkpoint.tables, wanted, ranks, readers=checkpoint.readers)
            gather(checkpoint, deal, fabric, lambda name, boxes: got.update({(name, box): boxes[box] for box in boxes}))


def must_be(got, step=5):
    whole = {piece.spec.name: piece.array for piece in big_state(1, step, 1, None)}
    for rank, boxes in enumerate(got):
        assert {name for name, _ in boxes} == {"w", "m", "stamp"}, rank
        for (name, box), array in boxes.items():
            assert same_bits(array, whole[name][tuple(slice(*side) for side in box)]), (rank, name)


def test_each_image_is_read_where_it_lies():
    """Three ranks on two nodes restore what three writers held there, and the image of none is asked for on the other
    node; the digest in the log is over all records."""
    nodes = Nodes()
    assert nodes.chosen.holders == {writer: (node,) for writer, node in HOMES.items()}
    before = len(nodes.disk.trace)
    got, failed = nodes.restore(["n0", "n1", "n1"])
    assert failed == [None] * 3
    must_be(got)
    read = {(node, path) for node, op, path in nodes.disk.trace[before:] if op == "read" and "/dev/shm/" in path}
    assert {node for node, path in read if memory_folder(RUN, node) not in path} == set()
    assert {path.rpartition("/")[2][:6] for _, path in read} == set(WRITERS)


def test_ranks_that_were_not_there_before():
    """A rank on another node's side, or more ranks than writers, or fewer, get the same bits."""
    for ranks in (["n1", "n0", "n0"], ["n0", "n1"], ["n0", "n1", "n0", "n1", "n0"]):
        got, failed = Nodes().restore(ranks)
        assert failed == [None] * len(ranks)
        must_be(got)


@pytest.mark.parametrize("harm", ["image", "record", "node"])
def test_damage_on_one_node_is_told_on_all(harm):
    """A flipped byte of an image, a record that is gone, or a node without a rank: every rank raises, nobody waits, and
    no attempt begins from what is damaged again."""
    nodes = Nodes()
    one = nodes.images("n1")[0]
    if harm == "image":
        nodes.disk.find_file(one.image).data[-5] ^= 1
    if harm == "record":
        nodes.platforms["n1"].unlink(one.image + RECORD)
    _, failed = nodes.restore(["n0", "n0"] if harm == "node" else ["n0", "n1", "n1"])
    assert all(isinstance(error, SlotDamaged) for error in failed), failed
    if harm == "image":
        assert sum(one.image in error.where for error in failed) == 1
    assert choose([one for p in nodes.platforms.values() for one in held(p, RUN)], nodes.begin).memory is None


def test_a_node_that_cannot_look_stops_all():
    """Where memory refuses to be read on one node all ranks say so, and none waits for it."""
    _, failed = Nodes().restore(
        ["n0", "n1"], lambda rank, op, path: fail() if (rank, op) == (1, "listdir") and "/dev/shm/" in path else None
    )
    assert all("rank 1 cannot read memory" in str(error) for error in failed), failed
