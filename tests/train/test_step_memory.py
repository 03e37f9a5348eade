"""What the guard costs in memory: nothing to speak of."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packtrain.train import axes
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig
from packtrain.train.guard import summary
from packtrain.train.model import param_specs
from packtrain.train.optim import clip_factor, schedule, updated
from packtrain.train.orders import SILENCE
from packtrain.train.state import State, state_specs, unflatten
from packtrain.train.step import Command, gradient_sums, make_step, place_batch, place_orders
from tests.train.lowering import SHIPPED
from tests.train.tiny import mesh_of, packed_rows

MODEL = ModelConfig(vocab=512, layers=2, embed=64, heads=4, kv_heads=4, head=16, mlp=192)
OPTIM = OptimConfig()
SHARE = 0.02


def unguarded(train: TrainConfig, mesh: jax.sharding.Mesh) -> Any:
    """The same step from the same pieces, applied whatever comes: no verdict, no digest, no conditional."""

    def step(state: State, batch: dict[str, jax.Array], orders: jax.Array, command: jax.Array) -> tuple[State, Any]:
        (total, sums), weight = gradient_sums(state.params, batch, MODEL, train, mesh)
        norm = summary(sums, param_specs(MODEL), mesh, total).norm / weight
        rate = schedule(OPTIM, train.steps)(state.step)
        factor = clip_factor(norm, OPTIM.clip_norm) / weight
        params, opt, _ = updated(state.params, state.opt, sums, factor, param_specs(MODEL), rate, OPTIM, mesh)
        state = state._replace(params=params, opt=opt, step=state.step + 1, updates=state.updates + 1)
        return state, (total / weight, norm, rate, orders + command)

    return jax.jit(step, donate_argnums=0)


@functools.cache
def arguments() -> tuple[Any, ...]:
    """So few tokens that memory peaks in the update: there a second copy of anything of the state would show."""
    mesh = mesh_of()
    state = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=axes.sharding(dims, shape, mesh))
        for name, (shape, dtype, dims) in state_specs(MODEL, OPTIM).items()
    }
    batch = place_batch(packed_rows(rows=2, length=8, vocab=512), mesh, 1)
    return unflatten(state, MODEL, OPTIM), batch, place_orders(SILENCE, mesh), jnp.int32(Command.RUN)


def memory(step: Any) -> Any:
    return step.lower(*arguments()).compile(SHIPPED).memory_analysis()


@functools.cache
def guarded() -> Any:
    return memory(make_step(MODEL, OPTIM, GuardConfig(), TrainConfig(), mesh_of()))


def test_the_guard_needs_no_second_state() -> None:
    """Temporaries plus outputs of the guarded step are within 2% of those of the same step without guard."""
    bare = memory(unguarded(TrainConfig(), mesh_of()))
    wanted, found = (m.temp_size_in_bytes + m.output_size_in_bytes for m in (bare, guarded()))
    assert found <= (1 + SHARE) * wanted, f"{found} bytes against {wanted}"


def test_the_state_is_donated() -> None:
    """The step's state comes back in the buffers it was handed: outputs alias all of them."""
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype, _ in state_specs(MODEL, OPTIM).values()]
    assert guarded().alias_size_in_bytes >= sum(sizes)
