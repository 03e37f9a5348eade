"""Scale gates a CPU can measure: what compiled steps send, hold, copy and consist of, against `packtrain shape`."""

from __future__ import annotations

import functools
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from packtrain.recipes.catalog import resolve
from packtrain.train import shape
from tests.soak.scale_worker import RUNGS
from tests.train import lowering

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = pathlib.Path(__file__).parents[2]
SENT_TOLERANCE = 0.05
"""The bound asked for; measured: nothing but scalars differs."""
MEMORY_TOLERANCE = 0.10
"""The bound asked for; measured: 2.3% at most."""
SCALARS = 1024
"""Bytes of losses, norms, counters and digest, which the formula leaves out: none grows with the model."""
ALLOWED_COPIES = (
    r"%wrapped_broadcast[.\d]*",  # zeros that gradients are added to
    r"%param_0[.\d]*", r"state\.params\[\\*'(un)?embedding\\*'\]",  # a table, laid out for its gather
    r".*/(all_gather|reduce_scatter|scatter-add|transpose|dot_general)",  # tables; a layer's weights, laid out for use
)


@functools.cache
def measured(devices: int) -> dict[str, dict[str, Any]]:
    """case -> what `scale_worker` says of it."""
    command = [sys.executable, "-m", "tests.soak.scale_worker", str(devices)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {case["name"]: case for case in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("devices", [8, 64])
def test_bytes_sent(devices: int) -> None:
    """By mesh axes and kind, compiled programs send what the formula says, within 5% or a few scalars."""
    for name, case in measured(devices).items():
        found, wanted = case["sent"], case["sent_wanted"]
        for key in found.keys() | wanted.keys():
            off = abs(found.get(key, 0) - wanted.get(key, 0))
            assert off <= max(SCALARS, SENT_TOLERANCE * wanted.get(key, 0)), (name, key)


def test_memory_of_each_rung() -> None:
    """Arguments are state and batch, exactly; with temporaries the compiled steps are within 10% of the formula."""
    cases = measured(8) | measured(64)
    assert {f"{size} fsdp 8" for size in RUNGS} <= cases.keys()
    for name, case in cases.items():
        assert 0 <= case["arguments"] - case["state"] - case["batch"] <= SCALARS, name
        assert 0 <= case["outputs"] - case["state"] <= SCALARS, name
        if not name.endswith("layers"):  # as few tokens as in those a person would not give a device
            found = case["arguments"] + case["temporary"]
            assert found == pytest.approx(case["memory_wanted"], rel=MEMORY_TOLERANCE), name


def test_no_copy_of_a_parameter() -> None:
    """Nothing as large as a device's piece of a stacked parameter, or as a table, is copied, but for a short list."""
    allowed = re.compile("|".join(ALLOWED_COPIES))
    found = [copy for copy in measured(8)["64 layers"]["copies"] if not allowed.fullmatch(copy)]
    assert not found


def test_no_stack_of_parameters_is_cast() -> None:
    """In bf16 the lowered step casts weights a layer at a time: the whole of none but the output table."""
    recipe = resolve("rung:10m")
    of = shape.Layout(lowering.sections(recipe, ["train.precision=bf16", "model.layers=64"], fsdp=8))
    text = lowering.traced(of, devices=False).lower(lowering_platforms=("cpu",)).as_text()
    stacked = re.findall(r"stablehlo\.convert .* -> tensor<(64x\d+x\d+(?:x\d+)?)xbf16>", text)
    shapes = {
        "x".join(str(n) for n in shape) for name in of.leaves if name.startswith("params/layers/")
        for shape in (lowering_piece(of, name), of.leaves[name][0])  # inside the devices' part of the text, and outside
    }
    assert shapes and not shapes & set(stacked)
    assert "xbf16>" in text


def lowering_piece(of: shape.Layout, name: str) -> tuple[int, ...]:
    size, _, dims = of.leaves[name]
    return tuple(of.elements((dim,), (n,)) for dim, n in zip(dims, size, strict=True))


def test_the_program_does_not_grow_with_depth() -> None:
    """At 4 and at 64 layers the optimised program has the same operations, and as many of each."""
    few, many = (measured(8)[f"{layers} layers"]["operations"] for layers in (4, 64))
    assert few == many
