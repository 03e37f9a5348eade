"""The state of a training run: one explicit tree. What is not in here does not survive a restart.

Flattened, each leaf has a stable name (`params/layers/q`, `opt/mu/layers/q`, `guard/loss_mean`, `step`), a logical
shape and named dims. None of them depends on the mesh or on how layers are executed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from packtrain.train import axes
from packtrain.train.axes import ParamSpec
from packtrain.train.config import ModelConfig, OptimConfig
from packtrain.train.guard import GuardStats
from packtrain.train.model import Tree, init_params, name_of, param_specs
from packtrain.train.optim import slot_dims
from packtrain.train.optim import start as optim_start
from packtrain.train.rounding import DTYPES

LeafSpec = tuple[tuple[int, ...], str, tuple[str, ...]]
"""(logical shape, dtype, dims) of one leaf."""


class State(NamedTuple):
    params: Tree
    opt: Any
    """What the optimizer keeps: slots by name, and the count of updates applied."""
    step: jax.Array
    """i32: batches consumed on this lineage."""
    updates: jax.Array
    """i32: updates applied."""
    updates_skipped: jax.Array
    """i32: batches consumed without an update. step = updates + updates_skipped."""
    tripped: jax.Array
    """bool: a verdict was bad; steps are no-ops until a command clears it."""
    guard: GuardStats


def _start(model: ModelConfig, optim: OptimConfig, seed: jax.Array | int) -> State:
    params = jax.tree.map(lambda p: p.astype(DTYPES[optim.master]), init_params(model, seed))
    opt, zero = optim_start(optim, param_specs(model)), jnp.zeros((), jnp.int32)
    return State(params, opt, zero, zero, zero, jnp.zeros((), bool), GuardStats.start())


def _shapes(model: ModelConfig, optim: OptimConfig) -> State:
    return jax.eval_shape(functools.partial(_start, model, optim), jax.ShapeDtypeStruct((), jnp.uint32))


def _dims(model: ModelConfig, optim: OptimConfig) -> State:
    """The same tree with a tuple of dims at each leaf."""
    specs = param_specs(model)
    params, opt = jax.tree.map(lambda spec: spec.dims, specs), slot_dims(optim, specs)
    scalar: Any = ()
    return State(params, opt, scalar, scalar, scalar, scalar, GuardStats(*[scalar] * len(GuardStats._fields)))


def shardings(model: ModelConfig, optim: OptimConfig, mesh: Mesh) -> State:
    """Where each leaf lies on `mesh`. Raises LayoutError where a size cannot be cut."""
    shapes, dims = _shapes(model, optim), _dims(model, optim)
    return jax.tree.map(lambda leaf, names: axes.sharding(names, leaf.shape, mesh), shapes, dims)


def init_state(model: ModelConfig, optim: OptimConfig, seed: int, mesh: Mesh) -> State:
    """A fresh state on `mesh`; its bits depend on the model and the seed only."""
    start = jax.jit(functools.partial(_start, model, optim), out_shardings=shardings(model, optim, mesh))
    return start(jnp.uint32(seed))


def flatten(state: State) -> dict[str, Any]:
    """name -> leaf, in the order of the tree."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def unflatten(leaves: dict[str, Any], model: ModelConfig, optim: OptimConfig) -> State:
    """The inverse of `flatten`; `leaves` must be exactly those of `state_specs`."""
    shapes = _shapes(model, optim)
    assert leaves.keys() == flatten(shapes).keys(), "a leaf is missing or unknown"
    return jax.tree.unflatten(jax.tree.structure(shapes), [leaves[name] for name in flatten(shapes)])


def state_specs(model: ModelConfig, optim: OptimConfig) -> dict[str, LeafSpec]:
    """name -> (logical shape, dtype, dims) of every leaf."""
    shapes, dims = flatten(_shapes(model, optim)), _dims(model, optim)
    structure: Any = jax.tree.structure(_shapes(model, optim))
    names = structure.flatten_up_to(dims)
    return {name: (leaf.shape, str(leaf.dtype), of) for (name, leaf), of in zip(shapes.items(), names, strict=True)}


def count_parameters(model: ModelConfig) -> int:
    leaves = jax.tree.leaves(param_specs(model), is_leaf=lambda x: isinstance(x, ParamSpec))
    return sum(math.prod(spec.shape) for spec in leaves)
