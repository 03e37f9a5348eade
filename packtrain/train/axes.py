"""Named dims of tensors, and the one table that maps them to mesh axes. Changing parallelism is changing that table.

A *dim* belongs to a tensor, an *axis* to the mesh. No other file of model code names a mesh axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
    "stream": (),
}


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


def axes_of(dim: str, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes that split `dim` on this mesh; axes of size 1 are left out."""
    return tuple(axis for axis in TABLE[dim] if mesh.shape[axis] > 1)


def devices_on(dim: str, mesh: Mesh) -> int:
    """Into how many pieces `dim` is cut."""
    return math.prod(mesh.shape[axis] for axis in TABLE[dim])


def sharding(dims: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Where a tensor of these dims and logical `shape` lies. Raises LayoutError where a size cannot be cut equally."""
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
    return NamedSharding(mesh, PartitionSpec(*(axes_of(dim, mesh) or None for dim in dims)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, dims: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """`x`, to be laid out by the table at this point of the program (also its gradient)."""
    if mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(dims, x.shape, mesh))


def gathered(weight: jax.Array, dims: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """A weight made whole over the axes of `embed` just before use: what fully sharded data parallelism does."""
    return constrain(weight, tuple("stream" if dim == "embed" else dim for dim in dims), mesh)
