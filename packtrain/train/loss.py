"""Cross-entropy with its gradient written out: one pass over the logits forward, one backward, nothing else kept."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from packtrain.train import axes
from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.model import Batch, Tree, hidden, logits_of

Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def weighted_nll(logits_BLV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, mesh: Mesh) -> jax.Array:
    """sum(w * -log softmax(logits)[target]), a f32 scalar. Targets and weights are data: they get no gradient.

    Where `vocab` is cut each device has the scores of its own entries, and all get the same sum.
    """
    return _forward(logits_BLV, targets_BL, weights_BL, mesh)[0]


def _forward(
    logits_BLV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array, mesh: Mesh
) -> tuple[jax.Array, Kept]:
    peak_BL = axes.greatest(logits_BLV.max(-1), "vocab", mesh)
    total_BL = jnp.exp(logits_BLV - peak_BL[..., None]).sum(-1)
    # A masked sum rather than a gather: it fuses with the pass above, and adds up where vocab is cut.
    target_logit_BL = jnp.where(_is_target(logits_BLV, targets_BL, mesh), logits_BLV, 0.0).sum(-1)
    total_BL, target_logit_BL = axes.total(jnp.stack([total_BL, target_logit_BL]), ("vocab",), mesh)
    log_total_BL = peak_BL + jnp.log(total_BL)
    nll_sum = (weights_BL * (log_total_BL - target_logit_BL)).sum()
    return nll_sum, (logits_BLV, targets_BL, weights_BL, log_total_BL)


def _backward(mesh: Mesh, kept: Kept, d_sum: jax.Array) -> tuple[jax.Array, None, None]:
    logits_BLV, targets_BL, weights_BL, log_total_BL = kept
    chances_BLV = jnp.exp(logits_BLV - log_total_BL[..., None])
    d_logits_BLV = jnp.where(_is_target(logits_BLV, targets_BL, mesh), chances_BLV - 1.0, chances_BLV)
    return d_logits_BLV * (d_sum * weights_BL)[..., None], None, None


def _is_target(logits_BLV: jax.Array, targets_BL: jax.Array, mesh: Mesh) -> jax.Array:
    entries = logits_BLV.shape[-1]
    entries_V = axes.first_of("vocab", entries, mesh) + jnp.arange(entries, dtype=targets_BL.dtype)
    return entries_V == targets_BL[..., None]


weighted_nll.defvjp(_forward, _backward)


def nll_sum(params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh) -> jax.Array:
    """sum(w * nll) over this device's rows of `batch`: not yet divided, so that parts of a batch can be added."""
    logits_BLV = logits_of(hidden(params, batch, model, train, mesh), params, model, mesh)
    return weighted_nll(logits_BLV, batch["targets_BL"], batch["weights_BL"], mesh)
