"""Attention kernels of others, for accelerators, behind the one function of `attention`. None was run on hardware.

Each takes what it can of an interval mask and says so: rows whose intervals it cannot express come out as NaN, which
the guard stops, and never as the answer to another mask. Rows with no key are zeros, as everywhere.
Sizes: B rows, L queries, S keys, H heads, G key heads, R query heads per key head, K head.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from packtrain.core.errors import LayoutError

TOKAMAX = "tokamax._src.ops.attention"
"""tokamax's public function refuses key intervals; the implementation behind it takes them (0.0.12 to 0.0.17)."""
SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"


def mosaic(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array
) -> jax.Array:
    """tokamax's Mosaic GPU kernels with a key interval for each query, forward and backward; sm90 and sm100, bf16."""
    base, gpu = (importlib.import_module(f"{TOKAMAX}.{name}") for name in ("base", "pallas_mosaic_gpu"))
    empty_BL = ends_BL <= starts_BL
    # A row with no key is given one, so that nothing is divided by nothing; its result and gradient are dropped.
    mask = base.Mask(
        k_start=jnp.where(empty_BL, 0, starts_BL)[:, None], k_end=jnp.where(empty_BL, 1, ends_BL)[:, None]
    )
    out_BLHK = gpu.PallasMosaicGpuFlashAttention()(q_BLHK, k_BSGK, v_BSGK, mask=mask)
    return jnp.where(empty_BL[..., None, None], 0, out_BLHK).astype(q_BLHK.dtype)


def cudnn(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array
) -> jax.Array:
    """cuDNN's fused attention through JAX: rows that are causal from key 0 on, bf16."""
    out_BLHK = jax.nn.dot_product_attention(q_BLHK, k_BSGK, v_BSGK, is_causal=True, implementation="cudnn")
    return _where_it_fits(out_BLHK, starts_BL, ends_BL, starts_BL == 0)


def splash(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Splash attention on TPU: causal rows packed by segments. Raises LayoutError where queries are cut over devices.

    A query's segment is named by its first key: two rows of a document begin at the same one. `interpret`: run the
    kernel's body in plain JAX, slowly, on any platform; for tests.
    """
    kernel, masks = (importlib.import_module(f"{SPLASH}.splash_attention_{name}") for name in ("kernel", "mask"))
    (B, L, H, K), (S, G) = q_BLHK.shape, k_BSGK.shape[1:3]
    if L != S:
        raise LayoutError(
            f"splash attention needs all {S} queries of a row on one device and has {L}", where="train.mesh",
            fix="leave the context axis out, or ask for train.attention=blockwise",
        )
    empty_BL = ends_BL <= starts_BL
    segments_BL = jnp.where(empty_BL, -1, starts_BL)
    q_BGRLK = (q_BLHK * K**-0.5).reshape(B, L, G, H // G, K).transpose(0, 2, 3, 1, 4)
    k_BGSK, v_BGSK = (x.swapaxes(1, 2) for x in (k_BSGK, v_BSGK))
    causal = masks.MultiHeadMask([masks.CausalMask((L, S))] * (H // G))
    group = kernel.make_splash_mqa_single_device(causal, interpret=interpret)
    segments: Any = kernel.SegmentIds(segments_BL, segments_BL)
    out_BGRLK = jax.vmap(jax.vmap(group, (0, 0, 0, None)))(q_BGRLK, k_BGSK, v_BGSK, segments)
    out_BLHK = out_BGRLK.transpose(0, 3, 1, 2, 4).reshape(B, L, H, K).astype(q_BLHK.dtype)
    before_BL = jnp.pad(segments_BL[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    follows_BL = (starts_BL == before_BL) | (starts_BL == jnp.arange(L))
    return _where_it_fits(out_BLHK, starts_BL, ends_BL, follows_BL)


def _where_it_fits(out_BLHK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array, begins_BL: jax.Array) -> jax.Array:
    """Causal rows that begin where `begins` says they may; a batch row with any other interval is NaN throughout."""
    empty_BL = ends_BL <= starts_BL
    causal_BL = (ends_BL == jnp.arange(1, ends_BL.shape[1] + 1)) & begins_BL
    fits_B = (causal_BL | empty_BL).all(1)
    out_BLHK = jnp.where(empty_BL[..., None, None], 0, out_BLHK)
    return jnp.where(fits_B[:, None, None, None], out_BLHK, jnp.nan).astype(out_BLHK.dtype)
