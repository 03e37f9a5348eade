"""Cross-entropy over a large vocabulary, a chunk of tokens at a time, its gradient taken in the same pass.

For each chunk: scores, loss, and at once what the loss sends back to the hidden vectors and to the table. So no array
of [tokens, vocab] exists, forward or backward.
B rows, L length, C tokens of a chunk, N chunks, D embed, V vocab.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from packtrain.train import axes
from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.model import Batch, Tree, hidden, output_table, soft_capped

CHUNK_BYTES, CHUNK_TOKENS = 32 << 20, 512
"""Size of a chunk where `train.loss_tokens` does not say: so many bytes of f32 scores, or so many tokens if that is
more (each chunk reads the table and adds to its gradient; fewer tokens than that do not pay for it). Measured on CPU,
8,192 entries: 128 tokens cost 7% more than 256 to 1,024, and all 2,048 at once 19% more."""
Kept = tuple[jax.Array, jax.Array]
"""What the objective sends back to x [B, L, D] and to the table [V, D]."""


class Losses(NamedTuple):
    """Sums over a batch, f32 scalars, not yet divided: parts of a batch can be added."""

    objective: jax.Array
    """sum(w * (nll + z_loss * log_total ** 2)): what is differentiated."""
    nll: jax.Array
    """sum(w * nll): what is reported, judged and compared. Equals the objective where z_loss is 0; has no gradient."""


@dataclass(frozen=True)
class Head:
    """How hidden vectors become a loss."""

    mesh: Mesh
    softcap: float = 0.0
    z_loss: float = 0.0
    tokens: int = 0
    """In a chunk, on each device; 0: see CHUNK_BYTES."""


class Chunk(NamedTuple):
    x_CD: jax.Array
    targets_C: jax.Array
    weights_C: jax.Array


class Scored(NamedTuple):
    """A chunk's scores over this device's part of the vocabulary, and what is known of each token over all of it."""

    scores_CV: jax.Array
    log_total_C: jax.Array
    target_score_C: jax.Array
    local_C: jax.Array
    """Each target as an index into this device's part; out of range where another device has it."""


def losses(params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh) -> Losses:
    """Over this device's rows of `batch`, differentiable in `params` (its pieces, see `axes.spread`)."""
    head = Head(mesh, model.logit_softcap, train.z_loss, train.loss_tokens)
    x_BLD = hidden(params, batch, model, train, mesh)
    table_VD = output_table(params, model, x_BLD.dtype, mesh)
    with jax.named_scope("loss"):
        return head_losses(x_BLD, table_VD, batch["targets_BL"], batch["weights_BL"], head)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_losses(
    x_BLD: jax.Array, table_VD: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, head: Head
) -> Losses:
    """Of the scores x table^T, capped. Targets and weights are data: they get no gradient. The table is multiplied in
    the type of x and its gradient is of its own type, as in `matmul.project`.

    Where `vocab` is cut a device has the table's rows of its own entries: all get the same losses, and each sends its
    part of a sum back to x. No collective has the size of the table. Sources: arXiv:2204.02311 section 5 (z-loss),
    arXiv:2408.00118 (soft-cap).
    """

    table_VD = table_VD.astype(x_BLD.dtype)

    def add(sums: Losses, chunk: Chunk) -> tuple[Losses, None]:
        return _plus(sums, _token_losses(_score(chunk, table_VD, head), chunk, head)), None

    return jax.lax.scan(add, _zero(), _chunks(x_BLD, targets_BL, weights_BL, len(table_VD), head))[0]


def _forward(
    x_BLD: jax.Array, table_VD: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, head: Head
) -> tuple[Losses, Kept]:
    """The losses, and the gradient of the objective already: it only needs to be multiplied by a number later."""
    (V, D), kind = table_VD.shape, table_VD.dtype
    table_VD = table_VD.astype(x_BLD.dtype)

    def add(sums: tuple[Losses, jax.Array], chunk: Chunk) -> tuple[tuple[Losses, jax.Array], jax.Array]:
        scored = _score(chunk, table_VD, head)
        # Without the barrier XLA computes the exponentials inside both products, which then run at half their speed.
        d_scores_CV = jax.lax.optimization_barrier(_d_scores(scored, chunk, head).astype(x_BLD.dtype))
        x_DC = jax.lax.optimization_barrier(chunk.x_CD.T)  # a plain product, not one transposed on the fly: matmul.py
        d_table_DV = jnp.matmul(x_DC, d_scores_CV, preferred_element_type=jnp.float32)
        return (_plus(sums[0], _token_losses(scored, chunk, head)), sums[1] + d_table_DV), d_scores_CV @ table_VD

    chunks = _chunks(x_BLD, targets_BL, weights_BL, V, head)
    (sums, d_table_DV), dx_NCD = jax.lax.scan(add, (_zero(), jnp.zeros((D, V), jnp.float32)), chunks)
    dx_BLD = dx_NCD.reshape(-1, D)[: targets_BL.size].reshape(x_BLD.shape)
    return sums, (dx_BLD, d_table_DV.T.astype(kind))


def _backward(head: Head, kept: Kept, d: Losses) -> tuple[jax.Array, jax.Array, None, None]:
    dx_BLD, d_table_VD = ((x * d.objective).astype(x.dtype) for x in kept)
    return dx_BLD, d_table_VD, None, None


head_losses.defvjp(_forward, _backward)


# --- a chunk ---------------------------------------------------------------------------------------


def _chunks(x_BLD: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, V: int, head: Head) -> Chunk:
    """The tokens in equal chunks, arrays of [N, C, ...]; the last is filled up with tokens of weight 0."""
    tokens, most = targets_BL.size, head.tokens or max(CHUNK_TOKENS, CHUNK_BYTES // (4 * V))
    N = -(-tokens // most)
    C = -(-tokens // N)
    short = N * C - tokens

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(tokens, *x.shape[2:])
        padded = jnp.pad(flat, ((0, short), *((0, 0),) * (flat.ndim - 1))) if short else flat
        return padded.reshape(N, C, *flat.shape[1:])

    return Chunk(cut(x_BLD), cut(targets_BL), cut(weights_BL))


def _score(chunk: Chunk, table_VD: jax.Array, head: Head) -> Scored:
    mesh, V = head.mesh, table_VD.shape[0]
    scores_CV = jnp.einsum("CD,VD->CV", chunk.x_CD, table_VD, preferred_element_type=jnp.float32)
    scores_CV = soft_capped(scores_CV, head.softcap)
    peak_C = axes.greatest(scores_CV.max(-1), "vocab", mesh)
    total_C = jnp.exp(scores_CV - peak_C[:, None]).sum(-1)
    local_C = chunk.targets_C - axes.first_of("vocab", V, mesh)
    # One element a token; a masked sum, which XLA writes out before it adds, cost 13% of the whole loss on CPU.
    picked_C = jnp.take_along_axis(scores_CV, jnp.clip(local_C, 0, V - 1)[:, None], -1)[:, 0]
    target_score_C = jnp.where((local_C >= 0) & (local_C < V), picked_C, 0.0)
    total_C, target_score_C = axes.total(jnp.stack([total_C, target_score_C]), ("vocab",), mesh)
    return Scored(scores_CV, peak_C + jnp.log(total_C), target_score_C, local_C)


def _token_losses(scored: Scored, chunk: Chunk, head: Head) -> Losses:
    nll_C = scored.log_total_C - scored.target_score_C
    objective_C = nll_C + head.z_loss * scored.log_total_C**2 if head.z_loss else nll_C
    return Losses((chunk.weights_C * objective_C).sum(), (chunk.weights_C * nll_C).sum())


def _d_scores(scored: Scored, chunk: Chunk, head: Head) -> jax.Array:
    """d objective / d (scores before the cap), f32 [C, V]."""
    scores_CV, log_total_C1, weights_C1 = scored.scores_CV, scored.log_total_C[:, None], chunk.weights_C[:, None]
    chances_CV = jnp.exp(scores_CV - log_total_C1)
    if head.z_loss:
        chances_CV = chances_CV * (1 + 2 * head.z_loss * log_total_C1)
    d_scores_CV = weights_C1 * jnp.where(_is_target(scores_CV, scored.local_C), chances_CV - 1, chances_CV)
    return d_scores_CV * (1 - jnp.square(scores_CV / head.softcap)) if head.softcap else d_scores_CV


def _is_target(scores_CV: jax.Array, local_C: jax.Array) -> jax.Array:
    # A comparison rather than a gather: it fuses with the passes over the scores.
    return jnp.arange(scores_CV.shape[-1], dtype=local_C.dtype) == local_C[:, None]


def _zero() -> Losses:
    return Losses(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def _plus(a: Losses, b: Losses) -> Losses:
    return Losses(a.objective + b.objective, a.nll + b.nll)
