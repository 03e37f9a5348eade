"""Sums over every element of parameters, gradients or moments, a layer at a time and a table in parts.

So the compiler writes no array of terms as large as a parameter (XLA on CPU does before a long sum), and the program is
the same for any number of layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from packtrain.train import axes
from packtrain.train.axes import ParamSpec

TABLE_PARTS = 16
"""At most so many; fewer where the rows that a device has do not divide."""

Pieces = tuple[jax.Array, ...]
"""What a device has of a parameter, and of what goes with it (moments)."""
Measure = Callable[..., Any]
"""(spec, pieces of a layer or a part) -> scalars to be added up, in any tree."""


def sum_each(measure: Measure, specs: Sequence[ParamSpec], leaves: Sequence[Pieces]) -> list[Any]:
    """`measure` of each leaf, added up over its layers, or parts."""
    return [_in_turn(functools.partial(measure, spec), _cut(spec, pieces)) for spec, pieces in zip(specs, leaves)]


def _cut(spec: ParamSpec, pieces: Pieces) -> Pieces:
    """What a loop takes one after the other: layers, parts of a table, or the whole of a vector at once."""
    if spec.dims[0] == "layer":
        return pieces
    parts = math.gcd(len(pieces[0]), TABLE_PARTS) if spec.is_matrix else 1
    return tuple(x.reshape(parts, len(x) // parts, *x.shape[1:]) for x in pieces)


def _in_turn(measure: Callable[..., Any], stacks: Pieces) -> Any:
    """`measure` of what stands at each index of the stacks, added up."""

    def add(sums: Any, part: Pieces) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, measure(*part)), None

    first = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacks]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(measure, *first))
    return jax.lax.scan(add, zeros, stacks)[0]


def sum_all(
    measure: Measure, specs: Sequence[ParamSpec], leaves: Sequence[Pieces], mesh: Mesh, *given: jax.Array
) -> jax.Array:
    """`measure` (f32; it takes `given` last) added up over all elements of whole tensors. One scalar is sent."""
    places = [tuple(axes.place(spec.dims, mesh) for _ in pieces) for spec, pieces in zip(specs, leaves, strict=True)]
    whole = axes.place((), mesh)

    def local(leaves: Sequence[Pieces], *given: jax.Array) -> jax.Array:
        sums = sum_each(lambda spec, *pieces: measure(spec, *pieces, *given), specs, leaves)
        return axes.total_of_copies(sums, [spec.dims for spec in specs], mesh)

    return axes.spread(local, mesh, (places, *[whole] * len(given)), whole)(list(leaves), *given)


@jax.named_scope("optimizer")
def norm(tree: Any, specs: Any, mesh: Mesh) -> jax.Array:
    """Global norm of parameters, f32."""
    leaves = [(x,) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum_all(lambda _, x: jnp.square(x.astype(jnp.float32)).sum(), jax.tree.leaves(specs), leaves, mesh))
