"""Images that any safetensors reader opens, boxes that tile, and names that lead nowhere else."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint import format as fmt
from packtrain.core.errors import CheckpointDamaged, FormatUnknown
from tests.checkpoint.worlds import image_of, tensor_of


@pytest.mark.parametrize("dtype", list(fmt.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_every_dtype_and_shape_is_one_safetensors_entry(dtype, shape):
    """An image of any dtype, scalars and empty tensors included, is opened by the safetensors library, bytes equal."""
    piece = tensor_of("w", dtype, shape)
    _, image = image_of([piece, tensor_of("v", "uint8", (3,))])
    entries = dict(safetensors.deserialize(image))
    assert entries["w"]["dtype"] == fmt.DTYPES[dtype][0]
    assert tuple(entries["w"]["shape"]) == shape
    assert bytes(entries["w"]["data"]) == piece.array.tobytes()


def test_data_start_aligned_and_each_box_at_its_element():
    """Data start at a multiple of 64 bytes and every box at a multiple of its element, whatever stands before it."""
    pieces = [tensor_of("a", "uint8", (3,)), tensor_of("b", "float64", (1,)), tensor_of("c", "bfloat16", (5,))]
    layout, image = image_of(pieces)
    (header,) = struct.unpack("<Q", image[:8])
    assert (8 + header) % 64 == 0
    assert all(p.offset % fmt.DTYPES[p.dtype][1].itemsize == 0 for p in layout.boxes)


def test_boxes_of_one_tensor_get_their_own_keys():
    """Two boxes of one tensor in one image are two entries named after their place; a whole tensor keeps its name."""
    spec = fmt.TensorSpec("w", "float32", (4, 2), ("embed", "mlp"))
    rows = [fmt.LocalTensor(spec, ((i, i + 2), (0, 2)), np.full((2, 2), i, np.float32)) for i in (0, 2)]
    _, image = image_of([*rows, tensor_of("v", "float32", (2,))])
    assert {key for key, _ in safetensors.deserialize(image)} == {"w@0:2,0:2", "w@2:4,0:2", "v"}


def test_wrong_dtype_or_shape_is_refused():
    """Filling a box with an array of another dtype or shape is a broken invariant, never a silent cast."""
    layout = fmt.plan_image([(fmt.TensorSpec("w", "bfloat16", (2,), ("embed",)), ((0, 2),))])
    for array in (np.zeros(2, np.float32), np.zeros(3, ml_dtypes.bfloat16)):
        with pytest.raises(AssertionError):
            layout.fill(bytearray(layout.bytes_total), 0, array)


@pytest.mark.parametrize(
    "boxes, said",
    [
        ([((0, 2), (0, 3))], "6 of 12 elements"),
        ([((0, 2), (0, 3)), ((1, 4), (0, 3))], "overlap"),
        ([((0, 4), (0, 3)), ((0, 4), (0, 3))], "overlap"),
        ([((0, 5), (0, 3))], "outside"),
        ([((0, 4),)], "outside"),
        ([((2, 1), (0, 3))], "outside"),
    ],
)
def test_boxes_that_do_not_tile_are_named(boxes, said):
    """Holes, overlaps and boxes outside the shape are refused with the tensor's name."""
    spec = fmt.TensorSpec("layers.w", "float32", (4, 3), ("a", "b"))
    with pytest.raises(CheckpointDamaged, match=r"layers\.w") as caught:
        fmt.check_tiling(spec, boxes, "here")
    assert said in caught.value.what


def test_scalars_and_empty_tensors_tile():
    """A scalar is tiled by one box and not by two; an empty tensor by any number of empty boxes, none included."""
    scalar = fmt.TensorSpec("s", "float32", (), ())
    fmt.check_tiling(scalar, [()], "")
    for boxes in ([], [(), ()]):
        with pytest.raises(CheckpointDamaged):
            fmt.check_tiling(scalar, boxes, "")
    empty = fmt.TensorSpec("e", "float32", (0, 3), ("a", "b"))
    fmt.check_tiling(empty, [], "")
    fmt.check_tiling(empty, [((0, 0), (0, 3)), ((0, 0), (0, 1))], "")


@given(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(1, 10**4))
def test_folder_names_round_trip(step, attempt, trial):
    """A folder's name says step, attempt and try, and is read back."""
    name = fmt.FolderName(step, attempt, trial)
    assert fmt.parse_folder(str(name)) == name


@pytest.mark.parametrize(
    "name",
    [
        "", "..", "step-00000001.a0001.t1/..", "../step-00000001.a0001.t1", "/step-00000001.a0001.t1",
        "step-1.a0001.t1", "step-00000001.a0001.t1\n", "step-00000001.a0001.t01", "step-000000001.a0001.t1",
        "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.a0001.t1",
    ],
)
def test_other_names_are_no_checkpoint_folder(name):
    """Nothing but the one spelling of a folder's name passes, so no name in a record leads out of checkpoints/."""
    assert fmt.parse_folder(name) is None


@pytest.mark.parametrize("writer", ["", "..", "a/b", "../x", ".", "a.b", "-x", "x" * 65, "a\n"])
def test_hostile_writer_names_are_refused(writer):
    """A manifest whose part would lead out of its folder is refused before any file is opened."""
    manifest = fmt.Manifest(step=1, attempt=1, tensors=[], parts=[fmt.PartEntry(writer, 1, "", 1, "")])
    with pytest.raises(CheckpointDamaged):
        fmt.check_manifest(manifest, "m")


@pytest.mark.parametrize(
    "dtype, shape", [("float31", (1,)), ("float32", (-1,)), ("float32", (1 << 50,)), ("uint8", (1 << 40, 1 << 40))]
)
def test_impossible_tensors_are_refused(dtype, shape):
    """A tensor of unknown dtype or impossible shape is refused by name."""
    manifest = fmt.Manifest(step=1, attempt=1, tensors=[fmt.TensorSpec("w", dtype, shape, ())], parts=[])
    with pytest.raises(CheckpointDamaged, match="tensor w"):
        fmt.check_manifest(manifest, "m")


def test_later_format_is_told_apart_from_damage():
    """A manifest of a later format says so (exit 78: another version is needed); one that cannot be read is damaged."""
    with pytest.raises(FormatUnknown, match="format 2"):
        fmt.decode(b'{"format":2,"anything":[]}', fmt.Manifest, "m")
    for data in (b"", b"{}", b'{"format":1}', b"\xff\xfe", b"[" * 100_000, b'{"format":1,"step":"x"}'):
        with pytest.raises(CheckpointDamaged):
            fmt.decode(data, fmt.Manifest, "m")


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_damage(data):
    """No bytes make the parser of manifests and tables fail in another way than its two errors."""
    for cls in (fmt.Manifest, fmt.PartTable):
        try:
            fmt.decode(data, cls, "m")
        except (CheckpointDamaged, FormatUnknown):
            continue
