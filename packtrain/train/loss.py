"""Cross-entropy with its gradient written out: one pass over the logits forward, one backward, nothing else kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from packtrain.train.config import ModelConfig, TrainConfig
from packtrain.train.model import Batch, Tree, forward

Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def weighted_nll(logits_BLV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array) -> jax.Array:
    """sum(w * -log softmax(logits)[target]), a f32 scalar. Targets and weights are data: they get no gradient."""
    return _forward(logits_BLV, targets_BL, weights_BL)[0]


def _forward(logits_BLV: jax.Array, targets_BL: jax.Array, weights_BL: jax.Array) -> tuple[jax.Array, Kept]:
    peak_BL = logits_BLV.max(-1)
    log_total_BL = peak_BL + jnp.log(jnp.exp(logits_BLV - peak_BL[..., None]).sum(-1))
    # A masked sum rather than a gather: it fuses with the pass above and needs no collective where vocab is split.
    target_logit_BL = jnp.where(_is_target(logits_BLV, targets_BL), logits_BLV, 0.0).sum(-1)
    nll_sum = (weights_BL * (log_total_BL - target_logit_BL)).sum()
    return nll_sum, (logits_BLV, targets_BL, weights_BL, log_total_BL)


def _backward(kept: Kept, d_sum: jax.Array) -> tuple[jax.Array, None, None]:
    logits_BLV, targets_BL, weights_BL, log_total_BL = kept
    chances_BLV = jnp.exp(logits_BLV - log_total_BL[..., None])
    d_logits_BLV = jnp.where(_is_target(logits_BLV, targets_BL), chances_BLV - 1.0, chances_BLV)
    return d_logits_BLV * (d_sum * weights_BL)[..., None], None, None


def _is_target(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    return jnp.arange(logits_BLV.shape[-1], dtype=targets_BL.dtype) == targets_BL[..., None]


weighted_nll.defvjp(_forward, _backward)


def nll_sum(params: Tree, batch: Batch, model: ModelConfig, train: TrainConfig, mesh: Mesh) -> jax.Array:
    """sum(w * nll) over the rows of `batch`: not yet divided, so that parts of a batch can be added."""
    return weighted_nll(forward(params, batch, model, train, mesh), batch["targets_BL"], batch["weights_BL"])
