"""The device mesh: always all six axes, in one order, so that every layout is one shape of the same thing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from packtrain.core.errors import LayoutError
from packtrain.train.axes import TABLE
from packtrain.train.config import MESH_AXES, mesh_text

USED_AXES = frozenset(axis for axes in TABLE.values() for axis in axes)


def make_mesh(mesh: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `devices` (default: all of the world) with the sizes named; axes left out have size 1.

    An empty dict puts every device on `fsdp`. Devices of one process are neighbours (on TPU pods their numbers are not)
    and fall on the innermost axes: replica groups span processes, tensor groups stay inside one where they fit.
    Raises LayoutError when the sizes do not multiply to the number of devices, or name an axis no dim is split over.
    """
    devices = sorted(jax.devices() if devices is None else devices, key=lambda device: device.process_index)
    sizes = dict.fromkeys(MESH_AXES, 1) | (mesh or {"fsdp": len(devices)})
    check_devices(sizes, len(devices))
    grid = np.array(devices, dtype=object).reshape([sizes[axis] for axis in MESH_AXES])
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def abstract_mesh(mesh: Mapping[str, int]) -> AbstractMesh:
    """The mesh of these sizes without its devices: for reckoning, and for tracing what nothing here could run.

    Raises LayoutError for an axis no dim is split over.
    """
    sizes = dict.fromkeys(MESH_AXES, 1) | dict(mesh)
    _check_used(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check_devices(sizes: Mapping[str, int], devices: int) -> None:
    """Raises LayoutError where a mesh of these sizes does not take exactly so many devices."""
    _check_used(sizes)
    wanted = math.prod(sizes.values())
    if wanted != devices:
        raise LayoutError(
            f"the mesh {mesh_text(sizes)} takes {wanted} devices, but there are {devices}",
            where="train.mesh", fix=f"choose sizes whose product is {devices}, or leave train.mesh empty",
        )


def _check_used(sizes: Mapping[str, int]) -> None:
    asked = {axis: size for axis, size in sizes.items() if size > 1}
    if idle := sorted(set(asked) - USED_AXES):
        raise LayoutError(
            f"mesh axis {idle[0]} = {asked[idle[0]]} would do the same work {asked[idle[0]]} times: "
            "no dim is split over it",
            where="train.mesh", fix=f"use {', '.join(axis for axis in MESH_AXES if axis in USED_AXES)}",
        )


def process_sharding(mesh: Mesh) -> NamedSharding:
    """One row per process, on that process's devices. The grid holds the same devices in the same order as `mesh`."""
    devices = list(mesh.devices.flat)
    ranks = [device.process_index for device in devices]
    assert ranks == sorted(ranks), "devices of one process are neighbours in the mesh"
    grid = np.array(devices, dtype=object).reshape(len(set(ranks)), -1)
    return NamedSharding(Mesh(grid, ("process", "local"), axis_types=(AxisType.Auto,) * 2), PartitionSpec("process"))
