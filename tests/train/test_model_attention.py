"""Interval attention against a dense masked softmax written out independently."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.train.attention import reference, windowed

B, L, H, G, K = 2, 12, 4, 2, 8
WINDOWS = (0, 3)
TOLERANCE = 2e-5
"""Largest difference from the dense softmax in f64, values of order 1."""


@functools.cache
def operands() -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(0)
    return tuple(draw.normal(size=(B, L, heads, K)) for heads in (H, G, G, H))


def dense(starts: np.ndarray, ends: np.ndarray, window: int) -> tuple[np.ndarray, ...]:
    """(output, dq, dk, dv) in f64, loop by loop: softmax over the keys each query may see, and its derivative."""
    q, k, v, do = operands()
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, i, h in np.ndindex(B, L, H):
        g = h // (H // G)
        keys = [j for j in range(L) if starts[b, i] <= j < ends[b, i] and (window == 0 or abs(i - j) < window)]
        if not keys:
            continue
        scores = k[b, keys, g] @ q[b, i, h] / np.sqrt(K)
        p = np.exp(scores - scores.max())
        p /= p.sum()
        out[b, i, h] = p @ v[b, keys, g]
        dp = v[b, keys, g] @ do[b, i, h]
        ds = p * (dp - p @ dp) / np.sqrt(K)
        dq[b, i, h] = ds @ k[b, keys, g]
        dk[b, keys, g] += np.outer(ds, q[b, i, h])
        dv[b, keys, g] += np.outer(p, do[b, i, h])
    return out, dq, dk, dv


@functools.partial(jax.jit, static_argnums=0)
def ours(window: int, q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, starts: jax.Array, ends: jax.Array):
    out, pull = jax.vjp(lambda q, k, v: reference(q, k, v, *windowed(starts, ends, window)), q, k, v)
    return out, *pull(do)


def check(starts: np.ndarray, ends: np.ndarray, window: int) -> None:
    inputs = [jnp.asarray(x, jnp.float32) for x in operands()]
    found = ours(window, *inputs, jnp.asarray(starts, jnp.int32), jnp.asarray(ends, jnp.int32))
    for name, mine, wanted in zip(("out", "dq", "dk", "dv"), found, dense(starts, ends, window), strict=True):
        assert np.isfinite(mine).all(), name
        np.testing.assert_allclose(mine, wanted, atol=TOLERANCE, err_msg=name)


def packed_causal() -> tuple[np.ndarray, np.ndarray]:
    at = np.tile(np.arange(L), (B, 1))
    cut = np.array([[5], [9]])
    return np.where(at >= cut, cut, 0), at + 1


def packed_prefix() -> tuple[np.ndarray, np.ndarray]:
    starts, ends = packed_causal()
    return starts, np.maximum(ends, starts + 3)


MASKS = {
    "packed causal": packed_causal,
    "packed prefix": packed_prefix,
    "encoder": lambda: (np.zeros((B, L), int), np.full((B, L), 9)),
    "all rows empty": lambda: (np.zeros((B, L), int), np.zeros((B, L), int)),
    "some rows empty": lambda: (np.full((B, L), 4), np.tile(np.arange(L), (B, 1))),
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("mask", MASKS)
def test_named_masks(mask: str, window: int) -> None:
    """Every kind of mask gives the dense softmax's value and gradients; rows without a key give zeros, never NaN."""
    check(*MASKS[mask](), window)


bound = st.lists(st.integers(0, L), min_size=B * L, max_size=B * L).map(lambda xs: np.array(xs).reshape(B, L))


@settings(max_examples=25)
@given(starts=bound, ends=bound, window=st.sampled_from(WINDOWS))
def test_any_intervals(starts: np.ndarray, ends: np.ndarray, window: int) -> None:
    """So do arbitrary intervals, empty and inverted ones among them."""
    check(starts, ends, window)


def test_one_compilation_for_all_masks() -> None:
    """Intervals are run-time values: another mask compiles nothing."""
    for mask in MASKS.values():
        check(*mask(), 0)
    size = ours._cache_size()
    check(np.full((B, L), 2), np.full((B, L), 7), 0)
    assert ours._cache_size() == size
