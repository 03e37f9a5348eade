"""A contender of bench/checkpoint.py: packtrain, orbax or torch's distributed checkpoint (DCP). Run by it.

In:  name, folder and GiB of state as arguments; a word on each line of standard input.
Out: a line of JSON about itself, then one for each word: {"seconds": ...} or {"failed": "..."}.
The state is f32 tensors of 64 MiB; orbax and packtrain hold it on a mesh of 2 x 4 devices. A step is a product, of one
thread, that touches none of it: what a save takes from it is processor and memory bandwidth.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

DEVICES = 8
TENSOR = (4, 2048, 2048)
STEPS, SAVES_AT, STEP_SIZE = 60, (5, 25, 45), 1280
LONG_S = 600.0


def random(seed: int) -> np.ndarray[Any, Any]:
    """Numbers that no compressor makes smaller, as weights are."""
    return np.random.default_rng(seed).standard_normal(TENSOR, np.float32)


class Jax:
    """State on a mesh, and steps."""

    def __init__(self, gib: float) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.jax = jax
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
        self.same = NamedSharding(mesh, PartitionSpec(None, "a", "b"))
        self.other = NamedSharding(mesh, PartitionSpec(None, "b", "a"))
        values = {f"t{n:03d}": random(n) for n in range(round(gib * 16))}
        self.first = {name: float(value[0, 0, 0]) for name, value in values.items()}
        self.state = {name: jax.device_put(value, self.same) for name, value in values.items()}
        self.x = jax.device_put(np.full((STEP_SIZE, STEP_SIZE), 1 / STEP_SIZE, np.float32), jax.devices()[0])
        self.product = jax.jit(lambda x: x @ x)
        jax.block_until_ready((self.state, self.product(self.x)))

    def step(self) -> None:
        for _ in range(4):
            self.product(self.x).block_until_ready()

    def check(self, state: dict[str, Any]) -> None:
        """What came back is what was saved."""
        self.jax.block_until_ready(state)
        for name, first in self.first.items():
            assert float(state[name].addressable_shards[0].data[0, 0, 0]) == first, name


class Packtrain(Jax):
    """The shipped saver, a carrier of its own process, the shipped reader."""

    def __init__(self, folder: str, gib: float) -> None:
        super().__init__(gib)
        from packtrain.checkpoint.commits import CommitLog
        from packtrain.checkpoint.saver import Saver
        from packtrain.checkpoint.slots import choose_buffer_folder, memory_folder
        from packtrain.core.contract import CarrierClient
        from packtrain.core.platform import LocalPlatform

        self.version = f"packtrain, jax {self.jax.__version__}"
        self.folder, self.platform, self.number = folder, LocalPlatform(), 0
        self.log = CommitLog(self.platform, f"{folder}/commits")
        self.log.probe()
        begin = self.log.begin(0, ("r0",), "bench")
        argv = ["-m", "packtrain.checkpoint.carrier", "--run", folder, "--socket", f"{folder}/s", "--begin"]
        self.carrier = subprocess.Popen(
            [sys.executable, *argv, str(begin.number)], stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        while not os.path.exists(f"{folder}/s"):
            self.platform.sleep(0.01)
        self.memory = memory_folder(folder, self.platform.node())
        buffers = choose_buffer_folder(self.platform, folder, round(gib * 2**30), "r0", begin)
        self.saver = Saver(self.platform, buffers, CarrierClient(f"{folder}/s"), 1, "r0", LONG_S, begin)
        assert self.saver.remembers, f"no memory tier: {buffers.fallback or buffers.no_slots}"
        for _ in range(3):  # all slots get their pages
            self.begin_save()
            self.end_save()

    def tensors(self) -> list[Any]:
        from packtrain.checkpoint.format import LocalTensor, TensorSpec

        pieces = []
        for name, leaf in self.state.items():
            spec = TensorSpec(name, "float32", TENSOR, ("layer", "rows", "columns"))
            for shard in leaf.addressable_shards:
                box = tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(shard.index, TENSOR))
                pieces.append(LocalTensor(spec, box, np.asarray(shard.data)))
        return pieces

    def begin_save(self) -> float:
        self.number += 1
        begun_s = time.perf_counter()
        ticket = self.saver.save(self.number, self.tensors(), {})
        if ticket is None:
            self.end_save()
            assert self.saver.save(self.number, self.tensors(), {}) is not None, self.saver.skip_reason
        return time.perf_counter() - begun_s

    def fill(self) -> float:
        """A copy into memory; the summing behind it is not in it."""
        self.number += 1
        begun_s = time.perf_counter()
        assert self.saver.remember(self.number, self.tensors(), {}) is not None, self.saver.skip_reason
        return time.perf_counter() - begun_s

    def end_save(self) -> None:
        assert not [result.error for result in self.saver.wait_all(LONG_S) if result.error]

    def restore(self, place: Any) -> dict[str, Any]:
        from packtrain.checkpoint.reader import open_checkpoint
        from packtrain.train.saving import placed_tensors

        commit = self.log.restore_point()
        assert commit is not None
        checkpoint = open_checkpoint(self.platform, self.folder, commit)
        return placed_tensors(checkpoint, dict.fromkeys(self.state, place))

    def close(self) -> None:
        self.saver.close()
        self.carrier.terminate()
        self.carrier.wait()
        shutil.rmtree(self.memory, ignore_errors=True)  # a copy newer than what is on disk stays there


class Orbax(Jax):
    """CheckpointManager's asynchronous checkpointer, as shipped."""

    def __init__(self, folder: str, gib: float) -> None:
        super().__init__(gib)
        import orbax.checkpoint as ocp

        self.ocp, self.folder, self.number = ocp, folder, 0
        self.version = f"orbax-checkpoint {ocp.__version__}, jax {self.jax.__version__}"
        self.saver = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self.begin_save()
        self.end_save()

    def begin_save(self) -> float:
        self.number += 1
        begun_s = time.perf_counter()
        self.saver.save(f"{self.folder}/{self.number:04d}", args=self.ocp.args.StandardSave(self.state))
        return time.perf_counter() - begun_s

    def end_save(self) -> None:
        self.saver.wait_until_finished()

    def restore(self, place: Any) -> dict[str, Any]:
        shape = self.jax.ShapeDtypeStruct(TENSOR, np.float32, sharding=place)
        wanted = self.ocp.args.StandardRestore(dict.fromkeys(self.state, shape))
        return dict(self.saver.restore(f"{self.folder}/{self.number:04d}", args=wanted))

    def close(self) -> None:
        self.saver.close()


class Torch:
    """`torch.distributed.checkpoint.async_save` of one rank over gloo, with as many writer threads as ours."""

    def __init__(self, folder: str, gib: float) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        self.torch, self.dcp, self.folder, self.number = torch, dcp, folder, 0
        self.version = f"torch {torch.__version__}"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.state = {f"t{n:03d}": torch.from_numpy(random(n)) for n in range(round(gib * 16))}
        self.x = torch.full((STEP_SIZE, STEP_SIZE), 1 / STEP_SIZE)
        self.same = self.other = None
        self.begin_save()
        self.end_save()

    def step(self) -> None:
        for _ in range(4):
            self.x @ self.x

    def begin_save(self) -> float:
        if self.number:
            self.waiting.result()
        self.number += 1
        begun_s = time.perf_counter()
        writer = self.dcp.FileSystemWriter(f"{self.folder}/{self.number:04d}", thread_count=2, sync_files=True)
        self.waiting = self.dcp.async_save(self.state, storage_writer=writer)
        return time.perf_counter() - begun_s

    def end_save(self) -> None:
        self.waiting.result()

    def restore(self, place: None) -> dict[str, Any]:
        state = {name: self.torch.zeros(TENSOR) for name in self.state}
        reader = self.dcp.FileSystemReader(f"{self.folder}/{self.number:04d}")
        self.dcp.load(state, storage_reader=reader)
        return state

    def check(self, state: dict[str, Any]) -> None:
        assert all(bool((state[name] == value).all()) for name, value in self.state.items())

    def close(self) -> None:
        pass


def seconds_of(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def steps(one: Any, saves: bool) -> None:
    for number in range(STEPS):
        if saves and number in SAVES_AT:
            one.begin_save()
        one.step()


def figure(one: Any, word: str) -> float:
    if word in ("plain", "saves"):
        taken_s = seconds_of(lambda: steps(one, saves=word == "saves"))
        one.end_save()
        return taken_s
    if word == "save":
        return seconds_of(lambda: (one.begin_save(), one.end_save()))
    if word == "fill":
        taken_s = one.fill()
        one.end_save()
        return float(taken_s)
    if word == "fill, summed":
        return seconds_of(lambda: (one.fill(), one.end_save()))
    state: dict[str, Any] = {}
    place = one.other if word == "other mesh" else one.same
    taken_s = seconds_of(lambda: state.update(one.restore(place)))
    one.check(state)
    return taken_s


def warm_up(one: Any) -> None:
    """A restore onto each mesh, so that what is compiled once is compiled; not timed."""
    for place in (one.same, one.other):
        one.check(one.restore(place))


def drop_older(folder: str) -> None:
    """All saves but the last; not timed."""
    for name in sorted(os.listdir(folder))[:-1]:
        shutil.rmtree(f"{folder}/{name}")


def main(name: str, folder: str, gib: float) -> None:
    kinds: dict[str, Any] = {"packtrain": Packtrain, "orbax": Orbax, "torch": Torch}
    try:
        one = kinds[name](folder, gib)
        warm_up(one)
    except ImportError as error:
        print(json.dumps({"absent": str(error)}), flush=True)
        return
    print(json.dumps({"version": one.version}), flush=True)
    for line in sys.stdin:
        try:
            taken_s = figure(one, line.strip())
            drop_older(f"{folder}/checkpoints" if name == "packtrain" else folder)
            print(json.dumps({"seconds": taken_s}), flush=True)
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:500]}), flush=True)
    one.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
