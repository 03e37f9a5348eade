"""AdamW and the learning-rate schedules. Schedules read `step`; bias correction counts the updates applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from packtrain.train.axes import ParamSpec
from packtrain.train.config import OptimConfig
from packtrain.train.model import Tree


def schedule(optim: OptimConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """step (batches consumed before this one) -> learning rate, f32.

    Linear warmup, then `constant`; `cosine` to `final_fraction` at `steps`; or `wsd`: constant, then linear to
    `final_fraction` over the last `decay_fraction` of the run. Source of wsd: arXiv:2404.06395.
    """

    def rate(step: jax.Array) -> jax.Array:
        done = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, (done + 1) / max(optim.warmup_steps, 1))
        return optim.learning_rate * warm * _fall(optim, steps, done)

    return rate


def _fall(optim: OptimConfig, steps: int, done: jax.Array) -> jax.Array | float:
    """Share of the full rate left after `done` of `steps` steps, warmup aside."""
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "cosine":
        span = max(steps - optim.warmup_steps, 1)
        x = jnp.clip((done - optim.warmup_steps) / span, 0.0, 1.0)
        share = 0.5 * (1 + jnp.cos(jnp.pi * x))
    else:
        share = jnp.clip((steps - done) / max(steps * optim.decay_fraction, 1.0), 0.0, 1.0)
    return optim.final_fraction + (1 - optim.final_fraction) * share


def direction(optim: OptimConfig) -> optax.GradientTransformation:
    """Adam's direction from a clipped gradient. Its own counter advances with each update applied, and only then."""
    return optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.epsilon)


def clip_factor(norm: jax.Array, clip_norm: float) -> jax.Array | float:
    """What brings a gradient of this global norm down to at most `clip_norm`; 0: no clipping."""
    if clip_norm == 0:
        return 1.0
    return jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))


def updated(
    params: Tree, opt: Any, sums: Tree, factor: jax.Array | float, specs: Tree, rate: jax.Array, optim: OptimConfig
) -> tuple[Tree, Any]:
    """One AdamW update by the gradient `factor * sums`: p - rate * (direction + decay * p), decay on matrices only.

    The factor (1 / sum of weights, and the clipping) comes along so that it fuses with the moments, no pass of its own.
    Source: arXiv:1711.05101.
    """
    directions, opt = direction(optim).update(jax.tree.map(lambda g: g * factor, sums), opt)

    def move(p: jax.Array, d: jax.Array, spec: ParamSpec) -> jax.Array:
        return p - rate * (d + optim.weight_decay * p if spec.is_matrix else d)

    return jax.tree.map(move, params, directions, specs), opt
