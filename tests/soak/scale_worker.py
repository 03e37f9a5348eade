"""Compiles training steps from shapes on many virtual devices, and prints what the compiler made of them as JSON lines.

A process of its own: the number of devices is set at its start, and the compiler's passes are all on (tests turn some
off).
Usage: python -m tests.soak.scale_worker DEVICES
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import msgspec

from packtrain.recipes.catalog import resolve
from packtrain.train import shape
from tests.train import collectives, lowering

RUNGS = ("10m", "30m", "100m", "300m", "1b", "3b", "7b", "13b", "30b", "64b")
OVERRIDES = ("train.precision=f32",)
LAYERS = "params/layers/"
TINY = ("data.batch_rows=8", "data.length=64")
APART = ("model.vocab=6144",)
"""So that of rung 10m no stack is as large as a table or a piece of one."""


def cases(devices: int) -> Iterator[tuple[str, str, dict[str, int], tuple[str, ...]]]:
    """(name, recipe, mesh, overrides)."""
    if devices == 64:
        yield "300m fsdp 64", "rung:300m", {"fsdp": 64}, ()
        yield "1b replica 2 x fsdp 8 x tensor 4", "rung:1b", {"replica": 2, "fsdp": 8, "tensor": 4}, ()
        return
    for size in RUNGS:
        yield f"{size} fsdp 8", f"rung:{size}", {"fsdp": 8}, ()
    yield "300m fsdp 8, full", "rung:300m", {"fsdp": 8}, ("train.remat=full",)
    yield "64b fsdp 8, none", "rung:64b", {"fsdp": 8}, ("train.remat=none",)
    yield "1b fsdp 4 x tensor 2", "rung:1b", {"fsdp": 4, "tensor": 2}, ()
    for remat in ("full", "attention", "dots"):
        yield f"7b tensor 8, {remat}", "rung:7b", {"tensor": 8}, (f"train.remat={remat}",)
    yield "7b fsdp 8, attention", "rung:7b", {"fsdp": 8}, ("train.remat=attention",)
    muon = "train.remat=attention", "optim.name=muon"
    yield "1b fsdp 4 x tensor 2, attention, Muon", "rung:1b", {"fsdp": 4, "tensor": 2}, muon
    yield "1b replica 2 x fsdp 4, 4 parts", "rung:1b", {"replica": 2, "fsdp": 4}, ("train.microbatches=4",)
    yield "1b fsdp 2 x tensor 2 x context 2", "rung:1b", {"fsdp": 2, "tensor": 2, "context": 2}, ()
    for name in ("muon", "adafactor"):  # so few tokens that memory peaks in the update
        few = *TINY, f"optim.name={name}"
        yield f"1b fsdp 8, {name}", "rung:1b", {"fsdp": 8}, (f"optim.name={name}",)
        yield f"7b tensor 8, few tokens, {name}", "rung:7b", {"tensor": 8}, few
        yield f"7b fsdp 4 x tensor 2, few tokens, {name}", "rung:7b", {"fsdp": 4, "tensor": 2}, few
        yield f"64 layers, {name}", "rung:10m", {"fsdp": 8}, (*few, *APART, "model.layers=64")
    yield "7b replica 2 x fsdp 4, few tokens", "rung:7b", {"replica": 2, "fsdp": 4}, TINY
    for layers in (4, 64):
        yield f"{layers} layers", "rung:10m", {"fsdp": 8}, (*TINY, *APART, f"model.layers={layers}")


def measured(name: str, of: shape.Layout) -> dict[str, Any]:
    program = lowering.compiled(of)
    text, memory = program.as_text(), program.memory_analysis()
    found = collectives.totals(collectives.read(text, of.mesh.shape))
    return {
        "name": name, "sent": _named(found), "sent_wanted": _named(shape.sent_bytes(of)),
        "arguments": memory.argument_size_in_bytes, "outputs": memory.output_size_in_bytes,
        "temporary": memory.temp_size_in_bytes, "state": sum(shape.state_bytes(of).values()),
        "batch": shape.batch_bytes(of), "memory_wanted": sum(shape.memory(of).values()),
        "operations": Counter(collectives.operations(text)), "copies": sorted(set(copies(text, of))),
        "model": msgspec.to_builtins(of.spec.model), "mesh": of.spec.train.mesh, "optim": of.spec.optim.name,
        "rows": of.rows, "length": of.spec.data.length,
    }


def _named(sent: dict[tuple[tuple[str, ...], str], int]) -> dict[str, int]:
    return {f"{' x '.join(over)} {kind}": count for (over, kind), count in sent.items()}


def copies(text: str, of: shape.Layout) -> Iterator[tuple[str, str]]:
    """(what, where from) of each copy as large as a device's piece of a stacked matrix, or a table, or its piece."""
    layers = [(size, dims) for name, (size, _, dims) in of.leaves.items() if name.startswith(LAYERS)]
    table, dims = (of.spec.model.vocab, of.spec.model.embed), ("vocab", "embed")
    what = {of.elements(dims, size): "stack" for size, dims in layers if len(dims) > 2}
    what |= {math.prod(table): "table", of.elements(dims, table): "piece of a table"}
    for kind, elements, line in collectives.arrays(text):
        if kind == "copy" and elements in what:
            origin = line.split('op_name="', 1)
            where = origin[1].split('"', 1)[0] if len(origin) > 1 else line.split("copy(", 1)[1].split(")")[0]
            yield what[elements], where


def main(devices: int) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    for name, recipe, mesh, overrides in cases(devices):
        of = shape.Layout(lowering.sections(resolve(recipe), [*OVERRIDES, *overrides], **mesh))
        print(json.dumps(measured(name, of)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
