"""The loss over a large vocabulary against the formula, its gradient, and what it never holds."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packtrain.train import axes
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig
from packtrain.train.loss import Head, Losses, head_losses
from packtrain.train.model import init_params, logits_of
from packtrain.train.orders import SILENCE
from packtrain.train.state import state_specs, unflatten
from packtrain.train.step import Command, gradient_sums, make_step, place_batch, place_orders
from tests.train.lowering import SHIPPED
from tests.train.tiny import OPTIM, mesh_of, packed_rows

B, L, D, V = 2, 8, 8, 24
SEEDS = range(5)


def drawn(seed: int) -> tuple[jax.Array, ...]:
    """Hidden vectors of sizes up to where scores reach the hundreds, a table, targets, weights of which some are 0."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(B, L, D)) * draw.choice([0.3, 3, 30], (B, L, 1))
    weights = draw.uniform(0, 2, (B, L)) * draw.integers(0, 2, (B, L))
    return (
        jnp.float32(x), jnp.float32(draw.normal(size=(V, D))), jnp.int32(draw.integers(0, V, (B, L))),
        jnp.float32(weights),
    )


def plain(x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array, head: Head) -> Losses:
    scores = x @ table.T
    if head.softcap:
        scores = head.softcap * jnp.tanh(scores / head.softcap)
    log_total = jax.scipy.special.logsumexp(scores, -1)
    nll = log_total - jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return Losses((weights * (nll + head.z_loss * log_total**2)).sum(), (weights * nll).sum())


@functools.cache
def with_gradient(losses: Any, head: Head) -> Any:
    """The compiled (gradient of 3 x objective in x and table, losses); the losses undifferentiated too."""
    def of(x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[Any, ...]:
        found = losses(x, table, targets, weights, head)
        return 3 * found.objective, found

    def both(*given: jax.Array) -> Any:
        return (*jax.grad(of, (0, 1), has_aux=True)(*given), losses(*given, head))

    return jax.jit(both)


def agree(found: Any, wanted: Any) -> None:
    """f32 against f32 in another order; measured over 200 seeds: at most 1.2e-6 of the largest entry."""
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


@pytest.mark.parametrize(("softcap", "z_loss", "tokens"), [(0, 0, 0), (0, 0, 5), (20.0, 0, 16), (20.0, 0.1, 3)])
def test_equals_the_formula(softcap: float, z_loss: float, tokens: int) -> None:
    """Value and gradient, whatever is capped or added, in chunks that divide the tokens or do not; a weight of 0 sends
    nothing back."""
    head = Head(mesh_of(), softcap, z_loss, tokens)
    for seed in SEEDS:
        given = drawn(seed)
        found, wanted = with_gradient(head_losses, head)(*given), with_gradient(plain, head)(*given)
        agree(found, wanted)
        assert not np.asarray(found[0][0])[np.asarray(given[3]) == 0].any()


@functools.cache
def on_a_mesh(head: Head) -> Any:
    """As `with_gradient`, each device with its rows and its entries of the vocabulary; sums by hand, as the step's."""
    rows, table, mesh = axes.place(("rows",), head.mesh), axes.place(("vocab",), head.mesh), head.mesh

    def local(x: jax.Array, table: jax.Array, *data: jax.Array) -> Any:
        def of(x: jax.Array, table: jax.Array) -> tuple[Any, ...]:
            found = head_losses(x, table, *data, head)
            return 3 * found.objective, found

        (dx, d_table), found = jax.grad(of, (0, 1), has_aux=True)(x, table)
        sums = axes.total(jnp.stack([*found, *head_losses(x, table, *data, head)]), ("rows",), mesh)
        return (axes.total(dx, ("vocab",), mesh), axes.total(d_table, ("rows",), mesh)), sums

    return jax.jit(axes.spread(local, mesh, (rows, table, rows, rows), ((rows, table), axes.place((), mesh))))


def test_equals_the_formula_on_a_mesh() -> None:
    """Rows over replica and fsdp, the vocabulary over tensor, in chunks: the same value and gradient."""
    head = Head(mesh_of(replica=2, fsdp=2, tensor=2), 20.0, 0.1, 3)
    for seed in SEEDS:
        x, table, *data = drawn(seed)
        x, targets, weights = (jnp.concatenate([a, a]) for a in (x, *data))  # 4 rows for 4 pieces
        wanted, *sums = with_gradient(plain, head)(x, table, targets, weights)
        agree(on_a_mesh(head)(x, table, targets, weights), (wanted, jnp.stack(jax.tree.leaves(sums))))


def test_the_reported_loss_is_the_plain_one() -> None:
    """z-loss changes the gradient and not the sum of nll that a step reports, judges and compares."""
    model = ModelConfig(vocab=128, layers=1, embed=4, heads=1, kv_heads=1, head=2, mlp=2)
    mesh, batch = mesh_of(), place_batch(packed_rows(rows=1), mesh_of(), 1)

    def sums(z_loss: float) -> Any:
        return gradient_sums(init_params(model, 0), batch, model, TrainConfig(z_loss=z_loss), mesh)[0]

    (nll, gradient), (same, other) = jax.jit(lambda: (sums(0.0), sums(0.1)))()
    assert nll == same
    assert not np.allclose(gradient["embedding"], other["embedding"])


def test_sampling_caps_as_training_does() -> None:
    """Scores that a sample is drawn from are those the loss was taken of."""
    model = ModelConfig(vocab=128, embed=D, logit_softcap=2.0)
    x, table = drawn(0)[0], jnp.ones((128, D))
    found = logits_of(x, {"embedding": table}, model, mesh_of())
    np.testing.assert_allclose(found, 2 * np.tanh(np.asarray(x @ table.T) / 2), rtol=1e-5, atol=1e-6)


def largest_array(loss_tokens: int) -> int:
    """Elements of the largest array in the compiled step of a model that is small beside tokens x vocabulary."""
    model = ModelConfig(vocab=2048, layers=1, embed=16, heads=1, kv_heads=1, head=16, mlp=16)
    mesh, train = mesh_of(), TrainConfig(loss_tokens=loss_tokens)
    batch = place_batch(packed_rows(rows=4, length=64, vocab=2048), mesh, 1)
    shapes = {name: jax.ShapeDtypeStruct(shape, kind) for name, (shape, kind, _) in state_specs(model, OPTIM).items()}
    state = unflatten(shapes, model, OPTIM)
    step: Any = make_step(model, OptimConfig(), GuardConfig(), train, mesh)
    program = step.lower(state, batch, place_orders(SILENCE, mesh), jnp.int32(Command.RUN))
    text = program.compile(SHIPPED | {"xla_backend_optimization_level": 0}).as_text()
    return max(math.prod(map(int, sizes.split(","))) for sizes in re.findall(r"[a-z]\w*\[([\d,]+)\]", text))


def test_no_array_of_tokens_by_vocabulary() -> None:
    """In the compiled step of 256 tokens and 2048 words the largest array is the table or a chunk of 64 tokens, a
    quarter; asked for one chunk of all, the same search finds it."""
    assert largest_array(64) <= 64 * 2048
    assert largest_array(256) == 256 * 2048
