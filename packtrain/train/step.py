"""One training step: gradient of the global batch, verdict, and the update if it is good. All of it one program."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from packtrain.train import axes, norms
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig
from packtrain.train.exchange import Exchange, Solo
from packtrain.train.guard import Verdict, judge, learn, summary
from packtrain.train.loss import losses
from packtrain.train.mesh import process_sharding
from packtrain.train.model import Batch, Tree, param_specs, places
from packtrain.train.optim import change_squares, clip_factor, schedule, updated
from packtrain.train.rounding import rounding_key
from packtrain.train.state import State, shardings

BATCH_FIELDS = ("tokens_BL", "targets_BL", "weights_BL", "positions_BL", "starts_BL", "ends_BL")
NORM_EVERY_STEPS = 10
"""The update's norm is told of the first of so many steps: it costs a pass over the state."""

Step = Callable[[State, Batch, jax.Array, jax.Array | int], tuple[State, "Out"]]


class Command(IntEnum):
    RUN = 0
    """Run this batch; a no-op while tripped."""
    RERUN = 1
    """Clear tripped, run this batch."""
    SKIP = 2
    """Clear tripped, consume the batch without an update."""
    PROBE = 3
    """Compute digest and verdict, return the state bit for bit."""


class Out(NamedTuple):
    """What a step says, whole on every process. `ran` is False for a no-op: verdict is 0 then, the rest idle talk."""

    loss: jax.Array
    grad_norm: jax.Array
    """Global norm before clipping."""
    learning_rate: jax.Array
    verdict: jax.Array
    digest: jax.Array
    """u32, of the gradient of the sum."""
    ran: jax.Array
    step: jax.Array
    """Batches consumed, this one included."""
    nll_sum: jax.Array
    weight_sum: jax.Array
    orders_R5: jax.Array
    """Every process's row of orders."""
    update_norm: jax.Array
    """Global norm of the change of the parameters; 0 where none was applied, or not told (NORM_EVERY_STEPS). With bf16
    masters that of the change before it is rounded: what was kept of it may be less, or nothing."""
    param_norm: jax.Array
    """Of the parameters after it; 0 where no update was applied."""


def gradient_sums(
    params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh
) -> tuple[tuple[jax.Array, Tree], jax.Array]:
    """((sum(w * nll), gradient of the objective's sum), sum(w)) over the batch, microbatch after microbatch, in f32.

    The objective is the nll, and z-loss where it is on: see `loss.Losses`.
    """

    def local(params: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
        nll, sums = _local_sums(params, batch, model, train, mesh)
        # Once a step, however many microbatches: what each device has summed over its own rows.
        sums = jax.tree.map(lambda g, spec: axes.summed_where_whole(g, spec.dims, mesh), sums, param_specs(model))
        return axes.total(nll, ("rows", "length"), mesh), sums

    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)  # so that gradients are f32 as well
    pieces = places(model, mesh)
    given = pieces, axes.place(("rows", "length"), mesh)
    both = axes.spread(local, mesh, given, (axes.place((), mesh), pieces))
    return both(params, batch), batch["weights_BL"].sum()


def _local_sums(
    params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh
) -> tuple[jax.Array, Tree]:
    """The same over this device's rows."""
    gradient = jax.grad(lambda p, part: losses(p, part, model, train, mesh), has_aux=True)

    def value_and_grad(params: Tree, part: Batch) -> tuple[jax.Array, Tree]:
        grads, nll = gradient(params, part)
        return nll, grads

    if train.microbatches == 1:
        return value_and_grad(params, batch)

    def add(sums: Tree, part: Batch) -> tuple[Tree, None]:
        # Without the barrier XLA gathers weights once, before the loop: unrolled, the whole model on each device.
        whole, part = jax.lax.optimization_barrier((params, part))
        return jax.tree.map(jnp.add, sums, value_and_grad(whole, part)), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zeros, split_rows(batch, train.microbatches))[0]


def split_rows(batch: Batch, microbatches: int) -> Batch:
    """[B, L] -> [microbatches, B / microbatches, L].

    Neighbours go to different parts: the same rows, whether a device splits its own or one splits them all.
    """
    return {
        name: x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1)
        for name, x in batch.items()
    }


def make_step(
    model: ModelConfig, optim: OptimConfig, guard: GuardConfig, train: TrainConfig, mesh: Mesh,
    exchange: Exchange | None = None, seed: int = 0,
) -> Step:
    """The compiled step: (state, batch, orders_R5, command) -> (state, Out). The state is donated.

    `batch` comes from `place_batch`, `orders_R5` from `place_orders`. A bad verdict, a no-op and PROBE return the state
    bit for bit, but for `tripped`. `seed` is that of the run, for stochastic rounding. Raises LayoutError when the
    model does not fit the mesh.
    """
    between = exchange or Solo()
    rate_at, specs = schedule(optim, train.steps), param_specs(model)

    def step(state: State, batch: Batch, orders_R5: jax.Array, command: jax.Array) -> tuple[State, Out]:
        (nll, grads), weight = between.reduce(*gradient_sums(state.params, batch, model, train, mesh))
        found = summary(grads, specs, mesh, nll)
        loss, norm, rate = nll / weight, found.norm / weight, rate_at(state.step)
        verdict = judge(loss, norm, state.guard, state.updates, guard, found.agree)

        ran = (command != Command.RUN) | ~state.tripped
        takes = ran & ((command == Command.RUN) | (command == Command.RERUN))
        applies, skips = takes & (verdict == Verdict.OK), command == Command.SKIP

        def apply(kept: Tree) -> Tree:
            params, opt, stats, _ = kept
            factor = clip_factor(norm, optim.clip_norm) / weight
            key = rounding_key(seed, state.step) if optim.rounding == "stochastic" else None
            params, opt, change = updated(params, opt, grads, factor, specs, rate, optim, mesh, key)
            return params, opt, learn(stats, loss, norm, state.updates), change

        # A conditional on donated buffers, not a select over the tree, which would hold both (half the state more).
        kept = (state.params, state.opt, state.guard, jnp.float32(0))
        params, opt, stats, change = jax.lax.cond(applies, apply, lambda kept: kept, kept)
        # Of what the update left: a sum of the parameters before it makes XLA keep a copy of them.
        param_norm = jnp.where(applies, norms.norm(params, specs, mesh), 0)
        update_norm = jax.lax.cond(
            applies & (state.step % NORM_EVERY_STEPS == 0),
            lambda moved: jnp.sqrt(change + change_squares(moved, specs, rate, optim, mesh)),
            lambda moved: jnp.float32(0), (params, opt),
        )
        state = State(
            params, opt,
            step=state.step + (applies | skips),
            updates=state.updates + applies,
            updates_skipped=state.updates_skipped + skips,
            tripped=jnp.where(takes, verdict != Verdict.OK, state.tripped & ~skips),
            guard=stats,
        )
        verdict = jnp.where(ran, verdict, Verdict.OK)
        return state, Out(
            loss, norm, rate, verdict, found.digest, ran, state.step, nll, weight, orders_R5,
            update_norm, param_norm,
        )

    layout = shardings(model, optim, mesh)
    whole: Any = axes.replicated(mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=(layout, Out(*[whole] * len(Out._fields))))


def make_eval(
    model: ModelConfig, train: TrainConfig, mesh: Mesh
) -> Callable[[Tree, Batch], tuple[jax.Array, jax.Array]]:
    """The compiled evaluation: (params, batch) -> (sum(w * nll), sum(w)), whole on every process.

    In microbatches, as the step: an evaluation must not need more memory than training.
    """

    def local(params: Tree, batch: Batch) -> jax.Array:
        def add(nll: jax.Array, part: Batch) -> tuple[jax.Array, None]:
            return nll + losses(params, part, model, train, mesh).nll, None

        nll = jax.lax.scan(add, jnp.float32(0), split_rows(batch, train.microbatches))[0]
        return axes.total(nll, ("rows", "length"), mesh)

    given = places(model, mesh), axes.place(("rows", "length"), mesh)
    summed = axes.spread(local, mesh, given, axes.place((), mesh))

    def evaluate(params: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return summed(params, batch), batch["weights_BL"].sum()

    whole = axes.replicated(mesh)
    return jax.jit(evaluate, out_shardings=(whole, whole))


def place_batch(batch: Any, mesh: Mesh, microbatches: int) -> dict[str, jax.Array]:
    """The global batch on the mesh: dict of [B, L] arrays, each process filling only what its devices hold.

    Rows are padded with weight 0 (and empty key intervals) to a multiple of devices-on-rows x microbatches. Every
    process hands in the same global batch. Raises LayoutError when the length does not divide over its axis.
    """
    multiple = axes.devices_on("rows", mesh) * microbatches
    fields = {name: _padded(np.asarray(getattr(batch, name)), multiple) for name in BATCH_FIELDS}
    return {name: _placed(x, mesh) for name, x in fields.items()}


def _padded(x: np.ndarray, multiple: int) -> np.ndarray:
    short = -len(x) % multiple
    return np.pad(x, ((0, short), (0, 0))) if short else x


def _placed(x: np.ndarray, mesh: Mesh) -> jax.Array:
    axes.check(("rows", "span"), x.shape, mesh)
    layout = axes.sharding(("rows", "length"), x.shape, mesh)
    return jax.make_array_from_callback(x.shape, layout, lambda index: x[index])


def place_orders(row: Any, mesh: Mesh) -> jax.Array:
    """This process's row of orders (5 integers) as its part of the int32 [ranks, 5] array a step takes.

    Row r lies on the devices of process r; the step returns all rows to all processes.
    """
    row_15 = np.asarray(row, np.int32).reshape(1, 5)
    ranks = jax.process_count()
    return jax.make_array_from_callback((ranks, 5), process_sharding(mesh), lambda index: row_15)
