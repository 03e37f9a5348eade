"""Attention whose mask is a value: each query row sees the keys in one interval [start, end), given at run time.

The plain reference every kernel is tested against. B rows, L queries, S keys, G key heads, R query heads per key
head, K head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30
"""A finite stand-in for minus infinity: a row with no key gives exp(0) * 0, never inf - inf."""


def windowed(starts_BL: jax.Array, ends_BL: jax.Array, window: int) -> tuple[jax.Array, jax.Array]:
    """The intervals cut to keys less than `window` positions away from their query (self-attention; 0: no cut)."""
    if window == 0:
        return starts_BL, ends_BL
    rows_L = jnp.arange(starts_BL.shape[1], dtype=starts_BL.dtype)
    return jnp.maximum(starts_BL, rows_L - window + 1), jnp.minimum(ends_BL, rows_L + window)


def interval_mask(starts_BL: jax.Array, ends_BL: jax.Array, keys: int) -> jax.Array:
    """bool [B, L, S]: whether a query row may see a key."""
    keys_S = jnp.arange(keys, dtype=starts_BL.dtype)
    return (keys_S >= starts_BL[..., None]) & (keys_S < ends_BL[..., None])


def attend(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array
) -> jax.Array:
    """softmax(q k / sqrt(K)) v over the keys in each row's interval -> [B, L, H, K] in the type of `q`.

    H is a multiple of G. Scores and softmax are f32. A row with an empty interval gives zeros, in value and gradient.
    """
    B, L, H, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    q_BLGRK = q_BLHK.reshape(B, L, G, H // G, K)
    mask_BLS = interval_mask(starts_BL, ends_BL, S)
    scores_BGRLS = jnp.einsum("BLGRK,BSGK->BGRLS", q_BLGRK, k_BSGK, preferred_element_type=jnp.float32)
    scores_BGRLS = jnp.where(mask_BLS[:, None, None], scores_BGRLS * K**-0.5, MASKED)
    peak_BGRL1 = jax.lax.stop_gradient(scores_BGRLS.max(-1, keepdims=True))
    weights_BGRLS = jnp.where(mask_BLS[:, None, None], jnp.exp(scores_BGRLS - peak_BGRL1), 0.0)
    weights_BGRLS /= jnp.maximum(weights_BGRLS.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    out_BLGRK = jnp.einsum("BGRLS,BSGK->BLGRK", weights_BGRLS.astype(v_BSGK.dtype), v_BSGK)
    return out_BLGRK.reshape(B, L, H, K)
