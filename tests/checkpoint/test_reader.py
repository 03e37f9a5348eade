"""Reading back: any box from any tiling, every byte checked, hostile files refused by name."""

from __future__ import annotations

import errno
import itertools
import json
from functools import cache

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint import reader
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.publish import Gate, Save, carry
from packtrain.checkpoint.reader import open_checkpoint, open_restore, verify_commit
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable, FormatUnknown, SaveFailed
from packtrain.core.fake import FakeDisk, FakePlatform, fail
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.worlds import RUN, bits, make_run, part_of, publish_small, same_bits, small_state, tensor_of


def published(pieces_of_writers, platform=None, run=RUN):
    """One checkpoint of these pieces, a list per writer."""
    platform = platform or FakePlatform(FakeDisk(), "a")
    log = make_run(platform, run)
    writers = tuple(f"r{i:05d}" for i in range(len(pieces_of_writers)))
    log.begin(0, writers, "node")
    platform.mkdir(f"{run}/buffers")
    parts = tuple(
        part_of(platform, pieces, f"{run}/buffers/{writer}", writer)
        for writer, pieces in zip(writers, pieces_of_writers, strict=True)
    )
    about = {"data_index": 5, "plan_hash": "p", "seed": 3, "code_hash": "c", "meta": {"x": [1.5]}}
    return platform, carry(platform, log, run, Save(1, 1, parts, about, end_ns=1 << 60), Gate())


@st.composite
def tilings(draw):
    """A shape, and boxes that tile it: each cut splits one box in two, so no grid is needed."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    boxes = [fmt.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = draw(st.sampled_from(boxes))
        wide = [d for d, (a, b) in enumerate(box) if b - a > 1]
        if wide:
            d = draw(st.sampled_from(wide))
            cut = draw(st.integers(box[d][0] + 1, box[d][1] - 1))
            boxes.remove(box)
            boxes += [(*box[:d], (box[d][0], cut), *box[d + 1 :]), (*box[:d], (cut, box[d][1]), *box[d + 1 :])]
    return shape, boxes


@st.composite
def boxes_in(draw, shape):
    return tuple(tuple(sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))) for n in shape)


@given(st.data())
def test_any_box_reads_the_same_from_any_tiling(data):
    """Tensors of random shape and dtype, cut at random over random writers, read back equal in random boxes."""
    n_writers = data.draw(st.integers(1, 3))
    writers: list[list[fmt.LocalTensor]] = [[] for _ in range(n_writers)]
    whole = {}
    for i in range(data.draw(st.integers(1, 3))):
        shape, boxes = data.draw(tilings())
        name, dtype = f"t{i}", data.draw(st.sampled_from(list(fmt.DTYPES)))
        spec = fmt.TensorSpec(name, dtype, shape, tuple("abcd"[: len(shape)]))
        whole[name] = bits(name, dtype, shape)
        for box in boxes:
            piece = whole[name][tuple(slice(a, b) for a, b in box)]
            writers[data.draw(st.integers(0, n_writers - 1))].append(fmt.LocalTensor(spec, box, piece))
    checkpoint = open_checkpoint(*_opened(writers))
    for name, array in whole.items():
        assert same_bits(checkpoint.read(name), array)
        box = data.draw(boxes_in(array.shape))
        want = array[tuple(slice(a, b) for a, b in box)]
        assert same_bits(checkpoint.read(name, box), np.ascontiguousarray(want).reshape(want.shape))


def _opened(writers):
    platform, commit = published(writers)
    return platform, RUN, commit


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(4, 300), st.data())
def test_slabs_cover_what_is_wanted(rows, columns, slab_bytes, data):
    """Slabs down to one element are disjoint, at the right place, within their bound, and hold all that is wanted."""
    stored = ((2, 2 + rows), (1, 1 + columns), (0, 3))
    common = tuple(tuple(sorted(data.draw(st.tuples(st.integers(a, b), st.integers(a, b))))) for a, b in stored)
    if any(a == b for a, b in common):
        return
    seen = np.zeros((60, 10, 3), int)
    for slab, at in reader.slabs(stored, common, 4, slab_bytes):
        assert 4 * fmt.volume(slab) <= slab_bytes
        first = [a - origin for (a, _), (origin, _) in zip(slab, stored, strict=True)]
        assert at == 4 * int(np.ravel_multi_index(first, (rows, columns, 3)))
        seen[tuple(slice(a, b) for a, b in slab)] += 1
    assert (seen[tuple(slice(a, b) for a, b in common)] == 1).all() and seen.max() == 1


def test_manifest_keeps_what_the_trainer_said(tmp_path):
    """Step, data index, seed, hashes and guard statistics come back exactly, with no tensor read."""
    platform, commit = published([[tensor_of("w", "float32", (2,))]], LocalPlatform(), str(tmp_path))
    m = open_restore(platform, str(tmp_path), commit.number, commit.digest).manifest
    assert (m.step, m.attempt, m.data_index, m.plan_hash, m.seed, m.code_hash) == (1, 1, 5, "p", 3, "c")
    assert m.meta == {"x": [1.5]} and m.tensors[0].dims == ("d0",)


def test_column_slices_of_wide_rows_read_right():
    """Rows wider than a slab are cut inside the row: a column box of a 3 x 12 MiB tensor reads right."""
    wide = tensor_of("w", "uint8", (3, 12 << 20))
    checkpoint = open_checkpoint(*_opened([[wide]]))
    box = ((1, 3), ((4 << 20) - 5, (4 << 20) + 5))
    assert same_bits(checkpoint.read("w", box), wide.array[1:3, (4 << 20) - 5 : (4 << 20) + 5].copy())


# --- damage ------------------------------------------------------------------------------------------


def tiny():
    """Two writers, three tensors, one of them cut between the writers."""
    spec = fmt.TensorSpec("w", "float32", (4, 2), ("embed", "mlp"))
    array = bits("w", "float32", (4, 2))
    halves = [fmt.LocalTensor(spec, ((a, a + 2), (0, 2)), array[a : a + 2]) for a in (0, 2)]
    return published([[halves[0], tensor_of("s", "int32", ())], [halves[1], tensor_of("e", "bool", (3,))]])


TENSORS_OF = {"part-r00000.safetensors": {"w", "s"}, "part-r00001.safetensors": {"w", "e"}}


def files_of(platform, commit):
    folder = f"{RUN}/checkpoints/{commit.folder}"
    return {name: f"{folder}/{name}" for name in platform.listdir(folder)}


def must_be_found(platform, commit, name, note):
    """Verification names the file and the tensors, and no read returns before it has raised."""
    found = verify_commit(platform, RUN, commit)
    assert found and {damage.file for damage in found} == {name}, (note, found)
    named = {tensor for damage in found for tensor in damage.tensors}
    assert named == TENSORS_OF.get(name, {"*"}), (note, named)
    with pytest.raises(CheckpointDamaged) as caught:
        checkpoint = open_checkpoint(platform, RUN, commit)
        for tensor in checkpoint.specs:
            checkpoint.read(tensor)
        raise CheckpointDamaged("the header, which no tensor's bytes touch", where=name)
    assert name in caught.value.where or name in caught.value.what


def test_any_flipped_byte_is_found_by_tensor_and_file():
    """Every byte of every file of a tiny checkpoint, a bit or all bits flipped, is found before use, by file and
    tensor."""
    platform, commit = tiny()
    assert verify_commit(platform, RUN, commit) == []
    for name, path in files_of(platform, commit).items():
        data = platform.disk.find_file(path).data
        for i, mask in itertools.product(range(len(data)), (0x01, 0xFF)):
            data[i] ^= mask
            must_be_found(platform, commit, name, (name, i, mask))
            data[i] ^= mask
    assert verify_commit(platform, RUN, commit) == []


def test_any_truncation_or_growth_is_found_by_file():
    """Every file cut at every length, grown by a byte, or gone, is found by name."""
    platform, commit = tiny()
    for name, path in files_of(platform, commit).items():
        node = platform.disk.find_file(path)
        whole = bytes(node.data)
        for length in range(len(whole)):
            node.data[:] = whole[:length]
            must_be_found(platform, commit, name, (name, length))
        node.data[:] = whole + b"\0"
        found = verify_commit(platform, RUN, commit)
        assert [damage.file for damage in found] == [name]
        node.data[:] = whole
        platform.unlink(path)
        assert {damage.file for damage in verify_commit(platform, RUN, commit)} == {name}
        platform.write_new(path, whole)


def test_files_of_two_saves_swapped_are_found():
    """A whole, well-formed file of another save is not taken for this one's."""
    platform = FakePlatform(FakeDisk(), "a")
    log = make_run(platform)
    log.begin(0, ("r00000",), "node")
    first, second = (publish_small(platform, log, 1, step) for step in (10, 20))
    for name, path in files_of(platform, first).items():
        other = platform.disk.find_file(files_of(platform, second)[name]).data
        mine = platform.disk.find_file(path).data
        mine[:], other[:] = bytes(other), bytes(mine)
        for commit in (first, second):
            assert {damage.file for damage in verify_commit(platform, RUN, commit)} == {name}
        mine[:], other[:] = bytes(other), bytes(mine)
    assert verify_commit(platform, RUN, first) == verify_commit(platform, RUN, second) == []


@settings(max_examples=30)
@given(st.data())
def test_sampled_damage_of_a_larger_checkpoint_is_found(data):
    """In an image of several blocks a flipped byte anywhere is found, and the tensors in its block alone are named."""
    platform, commit = large()
    name = "part-r00000.safetensors"
    image = platform.disk.find_file(files_of(platform, commit)[name]).data
    i = data.draw(st.integers(0, len(image) - 1))
    image[i] ^= 0x10
    (damage,) = verify_commit(platform, RUN, commit)
    image[i] ^= 0x10
    start = i // fmt.BLOCK_BYTES * fmt.BLOCK_BYTES
    boxes = open_checkpoint(platform, RUN, commit)._tables[0].boxes
    touched = {p.tensor for p in boxes if p.offset < start + fmt.BLOCK_BYTES and start < p.offset + p.bytes}
    assert set(damage.tensors) == touched and damage.file == name


@cache
def large():
    """Four blocks, shared by all examples, each of which leaves it as it was."""
    return published([[tensor_of(f"t{i}", "float32", (700_000,)) for i in range(5)]])


# --- hostile manifests -------------------------------------------------------------------------------


def rewritten(change):
    """A published checkpoint whose manifest was changed and whose commit vouches for the change."""
    platform, commit = tiny()
    path = files_of(platform, commit)[fmt.MANIFEST]
    manifest = json.loads(platform.read(path))
    change(manifest)
    node = platform.disk.find_file(path)
    node.data[:] = json.dumps(manifest).encode()
    return platform, RUN, msgspec.structs.replace(commit, digest=fmt.sha256(bytes(node.data)))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["parts"][0].update(writer="../../../etc/x"),
        lambda m: m["parts"][0].update(writer="/etc/passwd"),
        lambda m: m["parts"].append(m["parts"][0]),
        lambda m: m["tensors"].append(m["tensors"][0]),
        lambda m: m["parts"].pop(),
        lambda m: m["tensors"][0].update(shape=[4, 3]),
        lambda m: m["tensors"][0].update(shape=[1 << 60]),
        lambda m: m["tensors"][0].update(dtype="object"),
        lambda m: m["tensors"].pop(0),
        lambda m: m["tensors"].append({"name": "ghost", "dtype": "int8", "shape": [2], "dims": ["a"]}),
        lambda m: m["parts"][0].update(bytes=-1),
    ],
)
def test_a_hostile_manifest_is_refused(change):
    """A manifest that leads out of its folder, lists things twice, or does not fit its tables or tensors is refused."""
    with pytest.raises(CheckpointDamaged):
        open_checkpoint(*rewritten(change))


@pytest.mark.parametrize("op", ["read", "size"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_refuses_is_no_damage(op, code):
    """An error of the disk other than "no such file" says nothing about a checkpoint: it is unreadable now, exit 75."""
    platform, commit = tiny()
    platform.faults = lambda said, path, n: fail(code) if said == op and "/checkpoints/" in path else None
    with pytest.raises(CheckpointUnreadable, match=f"Errno {code}") as caught:
        verify_commit(platform, RUN, commit)
    assert caught.value.exit_code == 75
    platform.faults = lambda op, path, n: None
    assert verify_commit(platform, RUN, commit) == []


def test_damage_is_told_before_what_is_refused():
    """Damage found in one part is told although the disk then refuses another; so is what keeps it from opening."""
    platform, commit = tiny()
    found = []
    platform.disk.find_file(files_of(platform, commit)["part-r00000.safetensors"]).data[-1] ^= 1
    platform.faults = lambda op, path, n: fail(errno.EIO) if path.endswith("part-r00001.safetensors") else None
    with pytest.raises(CheckpointUnreadable):
        verify_commit(platform, RUN, commit, found=found.append)
    assert [damage.file for damage in found] == ["part-r00000.safetensors"]
    platform.faults = lambda op, path, n: None
    platform.disk.find_file(files_of(platform, commit)[fmt.MANIFEST]).data[-1] ^= 1
    assert verify_commit(platform, RUN, commit, found=found.append) == found[1:] != []


def test_a_later_format_says_so():
    """A manifest of a later format is no damage: it needs another version, and exits 78."""
    with pytest.raises(FormatUnknown):
        open_checkpoint(*rewritten(lambda m: m.update(format=2)))


@pytest.mark.parametrize("folder", ["../x/step-00000001.a0001.t1", "step-00000002.a0001.t1", "..", "", "/tmp"])
def test_a_hostile_folder_in_a_record_is_refused(folder):
    """A record whose folder is not that of its step and attempt opens nothing."""
    platform, commit = tiny()
    with pytest.raises(CheckpointDamaged, match="is not the folder") as caught:
        open_checkpoint(platform, RUN, msgspec.structs.replace(commit, folder=folder))
    assert "goes back by itself" in caught.value.fix and "--new" in caught.value.fix


def test_restore_wants_the_digest_that_was_chosen():
    """What the environment names is opened only when number and digest both fit a save."""
    platform, commit = tiny()
    assert open_restore(platform, RUN, commit.number, commit.digest).manifest.step == 1
    for number, digest in ((commit.number, "0" * 64), (1, commit.digest), (9, commit.digest)):
        with pytest.raises(CheckpointDamaged):
            open_restore(platform, RUN, number, digest)


# --- what writers offer ------------------------------------------------------------------------------


def test_writers_that_disagree_are_refused_before_a_byte_is_written():
    """Holes, overlaps and two opinions of one tensor fail the save by the tensor's name; nothing is published."""
    spec = fmt.TensorSpec("w", "float32", (4,), ("embed",))
    other = fmt.TensorSpec("w", "float32", (4,), ("mlp",))
    piece = bits("w", "float32", (4,))
    low, high = fmt.LocalTensor(spec, ((0, 2),), piece[:2]), fmt.LocalTensor(spec, ((2, 4),), piece[2:])
    for writers in ([[low]], [[low], [low, high]], [[low], [fmt.LocalTensor(other, ((2, 4),), piece[2:])]]):
        platform = FakePlatform(FakeDisk(), "a")
        with pytest.raises(SaveFailed, match="tensor w"):
            published(writers, platform)
        assert platform.listdir(f"{RUN}/checkpoints") == []
        assert CommitLog(platform, f"{RUN}/commits").head() == 1


def test_equal_states_are_equal_bytes():
    """The same state saved twice gives the same digest, so runs can be compared by it."""
    (_, first), (_, second) = published([small_state(1, 10)]), published([small_state(1, 10)])
    assert first.digest == second.digest
