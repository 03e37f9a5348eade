"""Which tensors differ and by how much, against numpy on whole arrays; layouts and slabs never matter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.diff import compare
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.errors import CheckpointDamaged
from tests.checkpoint.test_reader import files_of, published, tilings
from tests.checkpoint.worlds import RUN, bits


def holding(boxes_of, **arrays):
    """A checkpoint of these arrays, cut in `boxes_of(shape)`."""
    pieces = []
    for name, array in arrays.items():
        spec = fmt.TensorSpec(name, array.dtype.name, array.shape, tuple("abcd"[: array.ndim]))
        pieces += [
            fmt.LocalTensor(spec, box, array[tuple(slice(a, b) for a, b in box)]) for box in boxes_of(array.shape)
        ]
    platform, commit = published([pieces])
    return open_checkpoint(platform, RUN, commit)


def whole(shape):
    return [fmt.whole(shape)]


def one(a, b, slab_bytes=1 << 20):
    (found,) = compare(holding(whole, w=a), holding(whole, w=b), slab_bytes=slab_bytes)
    return found


@settings(max_examples=60)
@given(st.data())
def test_figures_are_those_of_numpy(data):
    """Random bits of any dtype in two layouts, some elements changed: every figure is what numpy gives for the whole,
    and slabs of a few bytes give the same."""
    shape, boxes = data.draw(tilings())
    dtype = data.draw(st.sampled_from(list(fmt.DTYPES)))
    a = bits("a", dtype, shape)
    changed = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    keep = np.frombuffer(bits("keep", "uint8", shape).tobytes(), np.uint8).reshape(shape) >= 256 * changed
    b = np.where(keep, a, bits("b", dtype, shape))
    (found,) = compare(
        holding(lambda _: boxes, w=a), holding(whole, w=b), slab_bytes=data.draw(st.sampled_from([8, 64, 1 << 20]))
    )
    differ = np.array([x != y for x, y in zip(_elements(a), _elements(b), strict=True)], bool)
    with np.errstate(all="ignore"):
        wide_a, wide_b = a.reshape(-1).astype(np.longdouble), b.reshape(-1).astype(np.longdouble)
        apart = np.abs(wide_a - wide_b).astype(np.float64)
    gaps, both = apart[differ], np.isfinite(apart)  # infinite also where float64 cannot tell how far
    finite = gaps[np.isfinite(gaps)]
    assert (found.elements, found.different) == (a.size, int(differ.sum()))
    assert found.not_finite == len(gaps) - len(finite)
    assert found.state == ("differs" if differ.any() else "equal")
    assert found.max_abs == pytest.approx(finite.max() if len(finite) else 0.0, rel=1e-15)
    with np.errstate(all="ignore"):
        rms = np.sqrt(np.square(finite).sum() / max(1, both.sum()))
    assert found.rms == pytest.approx(rms, rel=1e-12)


def _elements(array):
    raw = np.ascontiguousarray(array).tobytes()
    size = array.dtype.itemsize
    return [raw[i : i + size] for i in range(0, len(raw), size)]


def test_relative_is_to_the_second():
    """relative is the rms of the difference over the rms of B: 1% more everywhere is 0.01, and from zeros it is 0."""
    b = np.linspace(1, 2, 1000)
    assert one(1.01 * b, b).relative == pytest.approx(0.01, rel=1e-12)
    assert one(b, np.zeros(1000)).relative == 0.0 and one(b, np.zeros(1000)).rms > 1


def test_integers_are_exact_at_the_ends_of_their_range():
    """The largest distance of two int64 and of two uint64 is 2**64 - 1, not what wraps around."""
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert one(np.array([low, 5]), np.array([high, 5])).max_abs == float(2**64 - 1)
    assert one(np.array([0], np.uint64), np.array([2**64 - 1], np.uint64)).max_abs == float(2**64 - 1)
    assert one(np.array([-128], np.int8), np.array([127], np.int8)).max_abs == 255


def test_nan_is_equal_to_its_own_bits_only():
    """The same NaN on both sides is equal; another one, or one side's infinity, is counted and is in no figure."""
    nan = np.array([np.nan, np.inf, 1.0], np.float32)
    assert one(nan, nan).state == "equal"
    found = one(nan, np.array([1.0, -np.inf, 2.0], np.float32))
    assert (found.different, found.not_finite, found.max_abs) == (3, 2, 1.0)
    minus = one(np.array([0.0], ml_dtypes.bfloat16), np.array([-0.0], ml_dtypes.bfloat16))
    assert (minus.state, minus.different, minus.max_abs) == ("differs", 1, 0.0)


@pytest.mark.parametrize("slab_bytes", [8, 1 << 20])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_in_no_figure(odd, slab_bytes):
    """One gap of 2 from a B of 1 has an rms of 2 and is 2 relative to B, with three equal NaNs or infinities beside it
    and with numbers of B that stand against them in A; a number equal on both sides counts: 2 and 0 are 2**0.5."""
    found = one(np.array([odd, odd, odd, 3.0]), np.array([odd, odd, odd, 1.0]), slab_bytes)
    assert (found.different, found.not_finite, found.max_abs, found.rms, found.relative) == (1, 0, 2.0, 2.0, 2.0)
    found = one(np.array([odd, 3.0]), np.array([100.0, 1.0]), slab_bytes)
    assert (found.different, found.not_finite, found.max_abs, found.rms, found.relative) == (2, 1, 2.0, 2.0, 2.0)
    found = one(np.array([odd, 3.0, 5.0]), np.array([odd, 1.0, 5.0]), slab_bytes)
    assert found.rms == pytest.approx(1.41421356, abs=1e-8)
    assert found.relative == pytest.approx(0.39223227, abs=1e-8)  # (4 / 26)**0.5


def test_what_is_missing_or_other_is_named():
    """A tensor of one side, of another shape or another dtype is told as that; the others are compared all the same."""
    a = holding(whole, same=np.ones(3), only=np.ones(2), wide=np.ones(4), kind=np.ones(2, np.float32))
    b = holding(whole, kind=np.ones(2), wide=np.ones((2, 2)), more=np.ones(7), same=np.ones(3))
    found = {diff.name: diff for diff in compare(a, b)}
    assert {name: diff.state for name, diff in found.items()} == {
        "same": "equal", "only": "only in A", "wide": "other shape", "kind": "other dtype", "more": "only in B",
    }
    assert found["wide"].detail == "[4] and [2, 2]" and found["kind"].detail == "float32 and float64"


def test_all_bytes_are_told_of():
    """Progress adds up to the bytes of what is compared, however small the slabs."""
    heard = []
    list(compare(holding(whole, w=np.ones((5, 7))), holding(whole, w=np.zeros((5, 7))), heard.append, slab_bytes=64))
    assert sum(heard) == 5 * 7 * 8 and max(heard) <= 64


@pytest.mark.parametrize("dtype", list(fmt.DTYPES))
def test_slabs_are_bounded_as_float64(dtype):
    """Of any dtype no more elements are looked at together than fill the slab as float64, which the figures need."""
    heard, w = [], bits("w", dtype, (9, 100))
    list(compare(holding(whole, w=w), holding(whole, w=w), heard.append, slab_bytes=1 << 8))
    assert sum(heard) == w.nbytes and max(heard) // w.dtype.itemsize * 8 <= 1 << 8


def test_damage_is_no_difference():
    """A damaged byte raises by tensor and file; it is never counted as a difference."""
    platform, commit = published([[fmt.LocalTensor(
        fmt.TensorSpec("w", "uint8", (100,), ("a",)), ((0, 100),), bits("w", "uint8", (100,))
    )]])
    platform.disk.find_file(files_of(platform, commit)["part-r00000.safetensors"]).data[-1] ^= 1
    damaged = open_checkpoint(platform, RUN, commit)
    with pytest.raises(CheckpointDamaged, match="tensor w"):
        list(compare(holding(whole, w=bits("w", "uint8", (100,))), damaged))
