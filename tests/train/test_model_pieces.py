"""The pieces with a gradient written by hand, and the conventions weights depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packtrain.train.matmul import project
from packtrain.train.model import rms_norm, rope_table, rotate
from tests.train.tiny import run_of


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize(("x", "w", "over"), [
    ((2, 5, 6), (6, 9), 1), ((2, 5, 9), (9, 6), 1), ((2, 5, 6), (6, 3, 4), 1), ((2, 5, 3, 4), (3, 4, 7), 2),
])
def test_project_equals_tensordot(x: tuple[int, ...], w: tuple[int, ...], over: int) -> None:
    """Value and both gradients, whichever operand is the smaller, with one or two dims in and out."""
    plain, x_, w_ = (lambda x, w: jnp.tensordot(x, w, over)), normal(0, *x), normal(1, *w)
    found, pull = jax.vjp(lambda x, w: project(x, w, over), x_, w_)
    wanted, plain_pull = jax.vjp(plain, x_, w_)
    dy = normal(2, *wanted.shape)
    for mine, theirs in zip((found, *pull(dy)), (wanted, *plain_pull(dy)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_project_keeps_types() -> None:
    """In bf16 the result is bf16, or f32 where asked for; gradients have the types of their operands."""
    x, w = normal(0, 4, 6).astype(jnp.bfloat16), normal(1, 6, 8).astype(jnp.bfloat16)
    assert project(x, w).dtype == jnp.bfloat16
    out, pull = jax.vjp(lambda x, w: project(x, w, 1, jnp.float32), x, w)
    assert out.dtype == jnp.float32 and [g.dtype for g in pull(out)] == [jnp.bfloat16] * 2


def test_rope_turns_pairs_of_halves() -> None:
    """Entry i and entry i + K/2 are one complex number, turned by position * theta^(-2i/K)."""
    x_BLHK, positions_BL = normal(0, 2, 5, 3, 8), jnp.asarray([[0, 1, 2, 3, 4], [7, 0, 1, 900, 2]])
    found = jax.jit(lambda x, at: rotate(x, rope_table(at, 8, 100.0)))(x_BLHK, positions_BL)
    numbers = np.asarray(x_BLHK[..., :4]) + 1j * np.asarray(x_BLHK[..., 4:])
    angles = np.asarray(positions_BL)[:, :, None, None] * 100.0 ** (-np.arange(4) / 4)
    wanted = numbers * np.exp(1j * angles)
    np.testing.assert_allclose(found, np.concatenate([wanted.real, wanted.imag], -1), atol=2e-4)


def test_rms_norm() -> None:
    """Each row over its root mean square, times scale; bf16 rows keep their type, with statistics in f32."""
    x, scale = normal(0, 4, 64) * 100, normal(1, 64)
    wanted = np.asarray(x) / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(rms_norm(x, scale, 1e-6), wanted, rtol=1e-5)
    half = rms_norm(x.astype(jnp.bfloat16), scale.astype(jnp.bfloat16), 1e-6)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), wanted, atol=0.05)


def test_bf16_computes_near_f32_on_f32_masters() -> None:
    """Under the bf16 policy the loss stays within 2% and every leaf of the state is f32 still."""
    half, full = run_of(precision="bf16"), run_of()
    assert half.outs[0].loss != full.outs[0].loss
    for mine, wanted in zip(half.outs, full.outs, strict=True):
        np.testing.assert_allclose(mine.loss, wanted.loss, rtol=0.02)
    assert {name: x.dtype for name, x in half.end.items()} == {name: x.dtype for name, x in full.end.items()}
