"""What is computed and kept in which type: bf16 for products of weights, f32 where sums are taken."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packtrain.core.errors import Contradiction
from packtrain.train import axes
from packtrain.train.axes import ParamSpec
from packtrain.train.config import OptimConfig, TrainConfig
from packtrain.train.model import init_params, param_specs
from packtrain.train.optim import start, updated
from packtrain.train.rounding import DTYPES, rounded, rounding_key
from packtrain.train.state import state_specs
from packtrain.train.step import gradient_sums, place_batch
from tests.train.tiny import MODEL, SEED, mesh_of, packed_rows

BF16 = DTYPES["bf16"]
SUMS = {"exp", "log", "rsqrt", "reduce_sum", "reduce_max", "cumsum", "psum", "scatter-add"}


def operations(program: Any) -> Iterator[Any]:
    """Every operation of a jaxpr, those of inner programs too."""
    for operation in program.eqns:
        yield operation
        for value in jax.tree.leaves(list(operation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from operations(inner)


def sums_of(params: Any, batch: Any) -> Any:
    """Loss and gradient with bf16 compute, as the step takes them."""
    return gradient_sums(params, batch, MODEL, TrainConfig(precision="bf16", microbatches=2), mesh_of())


@functools.cache
def arguments(master: str) -> tuple[Any, Any]:
    params = jax.eval_shape(functools.partial(init_params, MODEL), SEED)
    kept = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, DTYPES[master]), params)
    return kept, place_batch(packed_rows(), mesh_of(), 2)


@functools.cache
def bf16_program() -> list[Any]:
    return list(operations(jax.make_jaxpr(sums_of)(*arguments("f32")).jaxpr))


def is_bf16(value: Any) -> bool:
    return getattr(value.aval, "dtype", None) == BF16


def test_sums_are_taken_in_f32() -> None:
    """With bf16 compute no statistic of a norm, no softmax, no loss and no sum over rows is taken in bf16."""
    found = {op.primitive.name for op in bf16_program() if op.primitive.name in SUMS and any(map(is_bf16, op.invars))}
    assert not found


def test_weights_are_multiplied_in_bf16() -> None:
    """The seven matrices of a layer and the head, forward and twice backward: operands in bf16."""
    products = [op for op in bf16_program() if op.primitive.name == "dot_general" and all(map(is_bf16, op.invars))]
    assert len(products) >= 3 * 8


def test_gradients_of_weights_are_never_rounded_to_bf16() -> None:
    """Of the seven matrices of a layer: products that have the shape of a weight come out in f32."""
    sizes = {spec.shape[1:] for spec in param_specs(MODEL)["layers"].values() if spec.is_matrix}
    products = [op for op in bf16_program() if op.primitive.name == "dot_general"]
    found = [op.outvars[0].aval.dtype for op in products if op.outvars[0].aval.shape in sizes]
    assert len(found) >= 7 and set(found) == {jnp.dtype(jnp.float32)}


@pytest.mark.soak
def test_gradients_on_two_devices_are_those_of_one() -> None:
    """Sharded over fsdp 2, with bf16 compute, every gradient is within f32 rounding of one device's, relative to its
    largest entry (measured: 6e-7; added in bf16 it would be 4e-3)."""
    train, params = TrainConfig(precision="bf16"), init_params(MODEL, SEED)

    def on(mesh: Any) -> Any:
        sums = jax.jit(lambda params, batch: gradient_sums(params, batch, MODEL, train, mesh)[0][1])
        return jax.device_get(sums(params, place_batch(packed_rows(), mesh, 1)))

    for mine, wanted in zip(jax.tree.leaves(on(mesh_of(fsdp=2))), jax.tree.leaves(on(mesh_of())), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_gradients_are_f32() -> None:
    """Whatever the weights are kept in, their gradients are f32, so microbatches are added in f32."""
    (_, grads), _ = jax.eval_shape(sums_of, *arguments("bf16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("x", [1.001, -3.3e-5, 1.0, 2.0**-126, 0.0])
def test_stochastic_rounding_is_right_on_average(x: float) -> None:
    """Only the two neighbours in bf16 come out, and their mean over 65,536 draws is x within five standard errors."""
    draws = np.asarray(rounded(jnp.full(1 << 16, x, jnp.float32), BF16, jax.random.key(0), "x"), np.float64)
    below, above = (float(f(draws)) for f in (np.min, np.max))
    assert below <= np.float32(x) <= above and len(np.unique(draws)) <= 2
    share = 0.0 if above == below else (np.float32(x) - below) / (above - below)
    error = (above - below) * np.sqrt(share * (1 - share) / len(draws))
    assert abs(draws.mean() - float(np.float32(x))) <= 5 * error


def test_rounding_follows_seed_step_and_name() -> None:
    """The same three give the same bits, another of any gives others; to nearest without a key."""
    x = jnp.linspace(1.0, 1.1, 512)

    def bits(seed: int, step: int, name: str) -> bytes:
        return np.asarray(rounded(x, BF16, rounding_key(seed, jnp.int32(step)), name)).tobytes()

    assert bits(1, 5, "mu/q") == bits(1, 5, "mu/q")
    assert len({bits(1, 5, "mu/q"), bits(2, 5, "mu/q"), bits(1, 6, "mu/q"), bits(1, 5, "nu/q")}) == 4
    np.testing.assert_array_equal(rounded(x, BF16, None, "mu/q"), x.astype(jnp.bfloat16))
    np.testing.assert_array_equal(rounded(x, DTYPES["f32"], rounding_key(1, jnp.int32(5)), "mu/q"), x)


def test_rounding_of_some_layers_is_that_of_all() -> None:
    """An optimizer that takes a few layers at a time rounds each as one that takes them all, and no two alike."""
    x, key = jnp.full((6, 64), 1.001, jnp.float32), rounding_key(1, jnp.int32(5))
    whole = np.asarray(rounded(x, BF16, key, "gate", jnp.int32(0)))
    cuts = (0, 2), (2, 5), (5, 6)
    parts = [np.asarray(rounded(x[at:end], BF16, key, "gate", jnp.int32(at))) for at, end in cuts]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len({layer.tobytes() for layer in whole}) == 6


def test_rounding_is_the_same_on_every_layout() -> None:
    """An element is rounded by its place in the whole tensor, wherever it lies."""
    dims, x = ("layer", "embed", "mlp"), np.random.default_rng(0).normal(size=(2, 16, 24)).astype(np.float32)
    round_ = jax.jit(lambda x: rounded(x, BF16, rounding_key(1, jnp.int32(5)), "gate"))
    whole = np.asarray(round_(x))
    for sizes in ({"fsdp": 2, "tensor": 2}, {"replica": 2, "fsdp": 4}):
        cut = round_(jax.device_put(x, axes.sharding(dims, x.shape, mesh_of(**sizes))))
        assert np.asarray(cut).tobytes() == whole.tobytes()


def test_small_updates_are_not_lost() -> None:
    """400 updates of 1e-4 on a weight of 1: kept in bf16 and rounded to nearest it never moves; at random it goes
    where f32 goes, within five standard errors over 256 weights (measured: 0.9602 against 0.9600)."""
    specs = {"w": ParamSpec((256,), ("embed",), "ones")}

    def after(optim: OptimConfig) -> np.ndarray:
        def one(n: int, kept: Any) -> Any:
            key = rounding_key(0, n) if optim.rounding == "stochastic" else None
            ones = {"w": jnp.ones(256)}
            return updated(kept[0], kept[1], ones, 1.0, specs, jnp.float32(1e-4), optim, mesh_of(), key)[:2]

        begin = ({"w": jnp.ones(256, DTYPES[optim.master])}, start(optim, specs))
        return np.asarray(jax.jit(lambda kept: jax.lax.fori_loop(0, 400, one, kept))(begin)[0]["w"], np.float32)

    assert (after(OptimConfig(master="bf16", rounding="nearest")) == 1).all()
    # Of a walk of 400 moves down by 2**-8, each with a chance of 1e-4 * 2**8.
    error = 2**-8 * np.sqrt(400 * 0.0256 * 0.9744) / np.sqrt(256)
    assert abs(after(OptimConfig(master="bf16")).mean() - 0.96) < 5 * error


def test_what_is_kept_in_bf16() -> None:
    """Weights and moments as asked for, each in its own type; counts, guard and factored statistics stay."""
    both = state_specs(MODEL, OptimConfig(master="bf16", moments="bf16"))
    kinds = {name.partition("/")[0] + "/" + dtype for name, (_, dtype, _) in both.items() if "/" in name}
    assert kinds == {"params/bfloat16", "opt/bfloat16", "opt/int32", "guard/float32"}
    factored = state_specs(MODEL, OptimConfig(name="adafactor", master="bf16"))
    assert {dtype for name, (_, dtype, _) in factored.items() if name.startswith("opt/")} == {"float32", "int32"}
    with pytest.raises(Contradiction, match="adafactor keeps no moments"):
        OptimConfig(name="adafactor", moments="bf16")
