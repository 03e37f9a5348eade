"""The fabric of a restore (`checkpoint/gather.py`): windows of bytes between one device of each process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from packtrain.checkpoint.gather import Bytes


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
