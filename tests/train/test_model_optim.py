"""AdamW and its schedules against optax's own and against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from packtrain.train import axes
from packtrain.train.axes import ParamSpec
from packtrain.train.config import OptimConfig
from packtrain.train.guard import summary
from packtrain.train.model import param_specs
from packtrain.train.optim import clip_factor, schedule, updated
from packtrain.train.optim import start as start_opt
from tests.train.tiny import MODEL, mesh_of

SPECS = {
    "matrix": ParamSpec((3, 4), ("embed", "mlp"), 1.0), "stacked": ParamSpec((2, 4), ("layer", "embed"), "ones"),
    "vector": ParamSpec((4,), ("embed",), "ones"),
}


def draws(seed: int) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    return {name: jnp.asarray(draw.normal(size=spec.shape), jnp.float32) for name, spec in SPECS.items()}


def test_updates_equal_optax_adamw() -> None:
    """Five updates equal optax.adamw behind its clipping, with decay masked to matrices."""
    optim = OptimConfig(learning_rate=3e-3, weight_decay=0.3, clip_norm=0.7)
    matrices = {name: spec.is_matrix for name, spec in SPECS.items()}
    adamw = optax.adamw(3e-3, optim.beta1, optim.beta2, optim.epsilon, weight_decay=0.3, mask=matrices)
    theirs = optax.chain(optax.clip_by_global_norm(0.7), adamw)

    @jax.jit
    def five_updates(start: Any, gradients: list[Any]) -> tuple[Any, Any]:
        mine = wanted = start
        opt, their_opt = start_opt(optim, SPECS), theirs.init(start)
        for grads in gradients:
            factor = clip_factor(summary(grads, SPECS, mesh_of(), jnp.float32(0)).norm, 0.7)
            mine, opt, _ = updated(mine, opt, grads, factor, SPECS, jnp.float32(3e-3), optim, mesh_of())
            moves, their_opt = theirs.update(grads, their_opt, wanted)
            wanted = optax.apply_updates(wanted, moves)
        return mine, wanted

    mine, wanted = five_updates(draws(0), [draws(seed) for seed in range(1, 6)])
    for name in SPECS:
        np.testing.assert_allclose(mine[name], wanted[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_layers_that_do_not_divide_over_the_devices(name: str) -> None:
    """Three layers taken two at a time, the second of them twice, end as one at a time on one device."""
    spec, optim = ParamSpec((3, 4, 6), ("layer", "embed", "mlp"), 1.0), OptimConfig(name=name)
    draw, specs = np.random.default_rng(0), {"x": spec}
    p, grads = ({"x": jnp.asarray(draw.normal(size=spec.shape), jnp.float32)} for _ in range(2))

    def ended(mesh: Mesh) -> Any:
        return jax.jit(
            lambda p, grads: updated(p, start_opt(optim, specs), grads, 1.0, specs, jnp.float32(1e-2), optim, mesh)
        )(p, grads)

    assert axes.dealt_at_once(3, spec.dims, mesh_of(fsdp=2)) == 2 and axes.dealt_at_once(3, spec.dims, mesh_of()) == 1
    for mine, wanted in zip(*(jax.tree.leaves(ended(mesh)) for mesh in (mesh_of(fsdp=2), mesh_of())), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("layers", "devices", "wanted"), [
    (64, 1, 8), (64, 8, 8), (128, 8, 16), (60, 4, 4), (62, 4, 8), (12, 8, 8), (6, 8, 6), (1, 1, 1), (61, 1, 1),
])
def test_layers_at_once(layers: int, devices: int, wanted: int) -> None:
    """At most an eighth, so many that all devices have as many, none dealt twice for nothing."""
    mesh, dims = mesh_of(fsdp=devices), ("layer", "embed", "mlp")
    at_once = axes.dealt_at_once(layers, dims, mesh)
    assert at_once == wanted
    assert -(-layers // at_once) * axes.dealt_layers(at_once, dims, mesh) == axes.dealt_layers(layers, dims, mesh)


def test_decay_falls_on_matrices_only() -> None:
    """By dims: at least two besides `layer`. Norm scales, stacked or not, are left alone."""
    leaves = jax.tree.leaves_with_path(param_specs(MODEL), is_leaf=lambda x: isinstance(x, ParamSpec))
    spared = {path[-1].key for path, spec in leaves if not spec.is_matrix}
    assert spared == {"attention_norm", "mlp_norm", "q_norm", "k_norm", "final_norm"}


def test_clipping_bounds_the_global_norm() -> None:
    """A longer gradient comes out at the bound, a shorter one and `0` unchanged; a zero gradient divides by nothing."""
    grads = draws(1)
    norm = summary(grads, SPECS, mesh_of(), jnp.float32(0)).norm
    np.testing.assert_allclose(norm, np.sqrt(sum(np.square(g).sum() for g in grads.values())), rtol=1e-6)
    np.testing.assert_allclose(norm * clip_factor(norm, 0.5), 0.5, rtol=1e-6)
    assert clip_factor(norm, 1e6) == clip_factor(norm, 0.0) == clip_factor(jnp.float32(0.0), 1.0) == 1.0


@pytest.mark.parametrize(("kind", "step", "share"), [
    ("wsd", 0, 0.1), ("wsd", 9, 1.0), ("wsd", 80, 1.0), ("wsd", 90, 0.55), ("wsd", 100, 0.1), ("wsd", 150, 0.1),
    ("cosine", 4, 0.5), ("cosine", 10, 1.0), ("cosine", 55, 0.55), ("cosine", 100, 0.1), ("cosine", 150, 0.1),
    ("constant", 4, 0.5), ("constant", 99, 1.0),
])
def test_schedules(kind: str, step: int, share: float) -> None:
    """Warmup of 10, then the shape asked for, ending at a tenth after 100 steps and staying there."""
    optim = OptimConfig(learning_rate=2.0, warmup_steps=10, schedule=kind, decay_fraction=0.2, final_fraction=0.1)
    np.testing.assert_allclose(schedule(optim, 100)(jnp.int32(step)), 2.0 * share, rtol=1e-5)


def test_no_warmup() -> None:
    """warmup_steps = 0 starts at the full rate."""
    rate = schedule(OptimConfig(learning_rate=2.0, warmup_steps=0, schedule="constant"), 10)
    assert rate(jnp.int32(0)) == 2.0
