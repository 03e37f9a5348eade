"""Storing f32 numbers in bf16: to nearest, or at random so that the mean is right.

A weight moves by less than half of a bf16 step in most updates; rounded to nearest it stays where it is for ever, and
rounded at random it moves as often as it should (arXiv:2010.06192). The random bits follow from (seed, "rounding",
step, name of the leaf) and from the place of the element in the whole tensor: they are the same on every layout, and a
resumed run rounds as an uncut one.
"""

from __future__ import annotations

import functools
import zlib

import jax
import jax.numpy as jnp

DTYPES = {"f32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}


def rounding_key(seed: int, step: jax.Array) -> jax.Array:
    """For all roundings of one step; `rounded` adds the name of the leaf."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"rounding")), step)


def rounded(
    x: jax.Array, dtype: jnp.dtype, key: jax.Array | None, name: str, first: jax.Array | None = None
) -> jax.Array:
    """Finite f32 `x` as `dtype`; with a key at random: up with a chance equal to the share of the step below it.

    `first`: `x` is some layers of a stack, from this one on; each has random bits of its own, however many come along.
    """
    if key is None or dtype != jnp.bfloat16:
        return x.astype(dtype)
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    if first is None:
        noise = jax.random.bits(key, x.shape, jnp.uint16)
    else:
        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(first + jnp.arange(len(x)))
        noise = jax.vmap(lambda key: jax.random.bits(key, x.shape[1:], jnp.uint16))(keys)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise.astype(jnp.uint32)
    # bf16 is the upper half of f32, so a carry out of the lower half is one step away from 0.
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(dtype)
