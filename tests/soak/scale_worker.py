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

from packtrain.recipes.catalog import resolve
from packtrain.train import shape
from tests.train import collectives, lowering

RUNGS = ("10m", "30m", "100m", "300m", "1b", "3b", "7b", "13b", "30b", "64b")
OVERRIDES = ("train.precision=f32",)
TINY = ("data.batch_rows=8", "data.length=64")


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
    for layers in (4, 64):
        yield f"{layers} layers", "rung:10m", {"fsdp": 8}, (*TINY, f"model.layers={layers}")


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
    }


def _named(sent: dict[tuple[tuple[str, ...], str], int]) -> dict[str, int]:
    return {f"{' x '.join(over)} {kind}": count for (over, kind), count in sent.items()}


def copies(text: str, of: shape.Layout) -> Iterator[str]:
    """Where each copy comes from that is as large as a device's piece of a stacked parameter, or a whole table."""
    sizes = {of.elements(dims, size) for name, (size, _, dims) in of.leaves.items() if name.startswith("params/")}
    matrices = {size for size in sizes if size >= max(sizes) // 8}
    whole = math.prod((of.spec.model.vocab, of.spec.model.embed))
    for kind, elements, line in collectives.arrays(text):
        if kind == "copy" and (elements in matrices or elements == whole):
            origin = line.split('op_name="', 1)
            yield origin[1].split('"', 1)[0] if len(origin) > 1 else line.split("copy(", 1)[1].split(")")[0]


def main(devices: int) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    for name, recipe, mesh, overrides in cases(devices):
        of = shape.Layout(lowering.sections(resolve(recipe), [*OVERRIDES, *overrides], **mesh))
        print(json.dumps(measured(name, of)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
