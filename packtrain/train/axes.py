"""Named dims of tensors, and the one table that maps them to mesh axes. Changing parallelism is changing that table.

A *dim* belongs to a tensor, an *axis* to the mesh. No other file of model code names a mesh axis.

Model and loss are written for one device and its pieces (`spread` lets every device run them). They say by dims where
pieces meet: `gather` and `scatter_sum` are each other's gradient, and each is nothing where no axis cuts the dim. So
the program's collectives are those written, on every mesh: no compiler chooses them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from packtrain.core.errors import LayoutError

TABLE: dict[str, tuple[str, ...]] = {
    # of parameters
    "layer": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head": (),
    "mlp": ("tensor",),
    # of activations; `stream` is embed where it is whole: in the residual stream, and in a weight gathered for use
    "rows": ("replica", "fsdp"),
    "length": ("context",),
    # length where no head and no hidden unit is in sight: between the branches, in norms (arXiv:2205.05198)
    "span": ("context", "tensor"),
    "keys": (),
    "stream": (),
}
"""Mesh axes of a dim, the outermost first. `span` begins as `length` does, so a span lies inside its length."""


PARTS = 8
"""Of the layers in an update: more need less memory and more, smaller collectives."""


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as declared: logical shape, a name for each dim, and how it starts.

    `init` is the standard deviation of a normal distribution, or "ones".
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    init: float | Literal["ones"]

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), f"{self.shape} has not one size for each of {self.dims}"

    @property
    def is_matrix(self) -> bool:
        """Whether weight decay applies: at least two dims besides `layer`. Norm scales and other vectors have one."""
        return len([dim for dim in self.dims if dim != "layer"]) >= 2


AnyMesh = Mesh | AbstractMesh


def axes_of(dim: str, mesh: AnyMesh) -> tuple[str, ...]:
    """Mesh axes that split `dim` on this mesh; axes of size 1 are left out."""
    return tuple(axis for axis in TABLE[dim] if mesh.shape[axis] > 1)


def devices_on(dim: str, mesh: AnyMesh) -> int:
    """Into how many pieces `dim` is cut."""
    return math.prod(mesh.shape[axis] for axis in TABLE[dim])


def between(cut: str, wide: str, mesh: AnyMesh) -> tuple[str, ...]:
    """Mesh axes that split dim `cut` and not dim `wide`."""
    return tuple(axis for axis in axes_of(cut, mesh) if axis not in TABLE[wide])


def not_cutting(dims: tuple[str, ...], mesh: AnyMesh) -> tuple[str, ...]:
    """Mesh axes of more than one device that split none of `dims`: on each of their devices lies the same."""
    cut = {axis for dim in dims for axis in axes_of(dim, mesh)}
    return tuple(axis for axis in _wide(mesh) if axis not in cut)


def check(dims: tuple[str, ...], shape: tuple[int, ...], mesh: AnyMesh) -> None:
    """Raises LayoutError where a size cannot be cut into equal pieces."""
    for dim, size in zip(dims, shape, strict=True):
        pieces = devices_on(dim, mesh)
        if size % pieces:
            axes = ", ".join(f"{axis} = {mesh.shape[axis]}" for axis in axes_of(dim, mesh))
            raise LayoutError(
                f"dim {dim} of size {size} cannot be cut into {pieces} equal pieces (mesh axis {axes})",
                where="train.mesh",
                fix=f"choose a size of {dim} that {pieces} divides, or a smaller "
                f"{' or '.join(axes_of(dim, mesh))} axis",
            )


def sharding(dims: tuple[str, ...], shape: tuple[int, ...], mesh: AnyMesh) -> NamedSharding:
    """Where a tensor of these dims and logical `shape` lies. Raises LayoutError where a size cannot be cut equally."""
    check(dims, shape, mesh)
    return NamedSharding(mesh, place(dims, mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def place(dims: tuple[str, ...], mesh: AnyMesh) -> PartitionSpec:
    """The piece of a tensor that a device holds, as `spread` and shard_map name it."""
    return PartitionSpec(*(axes_of(dim, mesh) or None for dim in dims))


def spread(local: Callable[..., Any], mesh: Mesh, given: tuple[Any, ...], gives: Any) -> Callable[..., Any]:
    """`local`, run by every device on its own pieces; the result takes and gives whole tensors.

    given, gives: trees of `place`. On one device it is `local` itself.
    """
    if mesh.size == 1:
        return local
    # Replication is not tracked: nothing differentiates through a sum over devices but where a gradient is written
    # out (loss), and who holds a whole parameter adds its gradient by `summed_where_whole`.
    return jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=gives, check_vma=False)


def gather(x: jax.Array, at: int, cut: str, wide: str, mesh: Mesh) -> jax.Array:
    """`x`, whose position `at` is a piece of dim `cut`, with all of dim `wide` there (cut = "span", wide = "length").

    Its gradient is `scatter_sum`.
    """
    axes = between(cut, wide, mesh)
    return jax.lax.all_gather(x, axes, axis=at, tiled=True) if axes else x


def scatter_sum(x: jax.Array, at: int, wide: str, cut: str, mesh: Mesh) -> jax.Array:
    """The sum of what the devices on `cut` hold, of which each keeps its piece. Its gradient is `gather`."""
    axes = between(cut, wide, mesh)
    return jax.lax.psum_scatter(x, axes, scatter_dimension=at, tiled=True) if axes else x


def gathered(weight: jax.Array, dims: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """A weight made whole over the axes of `embed` just before use: what fully sharded data parallelism does."""
    return gather(weight, dims.index("embed"), "embed", "stream", mesh) if "embed" in dims else weight


def cutting(dims: tuple[str, ...], mesh: AnyMesh) -> tuple[str, ...]:
    """Mesh axes that cut a tensor of these dims on this mesh."""
    return tuple(axis for dim in dims for axis in axes_of(dim, mesh))


def gathered_as(weight: jax.Array, dims: tuple[str, ...], compute: DTypeLike, mesh: Mesh) -> jax.Array:
    """A weight as `gathered` gives it, rounded to the compute type before, so that the smaller type is sent.

    An f32 weight comes out as f32: so its gradient is one, and what devices found is added in f32. A product casts it
    (matmul.py), which undoes the cast back here: the compiler drops both.
    """
    if weight.dtype != jnp.float32 or compute == jnp.float32:
        return gathered(weight.astype(compute), dims, mesh)
    return _rounded_and_gathered(weight, dims, compute, mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _rounded_and_gathered(weight: jax.Array, dims: tuple[str, ...], compute: DTypeLike, mesh: Mesh) -> jax.Array:
    return gathered(weight.astype(compute), dims, mesh).astype(weight.dtype)


def _rounded_forward(
    weight: jax.Array, dims: tuple[str, ...], compute: DTypeLike, mesh: Mesh
) -> tuple[jax.Array, None]:
    return _rounded_and_gathered(weight, dims, compute, mesh), None


def _rounded_backward(dims: tuple[str, ...], compute: DTypeLike, mesh: Mesh, _: None, d: jax.Array) -> tuple[jax.Array]:
    return (scatter_sum(d, dims.index("embed"), "stream", "embed", mesh) if "embed" in dims else d,)


_rounded_and_gathered.defvjp(_rounded_forward, _rounded_backward)


def dealt_layers(layers: int, dims: tuple[str, ...], mesh: AnyMesh) -> int:
    """How many layers, with those that fill up, are dealt to the devices that cut a stacked tensor of these dims."""
    return layers + -layers % math.prod(mesh.shape[axis] for axis in cutting(dims, mesh))


def dealt_at_once(layers: int, dims: tuple[str, ...], mesh: AnyMesh) -> int:
    """How many layers an optimizer takes at a time: about an eighth of them, and as many as the devices that they are
    dealt to divide, or all. Together the parts deal no more layers than `dealt_layers`."""
    devices = dealt_layers(1, dims, mesh)
    rounds = dealt_layers(layers, dims, mesh) // devices
    at_once = max(n for n in range(1, -(-rounds // PARTS) + 1) if rounds % n == 0)
    return min(layers, at_once * devices)


def dealt(x: jax.Array, dims: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """All layers of a piece -> a share of the layers, each whole. Layers of zeros fill up what does not divide."""
    assert dims[0] == "layer" or not cutting(dims, mesh), f"{dims} has no layers to be dealt"
    if fill := dealt_layers(len(x), dims, mesh) - len(x):
        x = jnp.pad(x, [(0, fill), *[(0, 0)] * (x.ndim - 1)])
    for at, dim in enumerate(dims):
        if axes := axes_of(dim, mesh):
            x = jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=at, tiled=True)
    return x


def returned(x: jax.Array, layers: int, dims: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """What `dealt` gave back to where it came from: all `layers` of a piece."""
    for at, dim in reversed(list(enumerate(dims))):
        if axes := axes_of(dim, mesh):
            x = jax.lax.all_to_all(x, axes, split_axis=at, concat_axis=0, tiled=True)
    return x[:layers]


def total(x: jax.Array, dims: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """The sum over all devices that hold different pieces of `dims`; not to be differentiated."""
    axes = cutting(dims, mesh)
    return jax.lax.psum(x, axes) if axes else x


def total_of_copies(sums: Sequence[jax.Array], dims: Sequence[tuple[str, ...]], mesh: Mesh) -> jax.Array:
    """All `sums` over all devices, added up: each is of a device's piece of a tensor of these dims, and of the copies
    of a piece all together count once. One collective; not to be differentiated.
    """
    axes = _wide(mesh)
    shares = [x / math.prod(mesh.shape[axis] for axis in not_cutting(of, mesh)) for x, of in zip(sums, dims)]
    return jax.lax.psum(sum(shares), axes) if axes else jnp.asarray(sum(shares))


def _wide(mesh: AnyMesh) -> tuple[str, ...]:
    """Mesh axes of more than one device."""
    return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)


def greatest(x: jax.Array, dim: str, mesh: Mesh) -> jax.Array:
    """The maximum over all devices that hold different pieces of `dim`; not to be differentiated."""
    axes = axes_of(dim, mesh)
    return jax.lax.pmax(x, axes) if axes else x


def greatest_anywhere(x: jax.Array, mesh: Mesh) -> jax.Array:
    """The maximum over all devices, copies of a piece included; not to be differentiated."""
    axes = _wide(mesh)
    return jax.lax.pmax(x, axes) if axes else x


def summed_where_whole(gradient: jax.Array, dims: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """The gradient of a parameter, added over every axis that does not cut it: there each device saw other data."""
    axes = not_cutting(dims, mesh)
    return jax.lax.psum(gradient, axes) if axes else gradient


def first_of(dim: str, size: int, mesh: Mesh) -> jax.Array | int:
    """Index in the whole dim of the first of the `size` elements that this device holds."""
    axes = axes_of(dim, mesh)
    return jax.lax.axis_index(axes) * size if axes else 0
