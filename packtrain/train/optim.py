"""Learning-rate schedules and the update. Schedules read `step`; bias correction counts the updates applied.

What an optimizer makes of a gradient is in directions.py; here are rate, clipping, weight decay and the norms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from packtrain.train import axes, norms
from packtrain.train.axes import ParamSpec
from packtrain.train.config import OptimConfig
from packtrain.train.directions import OPTIMIZERS, Slots, adam_direction
from packtrain.train.model import Tree, name_of
from packtrain.train.rounding import DTYPES, rounded

Path = tuple[Any, ...]


def schedule(optim: OptimConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """step (batches consumed before this one) -> learning rate, f32.

    Linear warmup, then `constant`; `cosine` to `final_fraction` at `steps`; or `wsd`: constant, then linear to
    `final_fraction` over the last `decay_fraction` of the run. Source of wsd: arXiv:2404.06395.
    """

    def rate(step: jax.Array) -> jax.Array:
        done = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, (done + 1) / max(optim.warmup_steps, 1))
        return optim.learning_rate * warm * _fall(optim, steps, done)

    return rate


def _fall(optim: OptimConfig, steps: int, done: jax.Array) -> jax.Array | float:
    """Share of the full rate left after `done` of `steps` steps, warmup aside."""
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "cosine":
        span = max(steps - optim.warmup_steps, 1)
        x = jnp.clip((done - optim.warmup_steps) / span, 0.0, 1.0)
        share = 0.5 * (1 + jnp.cos(jnp.pi * x))
    else:
        share = jnp.clip((steps - done) / max(steps * optim.decay_fraction, 1.0), 0.0, 1.0)
    return optim.final_fraction + (1 - optim.final_fraction) * share


def start(optim: OptimConfig, specs: Tree) -> dict[str, Any]:
    """The optimizer's fresh state: `count` of updates applied, a tree for each slot, None where a parameter has none.

    In checkpoints a leaf is called `opt/<slot>/<parameter>`, as in `opt/mu/layers/q`.
    """

    def zeros(spec: ParamSpec, slot: str) -> jax.Array | None:
        dims = OPTIMIZERS[optim.name].slots(spec).get(slot)
        size = dict(zip(spec.dims, spec.shape))
        return None if dims is None else jnp.zeros([size[dim] for dim in dims], kept_as(slot, optim))

    return {"count": jnp.zeros((), jnp.int32)} | _by_slot(optim, specs, zeros)


def kept_as(slot: str, optim: OptimConfig) -> jnp.dtype:
    """Type of a slot between steps. Factored statistics are f32: they are few."""
    return DTYPES[optim.moments if slot in ("mu", "nu") else "f32"]


def slot_dims(optim: OptimConfig, specs: Tree) -> dict[str, Any]:
    """The same tree with a tuple of dims at each leaf."""
    return {"count": ()} | _by_slot(optim, specs, lambda spec, slot: OPTIMIZERS[optim.name].slots(spec).get(slot))


def _by_slot(optim: OptimConfig, specs: Tree, of: Callable[[ParamSpec, str], Any]) -> dict[str, Any]:
    return {slot: jax.tree.map(lambda spec, s=slot: of(spec, s), specs) for slot in OPTIMIZERS[optim.name].names}


def clip_factor(norm: jax.Array, clip_norm: float) -> jax.Array | float:
    """What brings a gradient of this global norm down to at most `clip_norm`; 0: no clipping."""
    if clip_norm == 0:
        return 1.0
    return jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))


Kept = tuple[jax.Array, Slots]
"""Of a parameter, or some layers of it: value and slots, as they are kept."""
Part = Callable[..., tuple[jax.Array, Slots, jax.Array]]
"""(value, gradient, slots, number of the first layer) -> value, slots, and the change in f32."""
Carry = tuple[Kept, Kept, jax.Array, jax.Array]
"""What is kept; what the turn before made; where that belongs; squares of the change so far."""


class Update(NamedTuple):
    """What one update has for all parameters: see `updated`."""

    factor: jax.Array | float
    rate: jax.Array
    updates: jax.Array
    """Applied before this one."""
    optim: OptimConfig
    mesh: Mesh
    key: jax.Array | None


class Moved(NamedTuple):
    """One parameter after an update."""

    value: jax.Array
    slots: Slots
    change: jax.Array
    """Sum of squares of the change; 0 where `change_squares` finds it afterwards."""


@jax.named_scope("optimizer")
def updated(
    params: Tree, opt: dict[str, Any], sums: Tree, factor: jax.Array | float, specs: Tree, rate: jax.Array,
    optim: OptimConfig, mesh: Mesh, key: jax.Array | None = None,
) -> tuple[Tree, dict[str, Any], jax.Array]:
    """One update by the gradient `factor * sums`: p - rate * (direction + decay * p), decay on matrices only. The third
    is the sum of squares of the change, as far as `Moved` tells it.

    All of it in f32; what is kept in bf16 is rounded at the end, at random where `key` is given. The factor (1 / sum of
    weights, and the clipping) comes along so that it fuses with the moments, no pass of its own.
    Source of decoupled decay: arXiv:1711.05101.
    """
    names, update = OPTIMIZERS[optim.name].names, Update(factor, rate, opt["count"], optim, mesh, key)

    def move(path: Path, spec: ParamSpec, p: jax.Array, total: jax.Array, *kept: jax.Array | None) -> Moved:
        slots = {slot: x for slot, x in zip(names, kept) if x is not None}
        part = functools.partial(_moved, update, spec, name_of(path))
        if spec.is_matrix and spec.dims[0] == "layer" and not _is_adam(slots):
            return _in_turn(part, p, total, slots, axes.dealt_at_once(len(p), spec.dims, mesh))
        value, moved, change = part(p, total, slots)
        return Moved(value, moved, jnp.float32(0) if _is_adam(slots) else jnp.square(change).sum())

    moved = jax.tree.map_with_path(move, specs, params, sums, *[opt[name] for name in names])
    all_moved = jax.tree.leaves(moved, is_leaf=lambda x: isinstance(x, Moved))
    slots = {name: jax.tree.map(lambda _, m, n=name: m.slots.get(n), specs, moved) for name in names}
    change = jnp.float32(sum(m.change for m in all_moved))
    return jax.tree.map(lambda _, m: m.value, specs, moved), {"count": opt["count"] + 1} | slots, change


def _moved(
    update: Update, spec: ParamSpec, name: str, p: jax.Array, total: jax.Array, slots: Slots,
    first: jax.Array | None = None,
) -> tuple[jax.Array, Slots, jax.Array]:
    """A `Part`."""
    optim, key = update.optim, update.key
    p, slots = p.astype(jnp.float32), {slot: x.astype(jnp.float32) for slot, x in slots.items()}
    rule = OPTIMIZERS[optim.name].rule
    direction, slots = rule(total * update.factor, slots, update.updates, spec, optim, update.mesh)
    change = update.rate * (direction + _decay(spec, optim) * p)
    value = rounded(p - change, DTYPES[optim.master], key, name, first)
    kept = {slot: rounded(x, kept_as(slot, optim), key, f"{slot}/{name}", first) for slot, x in slots.items()}
    return value, kept, change


def _in_turn(part: Part, p: jax.Array, total: jax.Array, slots: Slots, width: int) -> Moved:
    """`part` of `width` layers after the other, written where they were read. So what a rule needs besides gradient,
    parameter and slots is as large as a few layers: done all at once it was as large as three parameters (measured).
    """
    kept, zero = (p, slots), jnp.int32(0)
    carry = kept, _read(kept, zero, width), zero, jnp.float32(0)
    turn = functools.partial(_turn, part, total, width)
    kept, last, at, squares = jax.lax.fori_loop(0, -(-len(p) // width), turn, carry)
    return Moved(*_written(kept, last, at), squares)


def _turn(part: Part, total: jax.Array, width: int, n: jax.Array, carry: Carry) -> Carry:
    """A part is written at the beginning of the next turn, where nobody reads what it overwrites: else XLA copies the
    whole stack in each. Where the layers do not divide, the last part begins with layers that are done, and leaves them
    alone.
    """
    kept, last, at, squares = carry
    kept, first = _written(kept, last, at), jnp.minimum(n * width, len(total) - width)
    old, grads = _read((kept, total), first, width)
    value, slots, change = part(old[0], grads, old[1], first)
    new = value, slots
    if len(total) % width:
        due = first + jnp.arange(width) >= n * width
        new, change = jax.tree.map(functools.partial(_where, due), (new, change), (old, jnp.zeros_like(change)))
    return kept, new, first, squares + jnp.square(change).sum()


def _read(stacks: Any, first: jax.Array, width: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, width), stacks)


def _written(stacks: Kept, part: Kept, first: jax.Array) -> Kept:
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, first, 0), stacks, part)


def _where(due: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """By layer."""
    return jnp.where(due.reshape(-1, *[1] * (new.ndim - 1)), new, old)


@jax.named_scope("optimizer")
def change_squares(
    moved: tuple[Tree, dict[str, Any]], specs: Tree, rate: jax.Array, optim: OptimConfig, mesh: Mesh
) -> jax.Array:
    """What `updated` left out of its sum of squares, from the parameters and slots it left: the change of those that
    AdamW moved, from p' = p - change, change = rate * (direction + decay * p).

    Summed where the change is made, XLA on CPU writes it to memory first, which takes four times as long as the update
    (measured: 125 against 24 ms for 17M parameters) and as much memory as the parameters; so, and a layer at a time,
    42 ms and next to nothing.
    """

    def squares(spec: ParamSpec, *given: jax.Array) -> jax.Array:
        value, mu, nu, rate, count = (x.astype(jnp.float32) for x in given)
        decay = _decay(spec, optim)
        change = rate * (adam_direction(mu, nu, count, optim) + decay * value) / (1 - rate * decay)
        return jnp.square(change).sum()

    params, opt = moved
    if "mu" not in opt or "nu" not in opt:
        return jnp.float32(0)
    trees = [jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in (specs, params, opt["mu"], opt["nu"])]
    chosen = [(spec, tuple(pieces)) for spec, *pieces in zip(*trees, strict=True) if all(x is not None for x in pieces)]
    kept_specs, kept = [spec for spec, _ in chosen], [pieces for _, pieces in chosen]
    return norms.sum_all(squares, kept_specs, kept, mesh, rate, opt["count"])


def _decay(spec: ParamSpec, optim: OptimConfig) -> float:
    return optim.weight_decay if spec.is_matrix else 0.0


def _is_adam(slots: Slots) -> bool:
    return slots.keys() == {"mu", "nu"}
