"""The fabric of a restore (`checkpoint/gather.py`): windows of bytes between one device of each process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from packtrain.checkpoint.gather import Alone, Bytes, Fabric

SHARE_BYTES_MIN = 4096
"""Rows of what is shared are a power of two: few programs."""


def between(processes: Sequence[int]) -> Fabric:
    """Of the processes of a world, in the order of their numbers."""
    return Devices(processes) if len(processes) > 1 else Alone()


class Devices:
    """Between `processes`, this one among them; their order is that of the ranks. One small program for each shift."""

    def __init__(self, processes: Sequence[int]) -> None:
        first = _first_devices(jax.devices(), processes)
        self.rank = list(processes).index(jax.process_index())
        self._device, self._size = first[self.rank], len(first)
        grid = np.array(first, dtype=object)
        self._mesh = Mesh(grid, ("rank",), axis_types=(AxisType.Auto,))
        self._programs: dict[int, Callable[..., Any]] = {}

    def swap(self, shift: int, window: Bytes, status: int) -> tuple[Bytes, Sequence[int]]:
        """`window` goes to rank + shift; returned is that of rank - shift, and how each rank stands."""
        if shift not in self._programs:
            self._programs[shift] = self._program(shift)
        came, told = self._programs[shift](self._rows(window), self._rows(np.array(status, np.int32)))
        return np.asarray(came.addressable_data(0))[0], np.asarray(told.addressable_data(0)).tolist()

    def tell(self, status: int) -> Sequence[int]:
        """How each rank stands."""
        return self.swap(0, np.zeros(1, np.uint8), status)[1]

    def share(self, data: bytes) -> Sequence[bytes]:
        """`data` goes to all; returned is that of each rank."""
        sizes = self.tell(len(data))
        row = np.zeros(1 << (max(*sizes, SHARE_BYTES_MIN) - 1).bit_length(), np.uint8)
        row[: len(data)] = np.frombuffer(data, np.uint8)
        replicated = NamedSharding(self._mesh, PartitionSpec())
        rows = np.asarray(jax.jit(lambda rows: rows, out_shardings=replicated)(self._rows(row)).addressable_data(0))
        return [rows[rank, :size].tobytes() for rank, size in enumerate(sizes)]

    def _rows(self, row: np.ndarray[Any, Any]) -> jax.Array:
        """This rank's row of an array that has one for each."""
        place = NamedSharding(self._mesh, PartitionSpec("rank"))
        here = jax.device_put(row[None], self._device)
        return jax.make_array_from_single_device_arrays((self._size, *row.shape), place, [here])

    def _program(self, shift: int) -> Callable[..., Any]:
        pairs = [(rank, (rank + shift) % self._size) for rank in range(self._size)]

        def swapped(window: jax.Array, status: jax.Array) -> tuple[jax.Array, jax.Array]:
            moved = jax.lax.ppermute(window, "rank", pairs) if shift else window
            return moved, jax.lax.all_gather(status, "rank", tiled=True)

        row = PartitionSpec("rank")
        return jax.jit(jax.shard_map(
            swapped, mesh=self._mesh, in_specs=(row, row), out_specs=(row, PartitionSpec()), check_vma=False
        ))


def _first_devices(devices: Iterable[jax.Device], processes: Sequence[int]) -> list[jax.Device]:
    """Of each of these processes the device with the lowest number."""
    found: dict[int, jax.Device] = {}
    for device in sorted(devices, key=lambda device: device.id):
        found.setdefault(device.process_index, device)
    return [found[process] for process in processes]
