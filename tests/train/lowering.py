"""Whole training steps from shapes alone: traced, lowered or compiled, with nothing allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from packtrain.core.config import override
from packtrain.recipes.spec import RunSpec
from packtrain.train import axes
from packtrain.train.axes import AnyMesh
from packtrain.train.config import GuardConfig
from packtrain.train.mesh import abstract_mesh, make_mesh
from packtrain.train.sections import Sections
from packtrain.train.shape import Layout
from packtrain.train.state import unflatten
from packtrain.train.step import BATCH_FIELDS, make_step

AS_USERS = "PACKTRAIN_TESTS_COMPILE_AS_USERS"
"""Environment variable: where it is set, tests of the trainer compile as the programs that users run are compiled, many
times slower. tests/soak/test_as_users.py sets it."""
QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false"
"""For XLA_FLAGS of a process that compiles to see what a program does, not how well it is compiled."""
SHIPPED: Any = {
    "xla_cpu_use_fusion_emitters": True, "xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True,
}
"""To compile a program whose memory or text is judged with the emitters that users have, whatever the flags of the
process. What LLVM makes of it afterwards is left out: it changes neither, and is a third of the time."""


def arguments(of: Layout, mesh: AnyMesh) -> tuple[Any, ...]:
    """Of a step, as shapes that know where they lie."""
    state = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=axes.sharding(dims, shape, mesh))
        for name, (shape, dtype, dims) in of.leaves.items()
    }
    shape = of.rows, of.spec.data.length
    lies = axes.sharding(("rows", "length"), shape, mesh)
    kinds = {name: jnp.float32 if name == "weights_BL" else jnp.int32 for name in BATCH_FIELDS}
    batch = {name: jax.ShapeDtypeStruct(shape, kind, sharding=lies) for name, kind in kinds.items()}
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    orders = jax.ShapeDtypeStruct((1, 4), jnp.int32, sharding=whole)
    command = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return unflatten(state, of.spec.model, of.spec.optim), batch, orders, command


def traced(of: Layout, devices: bool = True) -> Any:
    """The step on the first of the devices there are, or on none."""
    sizes = of.spec.train.mesh
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes.values())]) if devices else abstract_mesh(sizes)
    step: Any = make_step(of.spec.model, of.spec.optim, GuardConfig(), of.spec.train, mesh)
    return step.trace(*arguments(of, mesh))


def compiled(of: Layout) -> Any:
    return traced(of).lower().compile(SHIPPED)


def sections(recipe: RunSpec, overrides: Sequence[str] = (), **mesh: int) -> Sections:
    """A recipe's sections as the trainer reads them, on this mesh."""
    sizes = ", ".join(f"{axis} = {size}" for axis, size in mesh.items())
    made = override(recipe, [*overrides, f"train.mesh={{{sizes}}}"])
    return Sections(model=made.model, optim=made.optim, train=made.train, data=made.data)
