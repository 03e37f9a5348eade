"""What an optimizer makes of one parameter's gradient, before learning rate and weight decay.

An optimizer is a *rule* for one parameter and the *slots* it keeps for it between steps. Everything is decided by the
parameter's named dims, never by its sizes: a slot's dims are some of the parameter's, so it is sharded by the same
table. The update of all parameters is in optim.py.

| `optim.name` | matrices inside layers | embedding and head | vectors | floats kept a weight |
|---|---|---|---|---|
| `adamw` | AdamW | AdamW | AdamW | 2 |
| `muon` | orthogonalised momentum | AdamW | AdamW | 1 in layers, 2 elsewhere |
| `adafactor` | factored second moment | the same | second moment | nearly 0 |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from packtrain.train import axes
from packtrain.train.axes import ParamSpec
from packtrain.train.config import OptimConfig

Slots = dict[str, jax.Array]
Direction = tuple[jax.Array, Slots]

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
"""Odd polynomial that takes singular values in (0, 1] to about 1 (0.7 to 1.2). Source: Keller Jordan,
kellerjordan.github.io/posts/muon."""
MATCHED_RMS = 0.2
"""Root mean square of AdamW's usual update; Muon's is scaled to it. Source: arXiv:2502.16982, section 2.2."""
DECAY_POWER = 0.8
LARGEST_RMS = 1.0
"""Adafactor: the second moment forgets as 1 - t**-0.8, and an update's root mean square is at most 1. Source:
arXiv:1804.04235, sections 6 and 7.2."""
TINY = 1e-30
LEAST_NORM = 1e-12
"""A gradient so small that its squares vanish in f32 stays small, rather than being blown up."""


class Sides(NamedTuple):
    """A matrix as named dims: `layer` stacks it, `embed` is the side of the residual stream, the rest the other."""

    stack: tuple[int, ...]
    stream: tuple[int, ...]
    inner: tuple[int, ...]


def sides(spec: ParamSpec) -> Sides:
    """Positions of a matrix's dims. Heads and what is in a head are one side: q is [embed, heads * head]."""
    at = {dim: n for n, dim in enumerate(spec.dims)}
    stack, stream = ((at[dim],) if dim in at else () for dim in ("layer", "embed"))
    inner = tuple(n for dim, n in at.items() if dim not in ("layer", "embed"))
    assert stream and inner, f"{spec.dims} is no matrix with one side on the residual stream"
    return Sides(stack, stream, inner)


def is_orthogonal(spec: ParamSpec) -> bool:
    """Whether Muon takes it: a matrix inside the layers. Embedding and head have the dim `vocab`."""
    return spec.is_matrix and "vocab" not in spec.dims


# --- slots: name -> dims -------------------------------------------------------------------------------


def adam_slots(spec: ParamSpec) -> dict[str, tuple[str, ...]]:
    return {"mu": spec.dims, "nu": spec.dims}


def muon_slots(spec: ParamSpec) -> dict[str, tuple[str, ...]]:
    return {"mu": spec.dims} if is_orthogonal(spec) else adam_slots(spec)


def adafactor_slots(spec: ParamSpec) -> dict[str, tuple[str, ...]]:
    if not spec.is_matrix:
        return {"nu": spec.dims}
    _, stream, inner = sides(spec)
    return {"row": _without(spec.dims, inner), "column": _without(spec.dims, stream)}


def _without(dims: tuple[str, ...], left_out: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(dim for n, dim in enumerate(dims) if n not in left_out)


# --- rules ---------------------------------------------------------------------------------------------


def adam(grad: jax.Array, slots: Slots, count: jax.Array, spec: ParamSpec, optim: OptimConfig, mesh: Mesh) -> Direction:
    """Bias-corrected Adam by optax; `count` is that of updates applied before. Source: arXiv:1412.6980."""
    rule = optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.epsilon)
    direction, kept = rule.update(grad, optax.ScaleByAdamState(count, slots["mu"], slots["nu"]))
    assert isinstance(kept, optax.ScaleByAdamState) and isinstance(direction, jax.Array)
    return direction, {"mu": kept.mu, "nu": kept.nu}


def adam_direction(mu: jax.Array, nu: jax.Array, count: jax.Array, optim: OptimConfig) -> jax.Array:
    """The direction that `adam` gave, from the slots it left; `count` includes its update."""
    updates = count.astype(jnp.float32)
    scale = jnp.sqrt(nu / (1 - optim.beta2**updates)) + optim.epsilon
    return mu / (1 - optim.beta1**updates) / scale


def muon(grad: jax.Array, slots: Slots, count: jax.Array, spec: ParamSpec, optim: OptimConfig, mesh: Mesh) -> Direction:
    """Nesterov momentum, each layer's matrix orthogonalised and scaled to the size of AdamW's updates, so that
    learning rate and decay are those of AdamW. Not optax's: that chooses no placement and works on all layers at once.
    """
    if not is_orthogonal(spec):
        return adam(grad, slots, count, spec, optim, mesh)
    momentum = optim.muon_momentum
    mu = momentum * slots["mu"] + (1 - momentum) * grad
    ahead = momentum * mu + (1 - momentum) * grad
    return orthogonalised(ahead, spec, mesh), {"mu": mu}


def adafactor(
    grad: jax.Array, slots: Slots, count: jax.Array, spec: ParamSpec, optim: OptimConfig, mesh: Mesh
) -> Direction:
    """Gradient over the root of its factored second moment, clipped. No momentum, no scaling by the parameter's size:
    learning rates are like AdamW's. Not optax's: that factors over the two largest dims, `layer` among them.
    """
    share = (count.astype(jnp.float32) + 1) ** -DECAY_POWER
    square = jnp.square(grad) + TINY
    if spec.is_matrix:
        scale, kept = _factored(square, slots, share, sides(spec))
    else:
        kept = {"nu": slots["nu"] + share * (square - slots["nu"])}
        scale = jax.lax.rsqrt(kept["nu"])
    direction = grad * scale
    each = tuple(n for n, dim in enumerate(spec.dims) if dim != "layer")
    rms = jnp.sqrt(jnp.mean(jnp.square(direction), axis=each, keepdims=True))
    return direction / jnp.maximum(1.0, rms / LARGEST_RMS), kept


def _factored(square: jax.Array, slots: Slots, share: jax.Array, of: Sides) -> tuple[jax.Array, Slots]:
    """1 / sqrt of row mean times column mean over the whole mean, for each stacked matrix by itself."""
    row = slots["row"] + share * (square.mean(of.inner) - slots["row"])
    column = slots["column"] + share * (square.mean(of.stream) - slots["column"])
    stacked = len(of.stack)
    row_share = row / row.mean(tuple(range(stacked, row.ndim)), keepdims=True)
    # Two roots, not the root of a product: with an unseen token and a quiet channel that product is 0 in f32.
    scales = (jax.lax.rsqrt(jnp.maximum(x, TINY)) for x in (row_share, column))
    row_scale, column_scale = (jnp.expand_dims(x, side) for x, side in zip(scales, (of.inner, of.stream)))
    return row_scale * column_scale, {"row": row, "column": column}


def orthogonalised(x: jax.Array, spec: ParamSpec, mesh: Mesh) -> jax.Array:
    """Each layer's matrix with its singular values brought to about 1, times 0.2 * sqrt(longer side).

    On a mesh the layers are dealt to the devices, which work on whole matrices: a matrix cut over devices would be
    gathered in each of the 15 products, or all of it computed on all of them.
    """
    _, stream, inner = sides(spec)
    first, second = sorted((stream, inner))  # neighbours in memory, so that nothing moves
    matrix = tuple(math.prod(spec.shape[n] for n in side) for side in (first, second))

    def local(x: jax.Array) -> jax.Array:
        whole = axes.dealt(x, spec.dims, mesh)
        flat = jax.lax.map(newton_schulz, whole.reshape(-1, *matrix))  # one layer's products at a time: little memory
        flat = MATCHED_RMS * math.sqrt(max(matrix)) * flat
        return axes.returned(flat.reshape(whole.shape), len(x), spec.dims, mesh)

    place = axes.place(spec.dims, mesh)
    return axes.spread(local, mesh, (place,), place)(x)


def newton_schulz(x: jax.Array) -> jax.Array:
    """[a, b] -> a x + b (x x') x + c (x x')**2 x, five times from x over its Frobenius norm."""
    a, b, c = NEWTON_SCHULZ
    x = x / jnp.maximum(jnp.linalg.norm(x), LEAST_NORM)
    wide = x.shape[0] <= x.shape[1]  # products of the shorter side
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T if wide else x.T @ x
        mix = b * square + c * (square @ square)
        x = a * x + (mix @ x if wide else x @ mix)
    return x


Rule = Callable[[jax.Array, Slots, jax.Array, ParamSpec, OptimConfig, Mesh], Direction]


class Optimizer(NamedTuple):
    slots: Callable[[ParamSpec], dict[str, tuple[str, ...]]]
    rule: Rule
    names: tuple[str, ...]
    """Of all slots that any parameter has."""


OPTIMIZERS = {
    "adamw": Optimizer(adam_slots, adam, ("mu", "nu")),
    "muon": Optimizer(muon_slots, muon, ("mu", "nu")),
    "adafactor": Optimizer(adafactor_slots, adafactor, ("row", "column", "nu")),
}
