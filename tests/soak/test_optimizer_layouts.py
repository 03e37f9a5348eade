"""Muon and Adafactor on every kind of mesh, with layers that divide over its devices and layers that do not."""

from __future__ import annotations

import functools
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from packtrain.train.config import ModelConfig, OptimConfig, TrainConfig
from packtrain.train.orders import SILENCE
from packtrain.train.state import init_state
from packtrain.train.step import Command, make_step, place_batch, place_orders
from tests.train.tiny import GUARD, MODEL, OPTIM, SEED, Run, host, mesh_of, packed_rows

# Devices as in tests/train, for when this file runs alone; its quick compilation is then left out.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)

pytestmark = pytest.mark.soak

PARAM_TOLERANCE, SLOT_TOLERANCE, NORM_TOLERANCE = 2e-5, 2e-4, 5e-5
"""Of parameters absolute; of slots and statistics relative to the largest entry; of norms relative. f32 sums in
another order, which Newton-Schulz widens by up to 485. Measured: 4e-6, 8e-5, 2e-5, all at 12 layers; at one to four
6e-7, 3e-5, 3e-7."""
CASES: list[tuple[int, dict[str, int]]] = [
    (2, {"replica": 2}), (2, {"context": 2}), (3, {"fsdp": 2, "context": 2}),
    (3, {"replica": 2, "fsdp": 2, "tensor": 2}), (4, {"fsdp": 2, "tensor": 2}), (12, {"fsdp": 8}),
    (1, {"fsdp": 2, "tensor": 2}), (1, {"replica": 2}),
]


@functools.cache
def run_of(name: str, layers: int, sizes: tuple[tuple[str, int], ...]) -> Run:
    """Three steps from the fresh state."""
    model: ModelConfig = msgspec.structs.replace(MODEL, layers=layers)
    optim: OptimConfig = msgspec.structs.replace(OPTIM, name=name)
    mesh, outs = mesh_of(**dict(sizes)), list[Any]()
    step = make_step(model, optim, GUARD, TrainConfig(steps=20), mesh)
    state = init_state(model, optim, SEED, mesh)
    for index in range(3):
        batch = place_batch(packed_rows(index), mesh, 1)
        state, out = step(state, batch, place_orders(SILENCE, mesh), int(Command.RUN))
        outs.append(jax.device_get(out))
    return Run(host(state), outs)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize(("layers", "mesh"), CASES, ids=str)
def test_every_mesh_agrees_with_one_device(name: str, layers: int, mesh: dict[str, int]) -> None:
    """State, norms and losses after three steps, one layer, layers dealt evenly and layers that fill up included."""
    run, base = run_of(name, layers, tuple(mesh.items())), run_of(name, layers, ())
    for leaf, wanted in base.end.items():
        is_param = leaf.startswith("params/")
        bound = PARAM_TOLERANCE if is_param else SLOT_TOLERANCE * max(np.abs(wanted).max(), 1e-30)
        np.testing.assert_allclose(run.end[leaf], wanted, rtol=0, atol=bound, err_msg=leaf)
    for mine, wanted in zip(run.outs, base.outs, strict=True):
        for told in ("loss", "grad_norm", "update_norm", "param_norm"):
            np.testing.assert_allclose(getattr(mine, told), getattr(wanted, told), rtol=NORM_TOLERANCE, err_msg=told)
