"""What the tests of model and step share: a model small enough to compile often, batches, and runs of a few steps."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig
from packtrain.train.mesh import make_mesh
from packtrain.train.orders import SILENCE
from packtrain.train.state import State, flatten, init_state, shardings, unflatten
from packtrain.train.step import Command, Out, make_step, place_batch, place_orders

MODEL = ModelConfig(vocab=128, layers=2, embed=16, heads=8, kv_heads=4, head=4, mlp=24)
OPTIM = OptimConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant")
GUARD = GuardConfig(warmup_updates=1000)
ROWS, LENGTH, SEED = 8, 16, 3


class Rows(NamedTuple):
    """The fields of a batch that reach the device."""

    tokens_BL: np.ndarray
    targets_BL: np.ndarray
    weights_BL: np.ndarray
    positions_BL: np.ndarray
    starts_BL: np.ndarray
    ends_BL: np.ndarray


def packed_rows(index: int = 0, rows: int = ROWS, length: int = LENGTH, vocab: int = MODEL.vocab) -> Rows:
    """Two documents to a row, cut at a random place: packed causal intervals, the last target of each unweighted."""
    draw = np.random.default_rng([index, rows, length])
    text = draw.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    at = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    cut = draw.integers(1, length, (rows, 1), dtype=np.int32)
    starts = np.where(at >= cut, cut, 0).astype(np.int32)
    weights = ((at != cut - 1) & (at != length - 1)).astype(np.float32)
    return Rows(text[:, :-1], text[:, 1:], weights, at - starts, starts, at + 1)


def mesh_of(**sizes: int) -> Mesh:
    """A mesh over the first of the virtual devices."""
    return make_mesh(sizes or {"fsdp": 1}, jax.devices()[: math.prod(sizes.values())])


def host(state: State) -> dict[str, np.ndarray]:
    """A copy of every leaf by name; donation cannot reach it."""
    return {name: np.array(leaf) for name, leaf in flatten(state).items()}


Sizes = tuple[tuple[str, int], ...]


@functools.cache
def step_of(sizes: Sizes = (), microbatches: int = 1, optim: OptimConfig = OPTIM, **execution: Any) -> Any:
    """The compiled step of the tiny model; one program for all tests that ask for the same."""
    train = TrainConfig(steps=20, microbatches=microbatches, **execution)
    return make_step(MODEL, optim, GUARD, train, mesh_of(**dict(sizes)))


@functools.cache
def fresh(optim: OptimConfig = OPTIM) -> dict[str, np.ndarray]:
    """The fresh state, as made on one device."""
    return host(init_state(MODEL, optim, SEED, mesh_of()))


def placed(leaves: dict[str, np.ndarray], mesh: Mesh, optim: OptimConfig = OPTIM) -> State:
    """A state on `mesh` from its values, with no program to compile."""
    places = flatten(shardings(MODEL, optim, mesh))
    return unflatten({name: jax.device_put(x, places[name]) for name, x in leaves.items()}, MODEL, optim)


class Run(NamedTuple):
    end: dict[str, np.ndarray]
    outs: list[Out]


@functools.cache
def run_of(sizes: Sizes = (), microbatches: int = 1, optim: OptimConfig = OPTIM, **execution: Any) -> Run:
    """Three steps from the fresh state on one layout. `execution`: fields of TrainConfig."""
    mesh = mesh_of(**dict(sizes))
    state, step = placed(fresh(optim), mesh, optim), step_of(sizes, microbatches, optim, **execution)
    outs, orders = [], place_orders(SILENCE, mesh)
    for index in range(3):
        state, out = step(state, place_batch(packed_rows(index), mesh, microbatches), orders, int(Command.RUN))
        outs.append(jax.device_get(out))
    return Run(host(state), outs)
