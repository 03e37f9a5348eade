"""Before the first step: does the attention kernel of this run say what the plain reference says?

Kernels have ignored masks in silence (AI-Hypercomputer/maxtext issue 4476), and a model learns under a wrong mask, only
worse. So the masks of a real batch are tried: B rows, L queries, H heads, G key heads, K head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from packtrain.core.errors import AttentionWrong
from packtrain.train.attention import attend, reference, windowed
from packtrain.train.config import ModelConfig, TrainConfig

Operands = list[jax.Array]
Kernel = Callable[..., jax.Array]

ROWS_MAX = 2
QUERIES = 64
"""Sampled over the rows tried; the reference is computed for these only."""
CROP = 128
CROP_BLOCK = 48
"""So small that the gradient of the crop crosses blocks, some of them partly filled."""
TOLERANCE, TOLERANCE_ROUNDED = 1e-4, 4e-2
"""Largest difference relative to the size of what should be there: of blockwise in f32 on CPU, and where products round
to TF32, bf16 or less."""


def check_attention(
    starts_BL: np.ndarray, ends_BL: np.ndarray, model: ModelConfig, train: TrainConfig, kernel: Kernel = attend
) -> None:
    """Value at 64 sampled queries under the intervals of a batch; gradient on a crop of its first row.

    Raises AttentionWrong. Runs on one device, whatever the mesh; the reference is not checked against itself.
    """
    if train.attention == "reference":
        return
    draw = np.random.default_rng(0)
    rows, length = min(ROWS_MAX, len(starts_BL)), starts_BL.shape[1]
    at_BQ = draw.integers(0, length, (rows, QUERIES // rows))
    whole, crop = (_operands(draw, shape, model, train) for shape in ((rows, length), (1, min(CROP, length))))
    compare = jax.jit(functools.partial(_differences, kernel, model, train))
    apart = compare(starts_BL[:rows], ends_BL[:rows], at_BQ, whole, crop)
    # Elsewhere products of f32 are taken in TF32 or bf16 unless asked otherwise.
    exact = train.attention == "blockwise" and train.precision == "f32" and jax.default_backend() == "cpu"
    bound = TOLERANCE if exact else TOLERANCE_ROUNDED
    for name, found in zip(("values", "dq", "dk", "dv"), jax.device_get(apart), strict=True):
        if not found <= bound:  # NaN included
            raise AttentionWrong(
                f"the attention kernel {train.attention} differs from the plain reference by {found:.1e} of its size "
                f"({name}; allowed {bound:g}) under the masks of this run",
                where=f"train.attention on {jax.devices()[0].device_kind}",
                fix="train.attention=blockwise (or reference, slow and quadratic); and please report this kernel",
            )


def _differences(
    kernel: Kernel, model: ModelConfig, train: TrainConfig, starts_BL: jax.Array, ends_BL: jax.Array, at_BQ: jax.Array,
    whole: Operands, crop: Operands,
) -> list[jax.Array]:
    """Of the value at the queries `at`, and of dq, dk and dv of the first tokens of the first row."""
    starts_BL, ends_BL = windowed(starts_BL, ends_BL, model.window)
    at_BQ11, (q, k, v, _) = at_BQ[..., None, None], whole
    found_BLHK = kernel(q, k, v, starts_BL, ends_BL, train)
    picked = (jnp.take_along_axis(x, at_BQ, axis=1) for x in (starts_BL, ends_BL))
    wanted_BQHK = reference(jnp.take_along_axis(q, at_BQ11, axis=1), k, v, *picked)
    value = _apart_each(jnp.take_along_axis(found_BLHK, at_BQ11, axis=1), wanted_BQHK)
    *qkv, d_out = crop
    starts, ends = (jnp.minimum(x[:1, : d_out.shape[1]], d_out.shape[1]) for x in (starts_BL, ends_BL))
    small = msgspec.structs.replace(train, attention_block=min(train.attention_block, CROP_BLOCK))
    _, ours = jax.vjp(lambda q, k, v: kernel(q, k, v, starts, ends, small), *qkv)
    _, plain = jax.vjp(lambda q, k, v: reference(q, k, v, starts, ends), *qkv)
    return [value, *(_apart(mine, theirs) for mine, theirs in zip(ours(d_out), plain(d_out), strict=True))]


def _operands(draw: np.random.Generator, shape: tuple[int, int], model: ModelConfig, train: TrainConfig) -> Operands:
    """q, k, v and a gradient of the result: normal numbers in the compute type."""
    compute = jnp.bfloat16 if train.precision == "bf16" else jnp.float32
    heads = model.heads, model.kv_heads, model.kv_heads, model.heads
    return [jnp.asarray(draw.standard_normal((*shape, n, model.head), np.float32), compute) for n in heads]


def _apart_each(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """Each head of each query by its own size: a mean over many keys is small, and a wrong mask there as wrong."""
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(jnp.square(wanted), axis=-1, keepdims=True))
    return (jnp.abs(found - wanted) / jnp.maximum(size, 1e-6)).max()


def _apart(found: jax.Array, wanted: jax.Array) -> jax.Array:
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return jnp.abs(found - wanted).max() / jnp.maximum(jnp.abs(wanted).max(), 1e-6)
