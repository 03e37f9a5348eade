"""One of a world that restores together: `restore_worker.py RUN TENSORS SIDE CASE...`.

For each case one line of JSON: bytes read and passed on, growth of memory while it was restored, whether every bit is
as saved, or how it failed. The tensors follow from their names, so nobody needs to be told what was saved.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import Checkpoint, open_checkpoint, restoring
from packtrain.core.contract import Place
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import LocalPlatform
from packtrain.train import assemble
from packtrain.train.fabric import Devices
from packtrain.train.saving import Taken, placed_tensors

LAYERS = 4
CASES = {
    "replicas": ((2, -1), (None, "b", None)),
    "columns": ((1, -1), (None, None, "b")),
    "both": ((2, -1), (None, "b", "a")),
    "everywhere": ((1, -1), ()),
}
"""Mesh of axes a and b (-1: what is left), and how the dims of the large tensors lie on it."""
FLIP = "flip"
"""No case: what lies on the disk is damaged, once."""


class Counting(LocalPlatform):
    """Counts what is read."""

    bytes_read = 0

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        found = super().read(path, offset, size)
        self.bytes_read += len(found)
        return found


def tensors(count: int, side: int) -> dict[str, np.ndarray]:
    """Large matrices, and small ones of other dtypes that lie everywhere."""
    made = {
        f"w{n}": np.random.default_rng(n).integers(0, 2**32, (LAYERS, side, side), np.uint32) for n in range(count)
    }
    odd = np.random.default_rng(count).standard_normal((3, 7, 5)).astype(ml_dtypes.bfloat16)
    return made | {"odd": odd, "scale": np.arange(13, dtype=np.float32), "step": np.array(7, np.int32)}


def place_of(name: str, case: str) -> NamedSharding:
    sizes, dims = CASES[case]
    grid = np.array(jax.devices(), dtype=object).reshape(sizes)
    mesh = Mesh(grid, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*dims) if name.startswith("w") else PartitionSpec())


def memory(field: str) -> int:
    """Bytes of this process, by a field of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


@contextmanager
def opened(platform: LocalPlatform, run: str, fabric: Devices) -> Iterator[Checkpoint]:
    """What is in memory, if the last attempt began from there."""
    log = CommitLog(platform, f"{run}/commits")
    begin, commit = log.begun(), log.restore_point()
    if begin is not None and begin.memory is not None:
        with restoring(platform, run, begin.number, begin.memory[2], fabric.share) as checkpoint:
            yield checkpoint
        return
    assert commit is not None
    yield open_checkpoint(platform, run, commit)


def restored(
    run: str, names: list[str], case: str, fabric: Devices
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    platform, taken = Counting(), list[Taken]()
    gc.collect()
    forget_peak()
    before = memory("VmRSS")
    with opened(platform, run, fabric) as checkpoint:
        state = placed_tensors(checkpoint, {name: place_of(name, case) for name in names}, taken.append)
        jax.block_until_ready(state)
    held = sum(shard.data.nbytes for leaf in state.values() for shard in leaf.addressable_shards)
    grown = memory("VmHWM") - before
    return state, {
        "read": platform.bytes_read, "held": held, "grown": grown, "sent": taken[0].sent_bytes,
        "images": taken[0].read_bytes_all,
    }


def flip(run: str) -> None:
    """A byte in the middle of the second image."""
    (path,) = pathlib.Path(run).glob("checkpoints/*/part-r00001.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def same(state: dict[str, jax.Array], wanted: dict[str, np.ndarray]) -> bool:
    return all(
        np.asarray(shard.data).tobytes() == wanted[name][shard.index].tobytes()
        for name, leaf in state.items() for shard in leaf.addressable_shards
    )


def main(run: str, count: str, side: str, *cases: str) -> None:
    place = Place.from_env(os.environ)
    jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
    assemble.join_world(place)
    wanted = tensors(int(count), int(side))
    fabric = Devices(range(place.world_size))
    fabric.swap(1, np.zeros(1 << 20, np.uint8), 0)  # connected, and something compiled
    for case in cases:
        if case == FLIP:
            if place.rank == 0:
                flip(run)
            fabric.tell(0)
            continue
        try:
            state, said = restored(run, list(wanted), case, fabric)
            said["same"] = same(state, wanted)
            del state
        except PacktrainError as error:
            said = {"failed": error.name, "what": error.what, "where": error.where}
        print(json.dumps(said), flush=True)
    assemble.leave_world(place)


if __name__ == "__main__":
    main(*sys.argv[1:])
