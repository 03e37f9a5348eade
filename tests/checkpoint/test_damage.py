"""Flip, cut, grow or swap anything of any file: it is found before use, by name.

The exhaustive half for the files of a checkpoint folder is in test_reader.py; here are the commit log, larger
checkpoints of several writers, and the reader in examples/.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint, verify_commit
from packtrain.core.errors import CheckpointDamaged, CommitUnknown
from packtrain.core.fake import FakeDisk, FakePlatform
from tests.checkpoint import foreign
from tests.checkpoint.test_reader import files_of, published, tiny
from tests.checkpoint.worlds import RUN, WRITER, bits, make_run, publish_small, same_bits

# --- the log -----------------------------------------------------------------------------------------


def three_records():
    """A log of a begin and two saves."""
    platform = FakePlatform(FakeDisk(), "a")
    log = make_run(platform)
    log.begin(0, (WRITER,), "node")
    for step in (10, 20):
        publish_small(platform, log, 1, step)
    return platform


def must_be_found(platform, number, note):
    """Who reads the whole log learns the file; who asks for less gets the right answer, or learns it too."""
    path = f"{RUN}/commits/{number:012d}"
    with pytest.raises(CommitUnknown) as caught:
        CommitLog(platform, f"{RUN}/commits").all()
    assert caught.value.where == path, note
    try:
        assert CommitLog(platform, f"{RUN}/commits").restore_point().step == 20, note
    except CommitUnknown as error:
        assert error.where == path, note
    if number == 3:
        with pytest.raises(CommitUnknown):
            CommitLog(platform, f"{RUN}/commits").begin(None, (WRITER,), "node")


def test_any_flipped_byte_of_a_record_is_found_by_its_file():
    """Every byte of every record, a bit or all bits flipped: nothing is read from it and nothing begins on it, and
    its file is named."""
    platform = three_records()
    for number in (1, 2, 3):
        data = platform.disk.find_file(f"{RUN}/commits/{number:012d}").data
        for i, mask in itertools.product(range(len(data)), (0x01, 0xFF)):
            data[i] ^= mask
            must_be_found(platform, number, (number, i, mask))
            data[i] ^= mask
    assert CommitLog(platform, f"{RUN}/commits").restore_point().step == 20


def test_any_truncation_or_growth_of_a_record_is_found_by_its_file():
    """A record cut at any length, to nothing included, or grown by a byte, is found the same way."""
    platform = three_records()
    for number in (1, 2, 3):
        data = platform.disk.find_file(f"{RUN}/commits/{number:012d}").data
        whole = bytes(data)
        for other in (*(whole[:length] for length in range(len(whole))), whole + b"\n", whole + whole):
            data[:] = other
            must_be_found(platform, number, (number, len(other)))
        data[:] = whole


def test_a_record_in_anothers_place_is_found():
    """Whole records under each other's numbers are no records; one in the middle that is gone is not the log's end."""
    platform = three_records()
    nodes = [platform.disk.find_file(f"{RUN}/commits/{number:012d}") for number in (1, 2, 3)]
    for a, b in itertools.combinations(range(3), 2):
        nodes[a].data, nodes[b].data = nodes[b].data, nodes[a].data
        with pytest.raises(CommitUnknown, match="is damaged"):
            CommitLog(platform, f"{RUN}/commits").restore_point()
        nodes[a].data, nodes[b].data = nodes[b].data, nodes[a].data
    assert CommitLog(platform, f"{RUN}/commits").restore_point().step == 20


# --- larger checkpoints ------------------------------------------------------------------------------


@cache
def several_writers():
    """Three writers, 21 MiB: two tensors cut between all of them, and one small tensor of each writer's own."""
    writers: list[list[fmt.LocalTensor]] = [[], [], []]
    arrays = {name: bits(name, "bfloat16", (9, 500_000)) for name in ("a", "b")}
    for name, array in arrays.items():
        spec = fmt.TensorSpec(name, "bfloat16", array.shape, ("rows", "columns"))
        for i, pieces in enumerate(writers):
            pieces.append(fmt.LocalTensor(spec, ((3 * i, 3 * i + 3), (0, 500_000)), array[3 * i : 3 * i + 3]))
    for i, pieces in enumerate(writers):
        array = arrays[f"own{i}"] = bits(f"own{i}", "float8_e4m3fn", (1000 + i,))
        spec = fmt.TensorSpec(f"own{i}", "float8_e4m3fn", array.shape, ("x",))
        pieces.append(fmt.LocalTensor(spec, fmt.whole(array.shape), array))
    platform, commit = published(writers)
    return platform, commit, arrays


def flip(data, draw):
    """One byte, changed."""
    data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))


def cut(data, draw):
    """Some length less."""
    del data[draw(st.integers(0, len(data) - 1)) :]


def grow(data, draw):
    data += draw(st.binary(min_size=1, max_size=9))


def swap_runs(data, draw):
    """Two stretches of equal length trade places: every byte is still there."""
    length = draw(st.integers(1, len(data) // 2))
    a = draw(st.integers(0, len(data) - 2 * length))
    b = draw(st.integers(a + length, len(data) - length))
    data[a : a + length], data[b : b + length] = data[b : b + length], data[a : a + length]


def zero(data, draw):
    """What a lost extent leaves: a stretch of zeros."""
    start = draw(st.integers(0, len(data) - 1))
    stop = min(len(data), start + draw(st.integers(1, 1 << 20)))
    data[start:stop] = bytes(stop - start)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_damage_of_a_larger_checkpoint_is_found(data):
    """Whatever is done to one file of a checkpoint of three writers, verification names that file; a read gives the
    right bits or raises by the names of tensor and file, never other bits."""
    platform, commit, arrays = several_writers()
    name = data.draw(st.sampled_from(sorted(files_of(platform, commit))))
    node = platform.disk.find_file(files_of(platform, commit)[name])
    whole = bytes(node.data)
    try:
        data.draw(st.sampled_from([flip, cut, grow, swap_runs, zero]))(node.data, data.draw)
        if bytes(node.data) != whole:
            assert {damage.file for damage in verify_commit(platform, RUN, commit)} == {name}
            reads_right_or_raises(platform, commit, arrays, name)
    finally:
        node.data[:] = whole


def reads_right_or_raises(platform, commit, arrays, name):
    try:
        checkpoint = open_checkpoint(platform, RUN, commit)
    except CheckpointDamaged as error:
        assert error.where.endswith(f"/{name}")
        return
    named = {tensor for damage in checkpoint.verify() for tensor in damage.tensors}
    for tensor, array in arrays.items():
        try:
            assert same_bits(checkpoint.read(tensor), array)
        except CheckpointDamaged as error:
            assert error.where.endswith(f"/{name}") and tensor in named and f"tensor {tensor}: " in error.what


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_files_that_trade_places_are_found(data):
    """Of any two files of a checkpoint under each other's name at least one is named, and nothing is read: a whole
    image of another writer is no image of this one."""
    platform, commit, arrays = several_writers()
    files = files_of(platform, commit)
    names = data.draw(st.lists(st.sampled_from(sorted(files)), min_size=2, max_size=2, unique=True))
    a, b = (platform.disk.find_file(files[name]) for name in names)
    a.data, b.data = b.data, a.data
    try:
        found = verify_commit(platform, RUN, commit)
        assert found and {damage.file for damage in found} <= set(names)
        with pytest.raises(CheckpointDamaged):
            checkpoint = open_checkpoint(platform, RUN, commit)
            for tensor in arrays:
                checkpoint.read(tensor)
    finally:
        a.data, b.data = b.data, a.data


# --- the reader in examples/ -------------------------------------------------------------------------


def test_the_example_refuses_every_damage(tmp_path):
    """A byte in four of every file that the foreign reader needs, flipped, and each file cut: it gives no array. The
    record before the save it does not need."""
    platform, _ = tiny()
    foreign.copied(platform, RUN, tmp_path)
    read = foreign.load().read
    paths = [path for folder in ("commits", "checkpoints") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert len(paths) == 2 + 5
    for path in paths:
        whole = path.read_bytes()
        if path.name == f"{1:012d}":
            continue
        flipped = [whole[:i] + bytes([whole[i] ^ 0x20]) + whole[i + 1 :] for i in range(0, len(whole), 4)]
        for data in (*flipped, *(whole[:i] for i in range(0, len(whole), 64))):
            path.write_bytes(data)
            with pytest.raises(ValueError):
                read(tmp_path)
        path.write_bytes(whole)
    assert read(tmp_path).keys() == {"w", "s", "e"}
