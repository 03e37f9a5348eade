"""tokamax's Mosaic kernels with key intervals, as far as they go without a GPU: traced and lowered, not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from packtrain.train.attention import attend
from packtrain.train.config import TrainConfig

pytestmark = pytest.mark.interop


@dataclass
class Chip:
    """What tokamax asks of the default device while it lowers."""

    compute_capability: str
    platform: str = "gpu"
    device_kind: str = "NVIDIA"
    core_count: int = 132


@pytest.mark.parametrize("generation", ["9.0", "10.0"])
def test_mosaic_lowers(generation: str) -> None:
    """Value and gradient in bf16, grouped heads, an interval for each query, for sm90 and sm100: one kernel call each,
    and the gradient's. tokamax looks at the device while it lowers, so it is shown one."""
    config = pytest.importorskip("tokamax._src.config", reason="needs tokamax: pip install 'packtrain[attention]'")
    q, kv = (jax.ShapeDtypeStruct((2, 512, heads, 64), jnp.bfloat16) for heads in (4, 2))
    at = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    with config.cross_compile(True), shown(Chip(generation)):
        lowered = jax.jit(step).trace(q, kv, kv, at, at).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= 2


@contextmanager
def shown(chip: Chip) -> Iterator[None]:
    """tokamax asks two functions of others for the device and has no argument for it."""
    from jax.extend import backend
    from tokamax._src import gpu_utils

    before = backend.get_default_device, gpu_utils._compute_capability
    backend.get_default_device = lambda: chip
    gpu_utils._compute_capability = lambda device=None: float(chip.compute_capability)
    try:
        yield
    finally:
        backend.get_default_device, gpu_utils._compute_capability = before


def step(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array) -> Any:
    train = TrainConfig(attention="mosaic", precision="bf16")
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, starts, ends, train), q, k, v)
    return out, pull(out)
