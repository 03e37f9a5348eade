"""Attention whose mask is a value: each query row sees the keys in one interval [start, end), given at run time.

The one function the model calls, and the plain reference every kernel is tested against. B rows, L queries, S keys,
G key heads, R query heads per key head, K head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from packtrain.train import vendor
from packtrain.train.blockwise import blockwise
from packtrain.train.config import TrainConfig
from packtrain.train.kernels import resolved

MASKED = -1e30
"""A finite stand-in for minus infinity: a row with no key gives exp(0) * 0, never inf - inf."""


def windowed(
    starts_BL: jax.Array, ends_BL: jax.Array, window: int, first: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    """The intervals cut to keys less than `window` positions away from their query (self-attention; 0: no cut).

    `first`: index among the keys of the first query here, where only a part of the queries is.
    """
    if window == 0:
        return starts_BL, ends_BL
    rows_L = first + jnp.arange(starts_BL.shape[1], dtype=starts_BL.dtype)
    return jnp.maximum(starts_BL, rows_L - window + 1), jnp.minimum(ends_BL, rows_L + window)


def interval_mask(starts_BL: jax.Array, ends_BL: jax.Array, keys: int) -> jax.Array:
    """bool [B, L, S]: whether a query row may see a key."""
    keys_S = jnp.arange(keys, dtype=starts_BL.dtype)
    return (keys_S >= starts_BL[..., None]) & (keys_S < ends_BL[..., None])


def attend(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array,
    train: TrainConfig,
) -> jax.Array:
    """What `reference` says, by the kernel that `train.attention` names; under the checkpoint name "attended"."""
    operands = q_BLHK, k_BSGK, v_BSGK, starts_BL, ends_BL
    name = resolved(train, jax.devices()[0]).name if train.attention == "auto" else train.attention
    if name == "blockwise":
        return blockwise(*operands, train.attention_block)
    kernels = {"reference": reference, "mosaic": vendor.mosaic, "cudnn": vendor.cudnn, "splash": vendor.splash}
    return checkpoint_name(kernels[name](*operands), "attended")


def reference(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array
) -> jax.Array:
    """softmax(q k / sqrt(K)) v over the keys in each row's interval -> [B, L, H, K] in the type of `q`.

    H is a multiple of G. Scores and softmax are f32. A row with an empty interval gives zeros, in value and gradient.
    """
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    q_BLGRK = (q_BLHK * K**-0.5).reshape(B, L, G, H // G, K)
    mask_BLS = interval_mask(starts_BL, ends_BL, S)
    scores_BGRLS = jnp.einsum("BLGRK,BSGK->BGRLS", q_BLGRK, k_BSGK, preferred_element_type=jnp.float32)
    scores_BGRLS = jnp.where(mask_BLS[:, None, None], scores_BGRLS, MASKED)
    # A row without a key keeps a peak far above MASKED, so that its weights are 0 and not exp(0).
    peak_BGRL1 = jax.lax.stop_gradient(jnp.maximum(scores_BGRLS.max(-1, keepdims=True), MASKED / 2))
    weights_BGRLS = jnp.exp(scores_BGRLS - peak_BGRL1)
    total_BGRL = weights_BGRLS.sum(-1)
    # Dividing the sum of values rather than each weight saves passes over [L, S], forward and backward.
    sum_BGRLK = jnp.einsum(
        "BGRLS,BSGK->BGRLK", weights_BGRLS.astype(v_BSGK.dtype), v_BSGK, preferred_element_type=jnp.float32
    )
    out_BGRLK = sum_BGRLK / jnp.where(total_BGRL > 0, total_BGRL, 1.0)[..., None]
    return out_BGRLK.transpose(0, 3, 1, 2, 4).reshape(B, L, H, K).astype(q_BLHK.dtype)
