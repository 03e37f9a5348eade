"""Floating-point work of a batch, counted by mask area, and the matmul rate it is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packtrain.train.axes import ParamSpec
from packtrain.train.config import ModelConfig
from packtrain.train.model import param_specs

PEAK_ON_CPU, PEAK_ELSEWHERE = (2048, 1), (8192, 4)
"""Size of a square, and how many products a call makes, each from the last: what a call costs besides must be little of
it (on an H100 one product of 2048 is 20 us)."""
PEAK_TRIES = 4


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that a token is multiplied by: all matrices, the embedding only as the output head it also is."""
    leaves = jax.tree.leaves(param_specs(model), is_leaf=lambda x: isinstance(x, ParamSpec))
    matrices = sum(math.prod(spec.shape) for spec in leaves if spec.is_matrix)
    return matrices - (0 if model.tied else model.vocab * model.embed)


def mask_area(model: ModelConfig, batch: Any) -> int:
    """(query, key) pairs one head of one layer may see in this batch, window included."""
    starts_BL, ends_BL = np.asarray(batch.starts_BL, np.int64), np.asarray(batch.ends_BL, np.int64)
    if model.window:
        rows_L = np.arange(starts_BL.shape[1])
        starts_BL = np.maximum(starts_BL, rows_L - model.window + 1)
        ends_BL = np.minimum(ends_BL, rows_L + model.window)
    return int(np.maximum(ends_BL - starts_BL, 0).sum())


def step_flops(model: ModelConfig, batch: Any) -> int:
    """FLOPs of forward and backward over `batch`, as a model needs them (recomputation and masked pairs do not count).

    A multiply-add is 2; backward costs twice forward. So each token takes 6 per matmul parameter, and each live
    (query, key) pair takes 3 * (2 K for q k + 2 K for weights v) = 12 K per head and layer.
    """
    tokens = int((np.asarray(batch.ends_BL) > np.asarray(batch.starts_BL)).sum())  # padding sees no key
    pairs = model.layers * model.heads * mask_area(model, batch)
    return 6 * matmul_parameters(model) * tokens + 12 * model.head * pairs


def measure_peak(
    devices: Sequence[jax.Device], clock_ns: Callable[[], int], precision: str = "f32", size: int = 0
) -> float:
    """FLOPs/s of the best of a few square matmuls, all `devices` at once; some hundred ms on 2 cores.

    `clock_ns`: a monotonic clock, as `Platform.boot_ns`. `size` of the squares; 0: what suits the device.
    """
    usual, products = PEAK_ON_CPU if devices[0].platform == "cpu" else PEAK_ELSEWHERE
    size = size or usual
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, products, lambda _, y: y @ x, x) if products > 1 else x @ x)
    squares = [jax.device_put(jnp.full((size, size), 1 / size, dtype), device) for device in devices]
    best_ns = math.inf
    for _ in range(PEAK_TRIES + 1):  # the first, which compiles, is never the best
        began = clock_ns()
        jax.block_until_ready([multiply(x) for x in squares])
        best_ns = min(best_ns, clock_ns() - began)
    return len(squares) * products * 2 * size**3 / (best_ns / 1e9)
