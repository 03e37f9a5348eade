"""Which tensors of two checkpoints differ, and by how much; a slab of each at a time, whatever their layouts were.

Figures are computed in float64, so a slab is as many elements as fill SLAB_BYTES as float64, whatever their dtype:
memory beyond the two block caches of the readers is a few copies of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.reader import SLAB_BYTES, Checkpoint, slabs

Array = np.ndarray[Any, Any]
WIDE_BYTES = 8
"""Of an element as float64."""


class TensorDiff(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of both, or of one. Figures are of A less B, over elements where both are finite: no other counts."""

    name: str
    state: Literal["equal", "differs", "only in A", "only in B", "other shape", "other dtype"]
    detail: str = ""
    """The two shapes or dtypes, where they differ."""
    elements: int = 0
    different: int = 0
    """Elements of other bits."""
    max_abs: float = 0.0
    rms: float = 0.0
    relative: float = 0.0
    """`rms` over the root mean square of B at the same elements; 0 where those are 0."""
    not_finite: int = 0
    """Elements of other bits of which one is NaN or infinite, or which are further apart than float64 can tell."""


class _Sums(NamedTuple):
    different: int = 0
    not_finite: int = 0
    finite: int = 0
    """Elements in the figures, equal ones included."""
    max_abs: float = 0.0
    squares: float = 0.0
    """Of the differences."""
    base: float = 0.0
    """Squares of B's elements in the figures, but those that float64 cannot hold."""

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(
            self.different + other.different, self.not_finite + other.not_finite, self.finite + other.finite,
            max(self.max_abs, other.max_abs), self.squares + other.squares, self.base + other.base,
        )


def compare(
    a: Checkpoint, b: Checkpoint, told: Callable[[int], None] = lambda n_bytes: None, slab_bytes: int = SLAB_BYTES
) -> Iterator[TensorDiff]:
    """Every tensor of A in its order, then those of B alone. `told` hears how many bytes of A were compared.

    `slab_bytes`: of a slab as float64.
    Raises CheckpointDamaged naming tensor and file, CheckpointUnreadable.
    """
    for name, spec in a.specs.items():
        yield _one(a, b, name, told, slab_bytes) if name in b.specs else TensorDiff(
            name=name, state="only in A", elements=math.prod(spec.shape)
        )
    for name, spec in b.specs.items():
        if name not in a.specs:
            yield TensorDiff(name=name, state="only in B", elements=math.prod(spec.shape))


def bytes_of(spec: fmt.TensorSpec) -> int:
    return math.prod(spec.shape) * fmt.DTYPES[spec.dtype][1].itemsize


def _one(a: Checkpoint, b: Checkpoint, name: str, told: Callable[[int], None], slab_bytes: int) -> TensorDiff:
    ours, theirs = a.specs[name], b.specs[name]
    elements = math.prod(ours.shape)
    if ours.shape != theirs.shape:
        detail = f"{list(ours.shape)} and {list(theirs.shape)}"
        return TensorDiff(name=name, state="other shape", detail=detail, elements=elements)
    if ours.dtype != theirs.dtype:
        detail = f"{ours.dtype} and {theirs.dtype}"
        return TensorDiff(name=name, state="other dtype", detail=detail, elements=elements)
    sums, whole = _Sums(), fmt.whole(ours.shape)
    for slab, _ in slabs(whole, whole, WIDE_BYTES, slab_bytes) if elements else ():
        one = a.read(name, slab)
        sums = sums.plus(_sums(one, b.read(name, slab)))
        told(one.nbytes)
    rms = math.sqrt(sums.squares / sums.finite) if sums.finite else 0.0
    base = math.sqrt(sums.base / sums.finite) if sums.finite else 0.0
    return TensorDiff(
        name=name, state="differs" if sums.different else "equal", elements=elements, different=sums.different,
        max_abs=sums.max_abs, rms=rms, relative=rms / base if base else 0.0, not_finite=sums.not_finite,
    )


def _sums(a: Array, b: Array) -> _Sums:
    """Of two arrays of one shape and dtype. Elements with the same bits are equal, NaN included."""
    flat, other = a.reshape(-1), b.reshape(-1)
    bits = f"u{a.dtype.itemsize}"
    differ = flat.view(bits) != other.view(bits)
    with np.errstate(all="ignore"):  # what overflows is not finite, and counted as that
        gaps = _gaps(flat, other)
        finite = np.isfinite(gaps)  # equal infinities are no number apart either
        gaps, base = gaps[finite], np.square(other[finite].astype(np.float64))
        squares = float(np.square(gaps).sum())
    return _Sums(
        int(differ.sum()), int((differ & ~finite).sum()), len(gaps), float(gaps.max(initial=0.0)), squares,
        float(base[np.isfinite(base)].sum()),
    )


def _gaps(a: Array, b: Array) -> Array:
    """How far apart, as float64: of integers exactly before that last rounding; not finite where one of them is."""
    if a.dtype.kind in "iu":
        above, below = np.maximum(a, b), np.minimum(a, b)
        return (above.astype(np.uint64) - below.astype(np.uint64)).astype(np.float64)  # modulo 2**64, so exact
    gaps: Array = a.astype(np.float64)
    gaps -= b
    return np.abs(gaps, out=gaps)
