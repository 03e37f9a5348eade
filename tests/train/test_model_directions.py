"""Muon and Adafactor against optax and against arithmetic by hand, and what they keep for each parameter."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from packtrain.train.axes import ParamSpec
from packtrain.train.config import OptimConfig
from packtrain.train.directions import NEWTON_SCHULZ, adafactor, muon, newton_schulz
from packtrain.train.state import state_specs
from tests.train.tiny import MODEL, mesh_of

MUON, ADAFACTOR = OptimConfig(name="muon"), OptimConfig(name="adafactor")
QUERY = ParamSpec((2, 6, 3, 4), ("layer", "embed", "heads", "head"), 1.0)
OUT = ParamSpec((2, 3, 4, 6), ("layer", "heads", "head", "embed"), 1.0)


def draw(spec: ParamSpec, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=spec.shape).astype(np.float32)


def by_singular_values(x: np.ndarray) -> np.ndarray:
    """The polynomial that Newton-Schulz is, on the singular values, in double precision."""
    u, s, v = np.linalg.svd(np.asarray(x, np.float64) / np.linalg.norm(x), full_matrices=False)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


@pytest.mark.parametrize(("spec", "matrix"), [(QUERY, (6, 12)), (OUT, (12, 6))])
def test_muon_orthogonalises_each_layer_with_its_heads_folded(spec: ParamSpec, matrix: tuple[int, int]) -> None:
    """Three updates with Nesterov momentum equal the polynomial on the singular values of [embed, heads * head] of
    each layer, times 0.2 * sqrt(longer side): f32 against f64, measured 4e-6."""
    mu, slots = np.zeros(spec.shape), {"mu": jnp.zeros(spec.shape)}
    one = jax.jit(functools.partial(muon, spec=spec, optim=MUON, mesh=mesh_of()))
    for step in range(3):
        grad = draw(spec, step)
        mu = 0.95 * mu + 0.05 * grad
        ahead = 0.95 * mu + 0.05 * grad
        wanted = [0.2 * math.sqrt(12) * by_singular_values(x.reshape(matrix)) for x in ahead]
        found, slots = one(jnp.asarray(grad), slots, jnp.int32(step))
        np.testing.assert_allclose(found, np.reshape(wanted, spec.shape), atol=2e-5)


def test_muon_equals_optax() -> None:
    """The first update of one matrix is that of optax.contrib.scale_by_muon with its scaling to a consistent RMS."""
    spec = ParamSpec((6, 9), ("embed", "mlp"), 1.0)
    theirs = optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=optax.contrib.MuonDimensionNumbers((0,), (1,))),
    )
    grad = jnp.asarray(draw(spec, 0))
    wanted, _ = theirs.update(grad, theirs.init(grad))
    found, _ = muon(grad, {"mu": jnp.zeros(spec.shape)}, jnp.int32(0), spec, MUON, mesh_of())
    np.testing.assert_allclose(found, 0.2 * 3 * wanted, rtol=1e-4, atol=1e-5)


def test_newton_schulz_of_next_to_nothing() -> None:
    """A zero matrix stays zero, and one whose squares vanish in f32 stays small and finite."""
    x = jnp.stack([jnp.zeros((3, 4)), jnp.full((3, 4), 1e-25)])
    found = jax.vmap(newton_schulz)(x)
    assert not found[0].any() and jnp.isfinite(found).all() and jnp.abs(found).max() < 1e-3


def test_adafactor_equals_optax_on_each_layer() -> None:
    """Three updates of a stacked matrix equal optax's of each layer alone, clipped to a root mean square of 1."""
    spec = ParamSpec((2, 5, 7), ("layer", "embed", "mlp"), 1.0)
    theirs = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0))
    layer = jnp.zeros(spec.shape[1:])
    states = [theirs.init(layer) for _ in range(2)]
    slots = {"row": jnp.zeros((2, 5)), "column": jnp.zeros((2, 7))}
    for step in range(3):
        grad = jnp.asarray(draw(spec, step)) * jnp.asarray([1.0, 50.0])[:, None, None]
        both = [theirs.update(g, state, layer) for g, state in zip(grad, states)]
        states = [state for _, state in both]
        found, slots = adafactor(grad, slots, jnp.int32(step), spec, ADAFACTOR, mesh_of())
        np.testing.assert_allclose(found, jnp.stack([update for update, _ in both]), rtol=2e-5)


def test_adafactor_of_a_token_never_seen_and_a_quiet_channel() -> None:
    """The product of both statistics vanishes in f32; the direction stays finite, and 0 where the gradient is."""
    spec = ParamSpec((16, 8), ("vocab", "embed"), 1.0)
    grad = draw(spec, 0) * np.where(np.arange(8) == 3, 1e-9, 1.0)
    grad[5] = 0.0
    slots = {"row": jnp.zeros(8), "column": jnp.zeros(16)}
    found, _ = adafactor(jnp.asarray(grad, jnp.float32), slots, jnp.int32(0), spec, ADAFACTOR, mesh_of())
    assert jnp.isfinite(found).all() and not found[5].any() and jnp.abs(found[0]).min() > 0


def test_adafactor_keeps_whole_moments_of_vectors() -> None:
    """A norm's scale is divided by the root of its own running mean square."""
    spec = ParamSpec((4,), ("embed",), "ones")
    slots = {"nu": jnp.zeros(4)}
    for step, grad in enumerate(([3.0, -3.0, 3.0, 3.0], [1.0, -1.0, 1.0, 1.0])):
        found, slots = adafactor(jnp.asarray(grad), slots, jnp.int32(step), spec, ADAFACTOR, mesh_of())
    share = 2**-0.8
    np.testing.assert_allclose(slots["nu"], 9 * (1 - share) + share, rtol=1e-6)
    np.testing.assert_allclose(found, np.array([1, -1, 1, 1]) / math.sqrt(9 * (1 - share) + share), rtol=1e-5)


def test_slots_follow_the_dims() -> None:
    """What each optimizer keeps, by name and dims; AdamW's names are those of every run so far."""
    def kept(name: str) -> dict[str, Any]:
        leaves = state_specs(MODEL, OptimConfig(name=name)).items()
        return {leaf: dims for leaf, (_, _, dims) in leaves if leaf.startswith("opt/")}

    params = [name.removeprefix("params/") for name in state_specs(MODEL, OptimConfig()) if name.startswith("params/")]
    assert set(kept("adamw")) == {"opt/count"} | {f"opt/{slot}/{name}" for slot in ("mu", "nu") for name in params}
    without = kept("adamw").keys() - kept("muon").keys()
    assert without == {f"opt/nu/layers/{name}" for name in ("q", "k", "v", "out", "gate", "up", "down")}
    factored = kept("adafactor")
    assert factored["opt/row/layers/q"] == ("layer", "embed")
    assert factored["opt/column/layers/q"] == ("layer", "heads", "head")
    assert factored["opt/column/layers/out"] == ("layer", "heads", "head")
    assert factored["opt/row/embedding"] == ("embed",) and factored["opt/column/embedding"] == ("vocab",)
    assert factored["opt/nu/final_norm"] == ("embed",) and "opt/row/final_norm" not in factored
