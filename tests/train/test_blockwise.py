"""The blockwise kernel against the plain reference: values, gradients, and how many pairs of blocks it visits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.train.attention import interval_mask, reference, windowed
from packtrain.train.blockwise import backward, blockwise, forward

B, H, G, K, BLOCK = 2, 4, 2, 8, 4
LENGTH, SOURCE = 14, 11
"""Queries, and keys of cross attention: blocks divide neither."""
TOLERANCE = 1e-5
"""Largest difference of values and gradients of order 1; measured over 200 draws: 2e-6."""


@functools.cache
def operands(keys: int) -> tuple[jax.Array, ...]:
    draw = np.random.default_rng(keys)
    shapes = (B, LENGTH, H, K), (B, keys, G, K), (B, keys, G, K), (B, LENGTH, H, K)
    return tuple(jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in shapes)


@jax.jit
def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, starts: jax.Array, ends: jax.Array) -> Any:
    """((out, dq, dk, dv) of the kernel, the same of the reference, pairs visited forward and backward)."""
    results = []
    for kernel in (functools.partial(blockwise, block=BLOCK), reference):
        out, pull = jax.vjp(lambda q, k, v, kernel=kernel: kernel(q, k, v, starts, ends), q, k, v)
        results.append((out, *pull(d_out)))
    out, log_total, there = forward(BLOCK, q, k, v, starts, ends)
    *_, back = backward(BLOCK, q, k, v, starts, ends, out, log_total, d_out)
    return *results, (there, back)


def live_pairs(starts: np.ndarray, ends: np.ndarray, keys: int) -> int:
    """By brute force, from the whole mask."""
    mask = np.asarray(interval_mask(jnp.asarray(starts), jnp.asarray(ends), keys))
    blocks = [range(0, size, BLOCK) for size in mask.shape[1:]]
    return sum(mask[b, i : i + BLOCK, j : j + BLOCK].any() for b in range(B) for i in blocks[0] for j in blocks[1])


def check(starts: np.ndarray, ends: np.ndarray, keys: int = LENGTH) -> None:
    starts, ends = (np.broadcast_to(np.asarray(x, np.int32), (B, LENGTH)) for x in (starts, ends))
    found, wanted, visited = both(*operands(keys), starts, ends)
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE, err_msg=name)
    assert [int(pairs) for pairs in visited] == [live_pairs(starts, ends, keys)] * 2


AT = np.arange(LENGTH)
cuts = st.lists(st.integers(1, LENGTH - 1), min_size=B, max_size=B).map(lambda xs: np.array(xs)[:, None])


@settings(max_examples=40)
@given(
    cut=cuts, kind=st.sampled_from(["causal", "prefix", "encoder", "cross", "any"]),
    window=st.integers(0, LENGTH), empty=st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
    seed=st.integers(0, 1 << 20),
)
def test_equals_the_reference_and_visits_live_pairs_only(
    cut: np.ndarray, kind: str, window: int, empty: list[bool], seed: int
) -> None:
    """Packed causal, prefix, encoder, windowed, cross and arbitrary masks, rows with no key among them."""
    draw, keys = np.random.default_rng(seed), SOURCE if kind == "cross" else LENGTH
    starts, ends = np.where(cut <= AT, cut, 0), np.where(cut <= AT, LENGTH, cut)
    if kind in ("causal", "prefix"):
        ends = np.maximum(AT + 1, np.minimum(starts + draw.integers(0, 5), ends) if kind == "prefix" else 0)
    if kind == "cross":
        starts, ends = np.where(cut <= AT, SOURCE // 2, 0), np.where(cut <= AT, SOURCE, SOURCE // 2)
    if kind == "any":
        starts, ends = draw.integers(-2, LENGTH + 3, (2, B, LENGTH))
    if kind not in ("cross", "any"):
        starts, ends = (np.asarray(x) for x in windowed(jnp.asarray(starts), jnp.asarray(ends), window))
    check(np.where(empty, 5, starts), np.where(empty, 5, ends), keys)


def test_one_compilation_for_all_masks() -> None:
    """Which pairs live is found at run time: another mask compiles nothing."""
    check(0 * AT, AT + 1)
    size = both._cache_size()
    check(AT // 7 * 7, AT + 1)
    assert both._cache_size() == size


def test_never_under_vmap() -> None:
    """A batch of loops would run as long as its longest, so it is refused, in value and in gradient."""
    q, k, v, _ = operands(LENGTH)
    starts, ends = jnp.zeros((B, LENGTH), jnp.int32), jnp.ones((B, LENGTH), jnp.int32)

    def loss(q: jax.Array) -> jax.Array:
        return blockwise(q, k, v, starts, ends, BLOCK).sum()

    for mapped in (loss, jax.grad(loss)):
        with pytest.raises(NotImplementedError, match="batch dim of its own"):
            jax.vmap(mapped)(q[None])


def test_bf16_sums_in_f32() -> None:
    """Operands in bf16 give bf16 results within its rounding of the f32 ones, over more keys than bf16 can count."""
    draw, keys = np.random.default_rng(1), 600
    q, k, v = (jnp.asarray(draw.normal(size=(1, n, 1, K)), jnp.bfloat16) for n in (8, keys, keys))
    starts, ends = jnp.zeros((1, 8), jnp.int32), jnp.full((1, 8), keys, jnp.int32)
    v = jnp.ones_like(v)
    out = blockwise(q, k, v, starts, ends, 1)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, atol=0.01)
