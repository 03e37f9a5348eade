"""Which worlds a run can go on with when nodes are lost: number of nodes -> mesh, written into its spec at launch.

`python -m packtrain.train.worlds SPEC --nodes N [--procs P]` prints it as JSON, because whoever launches has no JAX:
`{"worlds": {"4": {"fsdp": 4}, ...}, "left_out": {"3": "why"}}`, or `{"error": {...}}` and an exit code.

Within a node and within what users cut nothing changes: `tensor` and `context` stay as asked, and fewer devices mean
fewer replicas first, then wider pieces. The global batch is the same in all of them (rows that do not divide are
filled up with empty ones).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import msgspec

from packtrain.core.errors import EXIT_DONE, LayoutError, PacktrainError
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import bytes_text
from packtrain.train import shape
from packtrain.train.config import TrainConfig, mesh_text
from packtrain.train.mesh import check_devices
from packtrain.train.sections import Sections, read

MEMORY_SHARE = 0.95
"""Of a device's memory that a step may need by the formula of `shape`, which is right within 10%."""


def worlds(
    spec: Sections, nodes: int, devices: int, memory_bytes: int = 0
) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """(number of nodes -> mesh, number of nodes -> why there is none), the largest first. `devices`: of a node;
    `memory_bytes`: of a device, 0: not known. Raises LayoutError where the whole world cannot be."""
    check_devices(spec.train.mesh or {"fsdp": nodes * devices}, nodes * devices)
    table, left_out = {str(nodes): _mesh(spec, nodes * devices, memory_bytes)}, {}
    for fewer in range(nodes - 1, 0, -1):
        try:
            table[str(fewer)] = _mesh(spec, fewer * devices, memory_bytes)
        except LayoutError as error:
            left_out[str(fewer)] = error.what
    return table, left_out


def mesh_for(train: TrainConfig, nodes: int) -> dict[str, int]:
    """The mesh of a world of so many nodes. Raises LayoutError where the table has none."""
    if not train.worlds:
        return train.mesh
    if str(nodes) not in train.worlds:
        raise LayoutError(
            f"this run has no mesh for {nodes} nodes; it has for {', '.join(train.worlds)}", where="train.worlds",
            fix="start it with --nodes, which makes that table anew",
        )
    return train.worlds[str(nodes)]


def _mesh(spec: Sections, devices: int, memory_bytes: int) -> dict[str, int]:
    """Raises LayoutError: the reason of the candidate that is nearest to what was asked for."""
    refused: LayoutError | None = None
    for mesh in _candidates(spec.train.mesh or {"fsdp": devices}, devices):
        try:
            _check(spec, mesh, memory_bytes)
        except LayoutError as error:
            refused = refused or error
        else:
            return {axis: size for axis, size in mesh.items() if size > 1} or {"fsdp": 1}
    raise refused or LayoutError(
        f"{mesh_text(spec.train.mesh)} has no smaller copy on {devices} devices", where="train.mesh",
        fix="choose tensor and context axes that divide the devices of a node",
    )


def _candidates(asked: dict[str, int], devices: int) -> Iterator[dict[str, int]]:
    """Meshes of so many devices, the widest `fsdp` first."""
    inner = {axis: size for axis, size in asked.items() if axis not in ("replica", "fsdp")}
    rest, odd = divmod(devices, math.prod(inner.values()))
    for fsdp in range(min(rest, asked.get("fsdp", 1)), 0, -1):
        if not odd and rest % fsdp == 0:
            yield {"replica": rest // fsdp, "fsdp": fsdp, **inner}


def _check(spec: Sections, mesh: dict[str, int], memory_bytes: int) -> None:
    of = shape.Layout(replace(spec, train=msgspec.structs.replace(spec.train, mesh=mesh)))
    needed = sum(shape.memory(of).values())
    if memory_bytes and needed > MEMORY_SHARE * memory_bytes:
        raise LayoutError(
            f"{mesh_text(mesh)} needs about {bytes_text(needed)} on each device, which has {bytes_text(memory_bytes)}",
            where="train.mesh", fix="give more devices, or cut more by tensor or with train.remat=full",
        )


def here(spec: Sections, nodes: int, procs: int) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """`worlds` of nodes like this machine, each with so many processes."""
    local = jax.local_devices()
    of_process = len(local) if procs == 1 or local[0].platform == "cpu" else 1
    return worlds(spec, nodes, of_process * procs, (local[0].memory_stats() or {}).get("bytes_limit", 0))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m packtrain.train.worlds")
    parser.add_argument("spec")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--procs", type=int, default=1)
    asked = parser.parse_args(argv)
    try:
        table, left_out = here(read(LocalPlatform(), asked.spec), asked.nodes, asked.procs)
    except PacktrainError as error:
        print(json.dumps({"error": error.as_dict()}))
        return error.exit_code
    print(json.dumps({"worlds": table, "left_out": left_out}))
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
