"""Blocks: each checked before use, few kept, loaded ahead of their use where the order is known."""

from __future__ import annotations

import threading

import pytest

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.blocks import AHEAD, Blocks
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.errors import CheckpointDamaged
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.test_reader import published
from tests.checkpoint.worlds import RUN, same_bits, tensor_of


def test_memory_stays_bounded():
    """Verified blocks beyond the cache's bytes are dropped, the one used longest ago first."""
    platform, commit = published([[tensor_of("w", "uint8", (5 * fmt.BLOCK_BYTES,))]])
    checkpoint = open_checkpoint(platform, RUN, commit)
    blocks = Blocks(platform, checkpoint.folder, bytes_max=2 * fmt.BLOCK_BYTES)
    for index in (0, 1, 0, 2):
        blocks.get(checkpoint._tables[0], index)
    assert [index for _, index in blocks._kept] == [0, 2]
    assert sum(map(len, blocks._kept.values())) == blocks._bytes == 2 * fmt.BLOCK_BYTES


def block_reads(platform, table):
    """How often the image was read."""
    return sum(op == "read" and path.endswith(table.file) for _, op, path in platform.disk.trace)


def ahead_of(blocks):
    """A checkpoint of one tensor over that many blocks, each of which is half of two boxes, and the boxes."""
    platform, commit = published([[tensor_of("w", "uint8", (blocks * fmt.BLOCK_BYTES,))]])
    checkpoint = open_checkpoint(platform, RUN, commit)
    half = fmt.BLOCK_BYTES // 2
    boxes = [((at, at + half),) for at in range(0, blocks * fmt.BLOCK_BYTES, half)]
    return platform, checkpoint, boxes


@pytest.mark.parametrize("order", [1, -1])
def test_reading_ahead_changes_no_bit_and_reads_nothing_twice(order):
    """Boxes announced in order, and asked for so or the other way round: the same bits. In order, each block once."""
    platform, checkpoint, boxes = ahead_of(8)
    plain = {box: checkpoint.read("w", box).copy() for box in boxes}
    commit = CommitLog(platform, f"{RUN}/commits").restore_point()
    checkpoint = open_checkpoint(platform, RUN, commit)
    before = block_reads(platform, checkpoint._tables[0])
    with checkpoint.ahead(("w", box) for box in boxes):
        for box in boxes[::order]:
            assert same_bits(checkpoint.read("w", box), plain[box])
    reads = block_reads(platform, checkpoint._tables[0]) - before
    assert reads == 9 if order == 1 else reads <= 9 + AHEAD  # 8 blocks, and the header that shifts them


def test_reading_ahead_stays_a_few_blocks_ahead():
    """Before the first box is asked for, AHEAD blocks are read and no more; when it ends early, nothing more is."""
    platform, checkpoint, boxes = ahead_of(3 * AHEAD)
    with checkpoint.ahead(("w", box) for box in boxes):
        assert block_reads(platform, checkpoint._tables[0]) == AHEAD
    assert block_reads(platform, checkpoint._tables[0]) == AHEAD
    checkpoint.read("w", boxes[2])
    assert block_reads(platform, checkpoint._tables[0]) <= AHEAD + 2


def test_large_blocks_are_read_ahead_within_a_bound():
    """No more than some bytes wait to be asked for, however large the blocks of a file are; each that is taken makes
    room for one."""
    platform, checkpoint, _ = ahead_of(8)
    table = checkpoint._tables[0]
    blocks = Blocks(platform, checkpoint.folder, ahead_bytes=2 * fmt.BLOCK_BYTES)
    before = block_reads(platform, table)
    with blocks.ahead((table, index) for index in range(8)):
        assert block_reads(platform, table) == before + 2
        for index in range(8):
            blocks.fresh(table, index)
            assert block_reads(platform, table) == before + min(index + 3, 8)


def test_all_blocks_of_a_large_box_are_read_ahead():
    """A tensor in one box is announced whole."""
    platform, checkpoint, _ = ahead_of(4)
    with checkpoint.ahead([("w", fmt.whole(checkpoint.specs["w"].shape))]):
        assert block_reads(platform, checkpoint._tables[0]) == 5


def test_verify_looks_at_the_disk_and_not_at_what_was_kept():
    """A byte that flips after its block was read is found."""
    platform, checkpoint, _ = ahead_of(2)
    checkpoint.read("w")
    platform.disk.find_file(f"{checkpoint.folder}/{checkpoint._tables[0].file}").data[-1] ^= 1
    assert [damage.tensors for damage in checkpoint.verify()] == [("w",)]


def test_damage_found_ahead_is_told_where_it_is_asked_for():
    """A bad block ahead harms no box before it, and is named with its tensor when its own turn comes; verify, which
    reads ahead too, finds it as well."""
    platform, checkpoint, boxes = ahead_of(4)
    path = f"{checkpoint.folder}/{checkpoint._tables[0].file}"
    node = platform.disk.find_file(path)
    node.data[2 * fmt.BLOCK_BYTES + 5] ^= 1
    with checkpoint.ahead(("w", box) for box in boxes):
        for box in boxes[:3]:
            checkpoint.read("w", box)
        with pytest.raises(CheckpointDamaged, match="tensor w: bytes 8388608"):
            for box in boxes[3:]:
                checkpoint.read("w", box)
    assert [damage.tensors for damage in checkpoint.verify()] == [("w",)]


def test_threads_that_read_ahead_give_the_same_bits(tmp_path):
    """On a real disk with real threads; after it they are gone."""
    tensors = [tensor_of(f"t{n}", "uint8", (3 * fmt.BLOCK_BYTES + n,)) for n in range(5)]
    platform = LocalPlatform()
    _, commit = published([tensors], platform, str(tmp_path))
    checkpoint = open_checkpoint(platform, str(tmp_path), commit)
    before = set(threading.enumerate())
    with checkpoint.ahead((t.spec.name, t.box) for t in tensors):
        for tensor in tensors:
            assert same_bits(checkpoint.read(tensor.spec.name), tensor.array)
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert checkpoint.verify() == []
