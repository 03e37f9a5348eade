"""The guard: judges a step before it is applied. A pure function of the step's numbers and of statistics in the state.

The verdict says whether to apply; the digest says whether the same batch gave the same bits again. Statistics are
part of the state, so a resumed run judges as an uncut one would.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from packtrain.train import axes, norms
from packtrain.train.axes import ParamSpec
from packtrain.train.config import GuardConfig
from packtrain.train.model import Tree

MEMORY_UPDATES = 128
"""Running statistics weigh the last updates by about this many; before that every update counts alike."""
LEAST_RELATIVE_DEVIATION = 0.01
"""A deviation below this share of the mean is taken as this share: a flat loss must not make every ripple a spike."""


class Verdict(IntEnum):
    OK = 0
    NON_FINITE = 1
    SPIKE = 2
    COPIES_DIFFER = 3
    """Devices that hold copies of one gradient hold different bits: no batch does that."""


class GuardStats(NamedTuple):
    """Running mean and variance over applied updates, f32 scalars."""

    loss_mean: jax.Array
    loss_variance: jax.Array
    norm_mean: jax.Array
    norm_variance: jax.Array

    @classmethod
    def start(cls) -> GuardStats:
        return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))


def judge(
    loss: jax.Array, norm: jax.Array, stats: GuardStats, updates: jax.Array, guard: GuardConfig,
    agree: jax.Array | bool = True,
) -> jax.Array:
    """The verdict on a step with this loss and gradient norm, i32 (see Verdict).

    Any NaN or inf in a gradient is in its norm.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    spike = _far_above(loss, stats.loss_mean, stats.loss_variance, guard)
    spike |= _far_above(norm, stats.norm_mean, stats.norm_variance, guard)
    spike &= (updates >= max(guard.warmup_updates, 2)) & (guard.spike_sigmas > 0)
    verdict = jnp.where(finite, jnp.where(spike, Verdict.SPIKE, Verdict.OK), Verdict.NON_FINITE)
    return jnp.where(agree, verdict, Verdict.COPIES_DIFFER).astype(jnp.int32)


def _far_above(x: jax.Array, mean: jax.Array, variance: jax.Array, guard: GuardConfig) -> jax.Array:
    deviation = jnp.maximum(jnp.sqrt(variance), LEAST_RELATIVE_DEVIATION * jnp.abs(mean))
    return x > mean + guard.spike_sigmas * deviation


def learn(stats: GuardStats, loss: jax.Array, norm: jax.Array, updates: jax.Array) -> GuardStats:
    """Statistics with one more applied update; `updates` counts those before it."""
    share = 1.0 / jnp.minimum(updates.astype(jnp.float32) + 1, MEMORY_UPDATES)
    loss_mean, loss_variance = _running(stats.loss_mean, stats.loss_variance, loss, share)
    return GuardStats(loss_mean, loss_variance, *_running(stats.norm_mean, stats.norm_variance, norm, share))


def _running(mean: jax.Array, variance: jax.Array, x: jax.Array, share: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exponentially weighted mean and variance (West 1979); with share 1/n they are the plain ones."""
    gap = x - mean
    return mean + share * gap, (1 - share) * (variance + share * gap * gap)


class Summary(NamedTuple):
    """Of a gradient, the same on every device whatever each holds: what they decide by must be one thing."""

    norm: jax.Array
    """Global norm, f32. Where copies differ, the largest of theirs."""
    digest: jax.Array
    """u32: wrap-around sum of the bits of every element. Integer addition has no order, so no layout enters."""
    agree: jax.Array
    """bool: all copies of every piece, and of the loss, have the same bits."""


@jax.named_scope("optimizer")
def summary(grads: Tree, specs: Tree, mesh: Mesh, loss: jax.Array) -> Summary:
    """Of the whole gradient and the loss (f32 scalar), taken from what each device really holds. `specs` says how a
    leaf is cut.

    Computed from one copy alone, norm and verdict could differ between replicas, and some would update while others
    wait for them. On a mesh that costs a few scalars.
    """
    places, whole = jax.tree.map(lambda spec: axes.place(spec.dims, mesh), specs), axes.place((), mesh)

    def local(pieces: Tree, loss: jax.Array) -> tuple[jax.Array, ...]:
        squares, digest = _sums(pieces, specs, mesh)
        bits = jnp.stack([digest, jax.lax.bitcast_convert_type(loss, jnp.uint32)])
        most, least = axes.greatest_anywhere(bits, mesh), ~axes.greatest_anywhere(~bits, mesh)
        return axes.greatest_anywhere(jnp.sqrt(squares), mesh), most[0], (most == least).all()

    return Summary(*axes.spread(local, mesh, (places, whole), (whole,) * 3)(grads, loss))


def _sums(pieces: Tree, specs: Tree, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Sum of squares and of bits over all pieces, as the devices that this one adds up with know them."""
    by_cut: dict[tuple[str, ...], list[tuple[jax.Array, jax.Array]]] = {}
    dims_of = {axes.cutting(spec.dims, mesh): spec.dims for spec in jax.tree.leaves(specs)}
    leaves = [(piece,) for piece in jax.tree.leaves(pieces)]
    for spec, found in zip(jax.tree.leaves(specs), norms.sum_each(_of_piece, jax.tree.leaves(specs), leaves)):
        by_cut.setdefault(axes.cutting(spec.dims, mesh), []).append(found)
    squares, digests = zip(*(
        [axes.total(sum(parts), dims_of[cut], mesh) for parts in zip(*leaves)] for cut, leaves in by_cut.items()
    ))
    return jnp.stack(squares).sum(), jnp.stack(digests).sum(dtype=jnp.uint32)


def _of_piece(spec: ParamSpec, piece: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.square(piece).sum(), jax.lax.bitcast_convert_type(piece, jnp.uint32).sum(dtype=jnp.uint32)
