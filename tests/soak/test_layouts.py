"""The layout matrix: five meshes, scanned and unrolled, 1 and 4 microbatches; every mesh's checkpoints on every other.

Twenty programs of one model over the same batches; each pair of meshes goes through the real writer and reader.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.checkpoint.saver import Saver
from packtrain.core.platform import LocalPlatform
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig
from packtrain.train.mesh import make_mesh
from packtrain.train.orders import SILENCE
from packtrain.train.saving import local_tensors, restore_state
from packtrain.train.sections import Sections
from packtrain.train.state import State, init_state, state_specs
from packtrain.train.step import Command, Out, make_step, place_batch, place_orders
from tests.train import rig
from tests.train.test_model_layout import (
    LOSS_TOLERANCE,
    MOMENT_TOLERANCE,
    NORM_TOLERANCE,
    PARAM_TOLERANCE,
    UPDATE_TOLERANCE,
)
from tests.train.tiny import host, packed_rows

# Devices as in tests/train, for when this file runs alone; its quick compilation is then left out.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)

pytestmark = pytest.mark.soak

MODEL = ModelConfig(vocab=128, layers=2, embed=16, heads=16, kv_heads=8, head=4, mlp=24)
OPTIM = OptimConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant")
LAYOUTS = {
    "1": {}, "fsdp 8": {"fsdp": 8}, "tensor 8": {"tensor": 8}, "fsdp 4 x tensor 2": {"fsdp": 4, "tensor": 2},
    "replica 2 x fsdp 4": {"replica": 2, "fsdp": 4},
}
EXECUTIONS = ("scan", "unrolled")
STEPS = 3


class Run(NamedTuple):
    state: State
    first: dict[str, np.ndarray]
    """After the first step: there the moments are the gradient, untouched by what Adam makes of small differences."""
    end: dict[str, np.ndarray]
    outs: list[Out]


def mesh_of(layout: str) -> jax.sharding.Mesh:
    sizes = LAYOUTS[layout] or {"fsdp": 1}
    return make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])


@functools.cache
def program(layout: str, execution: str, microbatches: int) -> Any:
    train = TrainConfig(steps=20, microbatches=microbatches, unroll=execution == "unrolled")
    return make_step(MODEL, OPTIM, GuardConfig(warmup_updates=1000), train, mesh_of(layout))


def stepped(state: State, layout: str, execution: str, microbatches: int, batches: range) -> Run:
    mesh, step, first, outs = mesh_of(layout), program(layout, execution, microbatches), {}, []
    for index in batches:
        batch = place_batch(packed_rows(index), mesh, microbatches)
        state, out = step(state, batch, place_orders(SILENCE, mesh), int(Command.RUN))
        outs.append(jax.device_get(out))
        first = first or host(state)
    return Run(state, first, host(state), outs)


@functools.cache
def run_of(layout: str, execution: str, microbatches: int) -> Run:
    """Three steps from the fresh state."""
    return stepped(init_state(MODEL, OPTIM, 3, mesh_of(layout)), layout, execution, microbatches, range(STEPS))


def agree(run: Run, base: Run) -> None:
    for mine, wanted in zip(run.outs, base.outs, strict=True):
        np.testing.assert_allclose(mine.loss, wanted.loss, rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(mine.grad_norm, wanted.grad_norm, rtol=10 * LOSS_TOLERANCE)
        np.testing.assert_allclose(mine.param_norm, wanted.param_norm, rtol=NORM_TOLERANCE)
        np.testing.assert_allclose(mine.update_norm, wanted.update_norm, rtol=UPDATE_TOLERANCE)
    for name, wanted in base.end.items():
        if name.startswith("opt/mu/"):
            gradient = base.first[name]
            bound = MOMENT_TOLERANCE * np.abs(gradient).max()
            np.testing.assert_allclose(run.first[name], gradient, rtol=0, atol=bound, err_msg=name)
        elif name.startswith("params/"):
            np.testing.assert_allclose(run.end[name], wanted, rtol=0, atol=PARAM_TOLERANCE, err_msg=name)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrix(layout: str, execution: str, microbatches: int) -> None:
    """The first gradient, and losses, norms and parameters of three steps, agree with one device, scanned, whole."""
    agree(run_of(layout, execution, microbatches), run_of("1", "scan", 1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with one checkpoint of each layout's own third step; they are numbered in the order of LAYOUTS."""
    folder, platform = str(tmp_path_factory.mktemp("run")), LocalPlatform()
    log = CommitLog(platform, f"{folder}/commits")
    log.probe()
    platform.mkdir(f"{folder}/checkpoints")
    record = log.begin(None, ("r00000",), "node")
    saver = Saver(platform, f"{folder}/buffers", rig.InlineCarrier(platform, folder), record.attempt, "r00000", 60.0)
    for number, layout in enumerate(LAYOUTS, 1):
        meta = {"data_index": number, "plan_hash": "", "seed": 0, "code_hash": ""}
        saver.save(number, local_tensors(run_of(layout, "scan", 1).state, state_specs(MODEL, OPTIM)), meta)
    assert [result.error for result in saver.poll()] == [None] * len(LAYOUTS)
    return folder


@pytest.mark.parametrize(("wrote", "reads"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_restores_and_goes_on(saved: str, wrote: str, reads: str) -> None:
    """What one layout saved another restores bit for bit, and its next step, scanned and unrolled, is one device's."""
    for execution in EXECUTIONS:
        state = restored(saved, wrote, reads)
        for name, leaf in host(state).items():
            np.testing.assert_array_equal(leaf, run_of(wrote, "scan", 1).end[name], err_msg=name)
        agree(stepped(state, reads, execution, 1, range(STEPS, STEPS + 1)), next_step(saved, wrote))


def restored(run: str, wrote: str, reads: str) -> State:
    commit = rig.saved_commits(run)[list(LAYOUTS).index(wrote) + 1]
    checkpoint = open_checkpoint(LocalPlatform(), run, commit)
    return restore_state(checkpoint, Sections(model=MODEL, optim=OPTIM), mesh_of(reads))


@functools.cache
def next_step(run: str, wrote: str) -> Run:
    """Of one device, from the same bits."""
    return stepped(restored(run, wrote, "1"), "1", "scan", 1, range(STEPS, STEPS + 1))
