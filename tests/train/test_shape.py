"""`packtrain shape`'s arithmetic against the trainer itself."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from packtrain.core.errors import LayoutError
from packtrain.data.config import DataConfig
from packtrain.recipes.catalog import resolve
from packtrain.train import shape
from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.flops import step_flops
from packtrain.train.sections import Sections
from packtrain.train.state import count_parameters, flatten, shardings
from tests.train import collectives, lowering
from tests.train.tiny import OPTIM, packed_rows

MODEL = ModelConfig(vocab=128, layers=3, embed=16, heads=8, kv_heads=4, head=4, mlp=24)
SCALARS = 512
"""Bytes that losses, norms, counters and the digest may send and the formula leaves out."""


def layout(
    microbatches: int = 1, remat: str = "none", precision: str = "f32", optim: str = "adamw", **mesh: int
) -> shape.Layout:
    train = TrainConfig(mesh=mesh, microbatches=microbatches, remat=remat, precision=precision)
    rule, data = msgspec.structs.replace(OPTIM, name=optim), DataConfig(batch_rows=8, length=16)
    return shape.Layout(Sections(model=MODEL, optim=rule, train=train, data=data))


@functools.cache
def example() -> tuple[shape.Layout, Any]:
    """Every kind of collective in one program."""
    of = layout(2, "full", replica=2, fsdp=2, tensor=2)
    return of, lowering.compiled(of)


def test_collectives_of_the_compiled_step_are_those_of_the_formula() -> None:
    """By mesh axes and kind, to the byte: replica 2 x fsdp 2 x tensor 2, two microbatches, all recomputed."""
    of, program = example()
    found = collectives.totals(collectives.read(program.as_text(), of.mesh.shape))
    wanted = shape.sent_bytes(of)
    for key in found.keys() | wanted.keys():
        assert 0 <= found.get(key, 0) - wanted.get(key, 0) <= SCALARS, key
    assert len(wanted) == 8


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"replica": 2, "fsdp": 4}])
def test_bf16_sends_weights_in_bf16_and_gradients_in_f32(mesh: dict[str, int]) -> None:
    """Where no stream is cut: gathers are bf16 but for the embedding's, no sum over devices is, and the bytes
    are those of the formula. As traced: the CPU compiler makes f32 of bf16 collectives."""
    of = layout(2, precision="bf16", **mesh)
    found = list(collectives.traced(lowering.traced(of).jaxpr, of.mesh.shape))
    assert "bfloat16" not in {str(each.type) for each in found if each.kind != "all-gather"}
    gathers = [str(each.type) for each in found if each.kind == "all-gather"]
    assert gathers.count("float32") == 1 and gathers.count("bfloat16") > 10
    sent, wanted = collectives.totals(found), shape.sent_bytes(of)
    for key in sent.keys() | wanted.keys():
        assert 0 <= sent.get(key, 0) - wanted.get(key, 0) <= SCALARS, key


def test_muon_deals_its_layers_as_the_formula_says() -> None:
    """As traced, the conditional's branches included: 3 layers dealt to 2 x 2 devices are 4, there and back."""
    of = layout(optim="muon", fsdp=2, tensor=2)
    found = collectives.totals(collectives.traced(lowering.traced(of).jaxpr, of.mesh.shape))
    sent, wanted = (
        {key: count for key, count in sums.items() if key[1] == "all-to-all"} for sums in (found, shape.sent_bytes(of))
    )
    assert sent == wanted and len(wanted) == 2


def test_state_and_batch_are_the_arguments_of_the_compiled_step() -> None:
    """What a device holds before a step, to the byte, orders and command aside."""
    of, program = example()
    arguments = program.memory_analysis().argument_size_in_bytes
    assert arguments == sum(shape.state_bytes(of).values()) + shape.batch_bytes(of) + 4 * 4 + 4


def test_state_bytes_of_64b_on_16384_devices() -> None:
    """The 64B rung is traced for a mesh nobody here has; its shards are as large as the formula says."""
    of = shape.Layout(lowering.sections(resolve("rung:64b"), replica=8, fsdp=1024, tensor=2))
    assert of.mesh.size == 16_384
    places = flatten(shardings(of.spec.model, of.spec.optim, of.mesh))
    held = sum(
        math.prod(places[name].shard_shape(size)) * np.dtype(kind).itemsize
        for name, (size, kind, _) in of.leaves.items()
    )
    assert held == sum(shape.state_bytes(of).values())
    assert "num_partitions = 16384" in lowering.traced(of, devices=False).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("name", ["first-light", "rung:10m", "rung:300m", "rung:64b"])
def test_parameters_by_part(name: str) -> None:
    """The parts add up to all there are."""
    model = resolve(name).model
    assert sum(shape.parameters(model).values()) == count_parameters(model)


@pytest.mark.parametrize("window", [0, 5])
def test_flops_are_those_the_step_reports(window: int) -> None:
    """For rows that are one causal document, the FLOPs of a batch over its tokens."""
    rows = packed_rows()
    rows = rows._replace(starts_BL=np.zeros_like(rows.starts_BL))
    model = msgspec.structs.replace(MODEL, window=window)
    spec = Sections(model=model, data=DataConfig(length=16))
    assert shape.flops_per_token(spec) == pytest.approx(step_flops(model, rows) / rows.tokens_BL.size, abs=1)


def test_rows_that_do_not_divide_are_padded() -> None:
    """8 rows on 3 devices in 2 parts are 12; the batch on each device is 4 rows of 6 arrays."""
    of = layout(2, fsdp=1, replica=3)
    assert of.rows == 12 and shape.batch_bytes(of) == 4 * 16 * 4 * 6
    assert "8 rows, padded to 12 (33% of the work is padding)," in shape.describe(of, "x")


def test_a_mesh_that_does_not_fit_is_refused_by_dim() -> None:
    """The dim, its size and the axis are named."""
    with pytest.raises(LayoutError, match="dim kv_heads of size 4 .*tensor = 8"):
        layout(tensor=8)
    with pytest.raises(LayoutError, match="dim span of size 16 .*context = 8, tensor = 4"):
        layout(context=8, tensor=4)
    with pytest.raises(LayoutError, match="mesh axis expert"):
        layout(expert=2)


def test_nothing_is_allocated() -> None:
    """The description of 64B parameters on 16,384 devices leaves no array behind."""
    before = len(jax.live_arrays())
    text = shape.describe(shape.Layout(lowering.sections(resolve("rung:64b"), replica=8, fsdp=1024, tensor=2)), "x")
    assert "16,384 devices" in text and "not compiled" in text and len(jax.live_arrays()) == before
