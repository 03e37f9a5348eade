"""Attention that walks only the live pairs of (query block, key block), in plain JAX: memory linear in length.

A pair is live when some query of its block has a key of its interval in the key block. Which pairs live is computed
from the intervals at run time, so one compiled program serves every mask. Forward keeps a running maximum and sum
(arXiv:2205.14135), backward recomputes the weights from the kept log-sum, over the same pairs (arXiv:2307.08691).

Sizes in shape suffixes: B rows, L queries, S keys, H query heads, G key heads, R query heads per key head, K head.
N query blocks of P queries, M key blocks of C keys; Q = R * P: the queries of a block, a head of the group after the
other. T behind a name: it lies on its side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

MASKED = -1e30
"""A finite stand-in for minus infinity, as in the reference."""
EMPTY = MASKED / 2
"""Where maxima start: far above MASKED, so that a row without a key gets weights exp(MASKED - EMPTY) = 0."""

Kept = tuple[jax.Array, ...]


class Tile(NamedTuple):
    """How many queries and keys a pair has."""

    queries: int
    keys: int


def tile_of(block: int, q_BLHK: jax.Array, k_BSGK: jax.Array) -> Tile:
    """Tiles of `block` keys and as many queries, twice as many where each key head has one query head only.

    XLA's CPU runs a product on more than one core from about 16 MFLOP on: 512 queries of a group, 256 keys, K = 64.
    """
    (_, L, H, _), (S, G) = q_BLHK.shape, k_BSGK.shape[1:3]
    return Tile(min(L, block * max(1, 2 * G // H)), min(S, block))


class Walk(NamedTuple):
    """Live pairs grouped by the block on their outer side: what both loops run over."""

    blocks: jax.Array
    """i32 [B, outer, inner]: the live inner blocks of each outer block in rising order, then fill."""
    counts: jax.Array
    """i32 [B, outer]: how many of them are live."""


def liveness(tile: Tile, starts_BL: jax.Array, ends_BL: jax.Array, keys: int) -> jax.Array:
    """bool [B, N, M]: whether some query of block n has a key of its interval in block m of the keys."""
    firsts_M = jnp.arange(0, keys, tile.keys, dtype=starts_BL.dtype)
    starts_BNP1, ends_BNP1 = (_blocked(x, tile.queries)[..., None] for x in (starts_BL, jnp.minimum(ends_BL, keys)))
    return (jnp.maximum(starts_BNP1, firsts_M) < jnp.minimum(ends_BNP1, firsts_M + tile.keys)).any(2)


def walk(live_BXY: jax.Array) -> Walk:
    """The list of a liveness array, grouped by its middle dim."""
    fill = live_BXY.shape[-1]
    numbers_Y = jnp.arange(fill, dtype=jnp.int32)
    return Walk(jnp.sort(jnp.where(live_BXY, numbers_Y, fill), axis=-1), live_BXY.sum(-1, dtype=jnp.int32))


def forward(
    tile: Tile, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out [B, L, H, K], log of the sum of exponentials f32 [B, N, G, Q], pairs visited i32) on one device."""
    (B, L, H, K), (S, G) = q_BLHK.shape, k_BSGK.shape[1:3]
    P, C = tile
    q_BNGQK = _by_block(q_BLHK * K**-0.5, G, P)
    k_BMGCK, v_BMGCK = (_by_block(x, G, C) for x in (k_BSGK, v_BSGK))
    starts_BNQ, ends_BNQ = (jnp.tile(_blocked(x, P), H // G) for x in (starts_BL, jnp.minimum(ends_BL, S)))
    blocks_BNM, counts_BN = walk(liveness(tile, starts_BL, ends_BL, S))
    N, Q = q_BNGQK.shape[1], q_BNGQK.shape[3]

    def queries(at: jax.Array, done: Kept) -> Kept:
        b, n = at // N, at % N
        q_GQK, starts_Q1, ends_Q1 = _at(q_BNGQK, b, n), _at(starts_BNQ, b, n)[:, None], _at(ends_BNQ, b, n)[:, None]

        def keys(nth: jax.Array, sums: Kept) -> Kept:
            out_GQK, peak_GQ, total_GQ, visited = sums
            m = blocks_BNM[b, n, nth]
            keys_C = m * C + jnp.arange(C, dtype=starts_Q1.dtype)
            scores_GQC = _masked(_times_turned(q_GQK, _at(k_BMGCK, b, m)), keys_C, starts_Q1, ends_Q1)
            higher_GQ = jnp.maximum(peak_GQ, scores_GQC.max(-1))
            weights_GQC, shrink_GQ = jnp.exp(scores_GQC - higher_GQ[..., None]), jnp.exp(peak_GQ - higher_GQ)
            more_GQK = _times(weights_GQC.astype(v_BSGK.dtype), _at(v_BMGCK, b, m))
            total_GQ = total_GQ * shrink_GQ + weights_GQC.sum(-1)
            return out_GQK * shrink_GQ[..., None] + more_GQK, higher_GQ, total_GQ, visited + 1

        out_BNGQK, log_total_BNGQ, visited = done
        start = (_zeros(G, Q, K), jnp.full((G, Q), EMPTY, jnp.float32), _zeros(G, Q), visited)
        out_GQK, peak_GQ, total_GQ, visited = lax.fori_loop(0, counts_BN[b, n], keys, start)
        total_GQ = jnp.where(total_GQ > 0, total_GQ, 1.0)
        out_BNGQK = _put(out_BNGQK, out_GQK / total_GQ[..., None], b, n)
        return out_BNGQK, _put(log_total_BNGQ, peak_GQ + jnp.log(total_GQ), b, n), visited

    start = jnp.zeros((B, N, G, Q, K), q_BLHK.dtype), _zeros(B, N, G, Q), jnp.zeros((), jnp.int32)
    out_BNGQK, log_total_BNGQ, visited = lax.fori_loop(0, B * N, queries, start)
    return _ungrouped(out_BNGQK, P, L), log_total_BNGQ, visited


def backward(
    tile: Tile, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array,
    out_BLHK: jax.Array, log_total_BNGQ: jax.Array, d_out_BLHK: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv f32, pairs visited i32) on one device; grouped by key block, dq added up in place.

    Scores lie with keys first here, so that four of five products are plain ones of few columns; for the fifth, dq
    lies on its side, because the CPU is slow where it has to turn the first operand.
    """
    (B, L, H, K), (S, G) = q_BLHK.shape, k_BSGK.shape[1:3]
    P, C = tile
    q_BNGQK, d_out_BNGQK = (_by_block(x, G, P) for x in (q_BLHK * K**-0.5, d_out_BLHK))
    k_BMGCK, v_BMGCK = (_by_block(x, G, C) for x in (k_BSGK, v_BSGK))
    # What softmax takes off: the mean of d_weights under the weights. Source: arXiv:2307.08691, equation (4).
    mean_BLH1 = (out_BLHK.astype(jnp.float32) * d_out_BLHK.astype(jnp.float32)).sum(-1, keepdims=True)
    mean_BNGQ = _by_block(mean_BLH1, G, P)[..., 0]
    starts_BNQ, ends_BNQ = (jnp.tile(_blocked(x, P), H // G) for x in (starts_BL, jnp.minimum(ends_BL, S)))
    blocks_BMN, counts_BM = walk(liveness(tile, starts_BL, ends_BL, S).swapaxes(1, 2))
    N, M, Q = q_BNGQK.shape[1], k_BMGCK.shape[1], q_BNGQK.shape[3]

    def keys(at: jax.Array, done: Kept) -> Kept:
        b, m = at // M, at % M
        k_GCK, v_GCK = _at(k_BMGCK, b, m), _at(v_BMGCK, b, m)
        kT_GKC = lax.optimization_barrier(k_GCK.swapaxes(1, 2))
        keys_C1 = (m * C + jnp.arange(C, dtype=starts_BNQ.dtype))[:, None]

        def queries(nth: jax.Array, sums: Kept) -> Kept:
            dqT_BNGKQ, dk_GCK, dv_GCK, visited = sums
            n = blocks_BMN[b, m, nth]
            q_GQK, d_out_GQK = _at(q_BNGQK, b, n), _at(d_out_BNGQK, b, n)
            scores_GCQ = _times_turned(k_GCK, q_GQK)
            scores_GCQ = _masked(scores_GCQ, keys_C1, _at(starts_BNQ, b, n), _at(ends_BNQ, b, n))
            weights_GCQ = jnp.exp(scores_GCQ - _at(log_total_BNGQ, b, n)[:, None])
            d_scores_GCQ = weights_GCQ * (_times_turned(v_GCK, d_out_GQK) - _at(mean_BNGQ, b, n)[:, None])
            d_scores_GCQ, weights_GCQ = (x.astype(q_BLHK.dtype) for x in (d_scores_GCQ, weights_GCQ))
            dqT_BNGKQ = _put(dqT_BNGKQ, _at(dqT_BNGKQ, b, n) + _times(kT_GKC, d_scores_GCQ), b, n)
            dk_GCK, dv_GCK = dk_GCK + _times(d_scores_GCQ, q_GQK), dv_GCK + _times(weights_GCQ, d_out_GQK)
            return dqT_BNGKQ, dk_GCK, dv_GCK, visited + 1

        dqT_BNGKQ, dk_BMGCK, dv_BMGCK, visited = done
        start = dqT_BNGKQ, _zeros(G, C, K), _zeros(G, C, K), visited
        dqT_BNGKQ, dk_GCK, dv_GCK, visited = lax.fori_loop(0, counts_BM[b, m], queries, start)
        return dqT_BNGKQ, _put(dk_BMGCK, dk_GCK, b, m), _put(dv_BMGCK, dv_GCK, b, m), visited

    start = _zeros(B, N, G, K, Q), _zeros(B, M, G, C, K), _zeros(B, M, G, C, K), jnp.zeros((), jnp.int32)
    dqT_BNGKQ, dk_BMGCK, dv_BMGCK, visited = lax.fori_loop(0, B * M, keys, start)
    dq_BLHK = _ungrouped(dqT_BNGKQ.swapaxes(-1, -2) * K**-0.5, P, L)
    return dq_BLHK, _ungrouped(dk_BMGCK, C, S), _ungrouped(dv_BMGCK, C, S), visited


def _masked(scores: jax.Array, keys: jax.Array, starts: jax.Array, ends: jax.Array) -> jax.Array:
    """Scores, MASKED where the query may not see the key; the others are given so that they broadcast to scores."""
    return jnp.where((keys >= starts) & (keys < ends), scores, MASKED)


def _times(x_GXY: jax.Array, y_GYZ: jax.Array) -> jax.Array:
    """A plain product for each key head, added up in f32."""
    return lax.dot_general(x_GXY, y_GYZ, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _times_turned(x_GXY: jax.Array, z_GZY: jax.Array) -> jax.Array:
    """The same with the second operand lying on its side: the CPU multiplies either at the same speed."""
    return lax.dot_general(x_GXY, z_GZY, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def _at(x: jax.Array, b: Any, n: Any) -> jax.Array:
    """x[b, n] of an array [B, blocks, ...]."""
    return lax.dynamic_slice(x, (b, n, *[0] * (x.ndim - 2)), (1, 1, *x.shape[2:]))[0, 0]


def _put(x: jax.Array, value: jax.Array, b: Any, n: Any) -> jax.Array:
    """x with x[b, n] = value; in place where x is what a loop carries."""
    return lax.dynamic_update_slice(x, value.astype(x.dtype)[None, None], (b, n, *[0] * (x.ndim - 2)))


def _blocked(x_BL: jax.Array, size: int) -> jax.Array:
    """[B, L, ...] -> [B, blocks, size, ...], the last block filled up with zeros (for intervals: no key)."""
    fill = -x_BL.shape[1] % size
    if fill:
        x_BL = jnp.pad(x_BL, ((0, 0), (0, fill), *[(0, 0)] * (x_BL.ndim - 2)))
    return x_BL.reshape(x_BL.shape[0], -1, size, *x_BL.shape[2:])


def _by_block(x_BLHK: jax.Array, groups: int, size: int) -> jax.Array:
    """[B, L, H, K] -> [B, N, G, R * size, K]: each block one piece of memory."""
    x_BNPHK = _blocked(x_BLHK, size)
    B, N, P, H, K = x_BNPHK.shape
    x_BNPGRK = x_BNPHK.reshape(B, N, P, groups, H // groups, K)
    return x_BNPGRK.transpose(0, 1, 3, 4, 2, 5).reshape(B, N, groups, H // groups * P, K)


def _ungrouped(x_BNGQK: jax.Array, size: int, length: int) -> jax.Array:
    """[B, N, G, Q, K] -> [B, L, H, K]."""
    B, N, G, Q, K = x_BNGQK.shape
    x_BNPGRK = x_BNGQK.reshape(B, N, G, Q // size, size, K).transpose(0, 1, 4, 2, 3, 5)
    return x_BNPGRK.reshape(B, N * size, G * Q // size, K)[:, :length]


# --- in a gradient -----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def blockwise(
    q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array, block: int
) -> jax.Array:
    """softmax(q k / sqrt(K)) v over the keys in each row's interval -> [B, L, H, K] in the type of `q`.

    As `attention.reference`, in memory linear in L and S and in time linear in the pairs that live; a pair is a tile of
    about `block` queries by `block` keys (`tile_of`). Under vmap it raises NotImplementedError: loops with trip counts
    of their own would become one loop, as long as the longest.
    """
    return _value_and_kept(q_BLHK, k_BSGK, v_BSGK, starts_BL, ends_BL, block)[0]


def _value_and_kept(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array, block: int
) -> tuple[jax.Array, Kept]:
    out, log_total, _ = _unbatched(forward, tile_of(block, q, k))(q, k, v, starts, ends)
    # Named where they are made: what rematerialisation keeps under this name is all that the gradient needs.
    out, log_total = (checkpoint_name(x, "attended") for x in (out, log_total))
    return out, (q, k, v, starts, ends, out, log_total)


def _gradient(block: int, kept: Kept, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    dq, dk, dv, _ = _unbatched(backward, tile_of(block, *kept[:2]))(*kept, d_out)
    return dq.astype(kept[0].dtype), dk.astype(kept[1].dtype), dv.astype(kept[2].dtype), None, None


blockwise.defvjp(_value_and_kept, _gradient)


def _unbatched(attention: Callable[..., Any], tile: Tile) -> Callable[..., Any]:
    guarded = custom_vmap(functools.partial(attention, tile))

    @guarded.def_vmap
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("blockwise attention has a batch dim of its own: put rows there, do not vmap it")

    return guarded
