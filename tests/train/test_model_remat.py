"""What layers keep for the backward pass changes memory and nothing else."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.model import REMAT, init_params
from packtrain.train.step import gradient_sums, place_batch
from tests.train.lowering import SHIPPED
from tests.train.tiny import SEED, mesh_of, packed_rows

MODEL = ModelConfig(vocab=128, layers=4, embed=32, heads=4, kv_heads=4, head=8, mlp=96)
ROWS, LENGTH = 4, 64


@functools.cache
def compiled(remat: Any) -> Any:
    train = TrainConfig(remat=remat)
    program = jax.jit(lambda p, b: gradient_sums(p, b, MODEL, train, mesh_of()))
    return program.lower(*arguments()).compile(SHIPPED | {"xla_backend_optimization_level": 0})


@functools.cache
def arguments() -> Any:
    batch = place_batch(packed_rows(rows=ROWS, length=LENGTH), mesh_of(), 1)
    return jax.jit(functools.partial(init_params, MODEL))(SEED), batch


@pytest.mark.soak
def test_policies_agree_and_each_keeps_less() -> None:
    """Every policy gives the same loss and gradients (f32 rounding apart: what is made again may be fused otherwise;
    measured: 2e-6 of the largest entry), and needs less memory than the one before it, by at least half of what it no
    longer keeps (it needs some to make it again)."""
    wanted, temporaries = jax.device_get(compiled("none")(*arguments())), []
    for remat in REMAT:
        found = jax.device_get(compiled(remat)(*arguments()))
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
        temporaries.append(compiled(remat).memory_analysis().temp_size_in_bytes)
    none, dots, attention, full = temporaries
    tokens_layers = 4 * ROWS * LENGTH * (MODEL.layers - 1)  # in bytes of an f32; one layer is live in the backward pass
    assert dots < none
    assert dots - attention > tokens_layers * MODEL.mlp
    assert attention - full > tokens_layers * (MODEL.embed + 4 * MODEL.heads * MODEL.head) / 2
