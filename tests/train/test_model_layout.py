"""Layout never changes the result: meshes, microbatches, execution and worlds against one device."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from packtrain.core.errors import LayoutError
from packtrain.train import axes
from packtrain.train.config import ModelConfig
from packtrain.train.mesh import make_mesh
from packtrain.train.state import init_state, shardings
from packtrain.train.step import place_batch
from tests.train.tiny import MODEL, OPTIM, SEED, Run, fresh, host, mesh_of, packed_rows, placed, run_of

LOSS_TOLERANCE = 2e-6
"""Relative. f32 sums in another order; measured: at most 2e-7."""
NORM_TOLERANCE, UPDATE_TOLERANCE = 1e-6, 1e-4
"""Relative, of the norms told: of the parameters, and of the first update, which is Adam's and so widens."""
MOMENT_TOLERANCE = 1e-5
"""Of Adam's first moment, a linear average of the gradients, relative to the largest entry of the tensor."""
PARAM_TOLERANCE = 2e-5
"""Absolute after 3 steps of rate 1e-2; Adam divides small gradients by their own size, so it widens differences."""

LAYOUTS = [{"tensor": 2}, {"fsdp": 2, "context": 2}, {"fsdp": 8}, {"replica": 2, "fsdp": 2, "tensor": 2}]


def named(sizes: object) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) if isinstance(sizes, dict) else str(sizes)


def agree(run: Run, base: Run) -> None:
    for mine, wanted in zip(run.outs, base.outs, strict=True):
        np.testing.assert_allclose(mine.loss, wanted.loss, rtol=LOSS_TOLERANCE)
        np.testing.assert_allclose(mine.grad_norm, wanted.grad_norm, rtol=10 * LOSS_TOLERANCE)
        np.testing.assert_allclose(mine.param_norm, wanted.param_norm, rtol=NORM_TOLERANCE)
        np.testing.assert_allclose(mine.update_norm, wanted.update_norm, rtol=UPDATE_TOLERANCE)
        assert mine.weight_sum == wanted.weight_sum
    for name, wanted in base.end.items():
        if name.startswith("opt/mu/"):
            bound = MOMENT_TOLERANCE * np.abs(wanted).max()
            np.testing.assert_allclose(run.end[name], wanted, rtol=0, atol=bound, err_msg=name)
        elif name.startswith("params/"):
            np.testing.assert_allclose(run.end[name], wanted, rtol=0, atol=PARAM_TOLERANCE, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_every_mesh_agrees_with_one_device(layout: dict[str, int]) -> None:
    """Loss, gradients and parameters of three steps agree."""
    agree(run_of(tuple(layout.items())), run_of())


@pytest.mark.parametrize("layout", [{"fsdp": 8}, {"replica": 2, "fsdp": 2, "tensor": 2}], ids=named)
def test_the_fresh_state_is_the_same_on_every_mesh(layout: dict[str, int]) -> None:
    """Bit for bit, every leaf."""
    made = host(init_state(MODEL, OPTIM, SEED, mesh_of(**layout)))
    for name, wanted in fresh().items():
        np.testing.assert_array_equal(made[name], wanted, err_msg=name)


@pytest.mark.parametrize(("microbatches", "layout"), [(2, {}), (4, {"fsdp": 2}), (2, {"replica": 4})], ids=named)
def test_microbatches_agree(microbatches: int, layout: dict[str, int]) -> None:
    """The global batch in 1, 2 or 4 parts, on worlds of 1, 2 and 4, gives one loss and one gradient."""
    agree(run_of(tuple(layout.items()), microbatches), run_of())


def test_a_world_of_three_pads_rows() -> None:
    """Three replicas share 8 rows in two parts, 12 rows with the padding, which weighs nothing."""
    agree(run_of((("replica", 3),), 2), run_of())


def test_execution_agrees() -> None:
    """Layers unrolled and recomputed give what layers scanned and kept give."""
    agree(run_of(unroll=True, remat="full"), run_of())


def test_a_mesh_really_splits() -> None:
    """On fsdp 2 x tensor 2 the up projection lies in four pieces and the batch in two."""
    mesh = mesh_of(fsdp=2, tensor=2)
    up = placed(fresh(), mesh).params["layers"]["up"]
    assert up.sharding.shard_shape(up.shape) == (2, 8, 12)
    tokens = place_batch(packed_rows(), mesh, 1)["tokens_BL"]
    assert tokens.sharding.shard_shape(tokens.shape) == (4, 16)


def test_padding_rows() -> None:
    """8 rows over 3 devices and 2 microbatches become 12; those added have weight 0 and see no key."""
    placed = jax.device_get(place_batch(packed_rows(), mesh_of(replica=3), 2))
    assert {x.shape for x in placed.values()} == {(12, 16)}
    for name, x in placed.items():
        np.testing.assert_array_equal(x[:8], getattr(packed_rows(), name))
        assert not x[8:].any()


def test_init_depends_on_seed_and_name_only() -> None:
    """Another seed gives other weights; the same tensor of a model with other sizes elsewhere is the same."""
    mesh = mesh_of()
    base, other = fresh(), host(init_state(MODEL, OPTIM, SEED + 1, mesh))
    assert not np.array_equal(base["params/layers/q"], other["params/layers/q"])
    assert not np.array_equal(base["params/layers/gate"], base["params/layers/up"])
    wide = ModelConfig(vocab=128, layers=2, embed=16, heads=8, kv_heads=4, head=4, mlp=48)
    np.testing.assert_array_equal(host(init_state(wide, OPTIM, SEED, mesh))["params/layers/q"], base["params/layers/q"])


def message(call) -> str:
    with pytest.raises(LayoutError) as caught:
        call()
    return str(caught.value)


def test_indivisible_dims_are_named() -> None:
    """A model that does not fit the mesh is refused with dim, size, axis and what to change."""
    text = message(lambda: shardings(MODEL, OPTIM, mesh_of(tensor=8)))
    assert "dim kv_heads of size 4" in text and "tensor = 8" in text and "next:" in text
    text = message(lambda: axes.sharding(("rows", "length"), (8, 15), mesh_of(context=2)))
    assert "dim length of size 15" in text and "context = 2" in text


def test_meshes_that_cannot_be() -> None:
    """Sizes that do not multiply to the devices, or an axis nothing is split over, are refused by name."""
    assert "takes 4 devices, but there are 3" in message(lambda: make_mesh({"fsdp": 4}, jax.devices()[:3]))
    assert "mesh axis stage = 2" in message(lambda: make_mesh({"stage": 2}, jax.devices()[:2]))


@dataclass(frozen=True)
class Chip:
    """As much of a device as a mesh looks at."""

    process_index: int
    id: int


def test_devices_of_one_process_are_neighbours() -> None:
    """Also where their numbers interleave, as on TPU pods."""
    chips = [Chip(process, number) for number, process in enumerate((0, 0, 1, 1, 0, 0, 1, 1))]
    assert [chip.process_index for chip in make_mesh({"fsdp": 8}, chips).devices.flat] == [0] * 4 + [1] * 4


def test_an_empty_mesh_puts_all_devices_on_fsdp() -> None:
    """All six axes are always there; left out they have size 1."""
    shape = dict(make_mesh({}).shape)
    assert shape == {"replica": 1, "fsdp": 8, "tensor": 1, "context": 1, "expert": 1, "stage": 1}
