"""The blockwise kernel against the plain reference: values, gradients, and how many pairs of blocks it visits."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.train.attention import reference, windowed
from packtrain.train.blockwise import Tile, backward, blockwise, forward, tile_of
from tests.train.lowering import SHIPPED

B, H, G, K, BLOCK = 2, 4, 2, 8, 4
TILE = Tile(queries=3, keys=BLOCK)
LENGTH, SOURCE = 14, 11
"""Queries, and keys of cross attention: blocks divide neither."""
TOLERANCE = 1e-5
"""Largest difference of values and gradients of order 1; measured over 400 draws: 1.5e-6."""


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
    out, log_total, there = forward(TILE, q, k, v, starts, ends)
    *_, back = backward(TILE, q, k, v, starts, ends, out, log_total, d_out)
    return *results, (there, back)


def live_pairs(starts: np.ndarray, ends: np.ndarray, keys: int) -> int:
    """By brute force, from the whole mask."""
    at, (P, C) = np.arange(keys), TILE
    mask = (at >= starts[..., None]) & (at < ends[..., None])
    return sum(
        mask[b, i : i + P, j : j + C].any() for b in range(B) for i in range(0, LENGTH, P) for j in range(0, keys, C)
    )


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


def test_more_queries_where_heads_are_single() -> None:
    """A tile has 512 rows of scores for each key head at a block of 256, however heads are grouped; never past the
    end."""
    def rows(heads: int, length: int = 1024) -> int:
        return tile_of(256, jnp.zeros((1, length, heads, 8)), jnp.zeros((1, length, 2, 8))).queries * heads // 2

    assert [rows(2), rows(4), rows(8)] == [512, 512, 1024]
    assert rows(2, length=100) == 100


def test_memory_is_linear_in_length() -> None:
    """Temporaries of value and gradient at most double from 2,048 to 4,096 tokens and stay far below one array of
    scores; inside the inner loops nothing as large as a block of dk is copied, so sums are added up in place."""
    temporaries = []
    for length in (2048, 4096):
        x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        at = jax.ShapeDtypeStruct((1, length), jnp.int32)
        compiled = jax.jit(value_and_gradient).lower(x, x, x, at, at).compile(SHIPPED)
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        assert temporaries[-1] < length * length  # a quarter of the scores' bytes
    assert temporaries[1] <= 2.1 * temporaries[0]
    parts = compiled.as_text().split("\n}")
    inner = [text for text in parts if "exponential_fusion" in text and " while(" not in text and "ENTRY" not in text]
    copies = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", "".join(inner))
    assert len(inner) == 2 and all(math.prod(map(int, dims.split(","))) < 256 * 16 for dims in copies), copies


def value_and_gradient(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array) -> Any:
    out, pull = jax.vjp(lambda q, k, v: blockwise(q, k, v, starts, ends, 256), q, k, v)
    return out, pull(out)


def test_bf16_sums_in_f32() -> None:
    """Operands in bf16 give bf16 results within its rounding of the f32 ones, over more keys than bf16 can count."""
    keys = 600
    q, k, v = (jnp.ones((1, n, 1, K), jnp.bfloat16) for n in (8, keys, keys))
    starts, ends = jnp.zeros((1, 8), jnp.int32), jnp.full((1, 8), keys, jnp.int32)
    out = jax.jit(blockwise, static_argnums=5)(q, k, v, starts, ends, 2)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, atol=0.01)
