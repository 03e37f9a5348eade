"""Attention that walks only the live pairs of (query block, key block), in plain JAX: memory linear in length.

A pair is live when some query of its block has a key of its interval in the key block. Which pairs live is computed
from the intervals at run time, so one compiled program serves every mask. Forward keeps a running maximum and sum
(arXiv:2205.14135), backward recomputes the weights from the kept log-sum, over the same pairs (arXiv:2307.08691).

Sizes in shape suffixes: B rows, L queries, S keys, H query heads, G key heads, R query heads per key head, K head.
N query blocks of P queries, M key blocks of C keys; Q = R * P: the queries of a block, a head of the group after the
other. Blocks lie transposed (K before Q), so that every product is a plain one and maximum and sum run over rows:
both are what the CPU is fast at.
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


class Walk(NamedTuple):
    """Live pairs grouped by the block on their outer side: what both loops run over."""

    blocks: jax.Array
    """i32 [B, outer, inner]: the live inner blocks of each outer block in rising order, then fill."""
    counts: jax.Array
    """i32 [B, outer]: how many of them are live."""


def liveness(starts_BL: jax.Array, ends_BL: jax.Array, keys: int, block: int) -> jax.Array:
    """bool [B, N, M]: whether some query of block n has a key of its interval in block m of the keys."""
    P, C = min(block, starts_BL.shape[1]), min(block, keys)
    firsts_M = jnp.arange(0, keys, C, dtype=starts_BL.dtype)
    starts_BNP1, ends_BNP1 = (_blocked(x, P)[..., None] for x in (starts_BL, jnp.minimum(ends_BL, keys)))
    return (jnp.maximum(starts_BNP1, firsts_M) < jnp.minimum(ends_BNP1, firsts_M + C)).any(2)


def walk(live_BXY: jax.Array) -> Walk:
    """The list of a liveness array, grouped by its middle dim."""
    fill = live_BXY.shape[-1]
    numbers_Y = jnp.arange(fill, dtype=jnp.int32)
    return Walk(jnp.sort(jnp.where(live_BXY, numbers_Y, fill), axis=-1), live_BXY.sum(-1, dtype=jnp.int32))


def forward(
    block: int, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(out [B, L, H, K], log of the sum of exponentials f32 [B, N, G, Q], pairs visited i32) on one device."""
    B, L, _, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    P, C = min(block, L), min(block, S)
    qT_BNGKQ = _keys_by_rows(_grouped(q_BLHK * K**-0.5, G, P))
    k_BMGCK, vT_BMGKC = _rows_by_keys(_grouped(k_BSGK, G, C)), _keys_by_rows(_grouped(v_BSGK, G, C))
    starts_BNP, ends_BNP = _blocked(starts_BL, P), _blocked(jnp.minimum(ends_BL, S), P)
    blocks_BNM, counts_BN = walk(liveness(starts_BL, ends_BL, S, block))
    N, Q = qT_BNGKQ.shape[1], qT_BNGKQ.shape[-1]

    def queries(at: jax.Array, done: Kept) -> Kept:
        b, n = at // N, at % N
        qT_GKQ, starts_P, ends_P = (_at(x, b, n) for x in (qT_BNGKQ, starts_BNP, ends_BNP))

        def keys(nth: jax.Array, sums: Kept) -> Kept:
            outT_GKQ, peak_GQ, total_GQ, visited = sums
            m = blocks_BNM[b, n, nth]
            scores_GCQ = _scores(_at(k_BMGCK, b, m), qT_GKQ, starts_P, ends_P, m * C)
            higher_GQ = jnp.maximum(peak_GQ, scores_GCQ.max(1))
            weights_GCQ, shrink_GQ = jnp.exp(scores_GCQ - higher_GQ[:, None]), jnp.exp(peak_GQ - higher_GQ)
            more_GKQ = _times(_at(vT_BMGKC, b, m), weights_GCQ.astype(v_BSGK.dtype))
            total_GQ = total_GQ * shrink_GQ + weights_GCQ.sum(1)
            return outT_GKQ * shrink_GQ[:, None] + more_GKQ, higher_GQ, total_GQ, visited + 1

        outT_BNGKQ, log_total_BNGQ, visited = done
        start = (_zeros(G, K, Q), jnp.full((G, Q), EMPTY, jnp.float32), _zeros(G, Q), visited)
        outT_GKQ, peak_GQ, total_GQ, visited = lax.fori_loop(0, counts_BN[b, n], keys, start)
        total_GQ = jnp.where(total_GQ > 0, total_GQ, 1.0)
        outT_BNGKQ = _put(outT_BNGKQ, outT_GKQ / total_GQ[:, None], b, n)
        return outT_BNGKQ, _put(log_total_BNGQ, peak_GQ + jnp.log(total_GQ), b, n), visited

    start = jnp.zeros((B, N, G, K, Q), q_BLHK.dtype), _zeros(B, N, G, Q), jnp.zeros((), jnp.int32)
    outT_BNGKQ, log_total_BNGQ, visited = lax.fori_loop(0, B * N, queries, start)
    return _ungrouped(outT_BNGKQ.swapaxes(-1, -2), P, L), log_total_BNGQ, visited


def backward(
    block: int, q_BLHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, starts_BL: jax.Array, ends_BL: jax.Array,
    out_BLHK: jax.Array, log_total_BNGQ: jax.Array, d_out_BLHK: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv, pairs visited i32) on one device; grouped by key block, dq added up in place."""
    B, L, _, K = q_BLHK.shape
    S, G = k_BSGK.shape[1:3]
    P, C = min(block, L), min(block, S)
    both = _keys_by_rows, _rows_by_keys
    qT_BNGKQ, q_BNGQK = (order(_grouped(q_BLHK * K**-0.5, G, P)) for order in both)
    d_outT_BNGKQ, d_out_BNGQK = (order(_grouped(d_out_BLHK, G, P)) for order in both)
    kT_BMGKC, k_BMGCK = (order(_grouped(k_BSGK, G, C)) for order in both)
    v_BMGCK = _rows_by_keys(_grouped(v_BSGK, G, C))
    # What softmax takes off: the mean of d_weights under the weights. Source: arXiv:2307.08691, equation (4).
    mean_BLH1 = (out_BLHK.astype(jnp.float32) * d_out_BLHK.astype(jnp.float32)).sum(-1, keepdims=True)
    mean_BNGQ = _rows_by_keys(_grouped(mean_BLH1, G, P))[..., 0]
    starts_BNP, ends_BNP = _blocked(starts_BL, P), _blocked(jnp.minimum(ends_BL, S), P)
    blocks_BMN, counts_BM = walk(liveness(starts_BL, ends_BL, S, block).swapaxes(1, 2))
    N, M, Q = qT_BNGKQ.shape[1], k_BMGCK.shape[1], qT_BNGKQ.shape[-1]

    def keys(at: jax.Array, done: Kept) -> Kept:
        b, m = at // M, at % M
        k_GCK, kT_GKC, v_GCK = (_at(x, b, m) for x in (k_BMGCK, kT_BMGKC, v_BMGCK))

        def queries(nth: jax.Array, sums: Kept) -> Kept:
            dqT_BNGKQ, dk_GCK, dv_GCK, visited = sums
            n = blocks_BMN[b, m, nth]
            scores_GCQ = _scores(k_GCK, _at(qT_BNGKQ, b, n), _at(starts_BNP, b, n), _at(ends_BNP, b, n), m * C)
            weights_GCQ = jnp.exp(scores_GCQ - _at(log_total_BNGQ, b, n)[:, None])
            d_weights_GCQ = _times(v_GCK, _at(d_outT_BNGKQ, b, n))
            d_scores_GCQ = weights_GCQ * (d_weights_GCQ - _at(mean_BNGQ, b, n)[:, None])
            d_scores_GCQ, weights_GCQ = (x.astype(q_BLHK.dtype) for x in (d_scores_GCQ, weights_GCQ))
            dqT_BNGKQ = _put(dqT_BNGKQ, _at(dqT_BNGKQ, b, n) + _times(kT_GKC, d_scores_GCQ), b, n)
            dk_GCK = dk_GCK + _times(d_scores_GCQ, _at(q_BNGQK, b, n))
            return dqT_BNGKQ, dk_GCK, dv_GCK + _times(weights_GCQ, _at(d_out_BNGQK, b, n)), visited + 1

        dqT_BNGKQ, dk_BMGCK, dv_BMGCK, visited = done
        start = dqT_BNGKQ, _zeros(G, C, K), _zeros(G, C, K), visited
        dqT_BNGKQ, dk_GCK, dv_GCK, visited = lax.fori_loop(0, counts_BM[b, m], queries, start)
        return dqT_BNGKQ, _put(dk_BMGCK, dk_GCK, b, m), _put(dv_BMGCK, dv_GCK, b, m), visited

    start = _zeros(B, N, G, K, Q), _zeros(B, M, G, C, K), _zeros(B, M, G, C, K), jnp.zeros((), jnp.int32)
    dqT_BNGKQ, dk_BMGCK, dv_BMGCK, visited = lax.fori_loop(0, B * M, keys, start)
    dq_BLHK = _ungrouped(dqT_BNGKQ.swapaxes(-1, -2) * K**-0.5, P, L)
    return dq_BLHK, _ungrouped(dk_BMGCK, C, S), _ungrouped(dv_BMGCK, C, S), visited


def _scores(k_GCK: jax.Array, qT_GKQ: jax.Array, starts_P: jax.Array, ends_P: jax.Array, first: Any) -> jax.Array:
    """f32 [G, C, Q]: products of a pair's keys and queries, MASKED where the query may not see the key."""
    G, C, Q, P = *k_GCK.shape[:2], qT_GKQ.shape[-1], len(starts_P)
    keys_C1 = first + lax.broadcasted_iota(starts_P.dtype, (C, 1), 0)
    mask_CP = (keys_C1 >= starts_P) & (keys_C1 < ends_P)
    scores_GCRP = _times(k_GCK, qT_GKQ).reshape(G, C, Q // P, P)
    return jnp.where(mask_CP[None, :, None], scores_GCRP, MASKED).reshape(G, C, Q)


def _times(x_GXY: jax.Array, y_GYZ: jax.Array) -> jax.Array:
    """A plain product for each key head, added up in f32."""
    return lax.dot_general(x_GXY, y_GYZ, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)


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


def _grouped(x_BLHK: jax.Array, groups: int, size: int) -> jax.Array:
    """[B, L, H, K] -> [B, N, P, G, R, K]."""
    x_BNPHK = _blocked(x_BLHK, size)
    return x_BNPHK.reshape(*x_BNPHK.shape[:3], groups, -1, x_BNPHK.shape[-1])


def _rows_by_keys(x_BNPGRK: jax.Array) -> jax.Array:
    """[B, N, P, G, R, K] -> [B, N, G, R * P, K]."""
    B, N, P, G, R, K = x_BNPGRK.shape
    return x_BNPGRK.transpose(0, 1, 3, 4, 2, 5).reshape(B, N, G, R * P, K)


def _keys_by_rows(x_BNPGRK: jax.Array) -> jax.Array:
    """[B, N, P, G, R, K] -> [B, N, G, K, R * P]."""
    B, N, P, G, R, K = x_BNPGRK.shape
    return x_BNPGRK.transpose(0, 1, 3, 5, 4, 2).reshape(B, N, G, K, R * P)


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

    As `attention.reference`, in memory linear in L and S and in time linear in the pairs that live. Blocks have `block`
    queries or keys. Under vmap it raises NotImplementedError: loops with trip counts of their own would become one
    loop, as long as the longest.
    """
    return _value_and_kept(q_BLHK, k_BSGK, v_BSGK, starts_BL, ends_BL, block)[0]


def _value_and_kept(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array, block: int
) -> tuple[jax.Array, Kept]:
    out, log_total, _ = _unbatched(forward, block)(q, k, v, starts, ends)
    # Named where they are made: what rematerialisation keeps under this name is all that the gradient needs.
    out, log_total = (checkpoint_name(x, "attended") for x in (out, log_total))
    return out, (q, k, v, starts, ends, out, log_total)


def _gradient(block: int, kept: Kept, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    dq, dk, dv, _ = _unbatched(backward, block)(*kept, d_out)
    return dq.astype(kept[0].dtype), dk.astype(kept[1].dtype), dv.astype(kept[2].dtype), None, None


blockwise.defvjp(_value_and_kept, _gradient)


def _unbatched(attention: Callable[..., Any], block: int) -> Callable[..., Any]:
    guarded = custom_vmap(functools.partial(attention, block))

    @guarded.def_vmap
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("blockwise attention has a batch dim of its own: put rows there, do not vmap it")

    return guarded
