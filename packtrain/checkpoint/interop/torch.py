"""PyTorch state dicts in this format: saved by any number of ranks, loaded by any other number, or by JAX.

    from packtrain.checkpoint.interop.torch import Checkpoints

    checkpoints = Checkpoints("runs/mine")                  # collective, as are save and load
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    if checkpoints.step >= 0:
        state = checkpoints.load(state)
    checkpoints.save(step, state)

A DTensor (FSDP2, tensor parallel) is written in the pieces its ranks hold, one copy of each, and read so; a plain
tensor is the same on all ranks, and rank 0 writes it. Numbers, texts and None are kept in the manifest. Names are the
keys joined by `/`. Tested with torch 2.13, gloo on CPU; all ranks must be on one node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.format import Box, LocalTensor, TensorSpec
from packtrain.checkpoint.publish import Gate, Part, Save, carry
from packtrain.checkpoint.reader import Checkpoint, open_checkpoint
from packtrain.checkpoint.saver import Buffer, choose_buffer_folder
from packtrain.core.errors import PacktrainError, SaveFailed, TorchUnusable, error_named
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.units import NS

DEADLINE_S = 600.0
VALUES = "torch"
"""Key of the manifest's meta under which values that are no tensors lie."""

Leaf = tuple[str, Any]


class Held(NamedTuple):
    """A rank's share of one tensor. `local`: its piece, None where it holds none; `writes`: the copy that is saved."""

    spec: TensorSpec
    box: Box
    local: Any
    writes: bool


def leaves(state: Any, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """(name, tensor or value) of all that is no dict, list or tuple. Raises TorchUnusable for a name we cannot keep."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, (*path, _key(key, path)))
    elif isinstance(state, (list, tuple)):
        for n, value in enumerate(state):
            yield from leaves(value, (*path, str(n)))
    else:
        yield "/".join(path), state


def held(name: str, tensor: Any, rank: int) -> Held:
    """What this rank holds of a tensor, on its mesh if it has one. Raises TorchUnusable."""
    from torch.distributed.tensor import DTensor

    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if dtype not in fmt.DTYPES:
        raise _unusable(f"{name}: {tensor.dtype} has no place in a checkpoint", "convert it before saving")
    spec = TensorSpec(name, dtype, shape, tuple(f"d{n}" for n in range(len(shape))))
    if not isinstance(tensor, DTensor):
        return Held(spec, fmt.whole(shape), tensor.detach(), rank == 0)
    return _held_of_mesh(spec, tensor)


def _held_of_mesh(spec: TensorSpec, tensor: Any) -> Held:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place_of

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise _unusable(f"{spec.name}: it is a sum that has not been made (Partial)", "redistribute it before saving")
    at = mesh.get_coordinate()
    if at is None:
        return Held(spec, fmt.whole(spec.shape), None, False)
    sizes, offsets = place_of(tensor.shape, mesh, placements)
    box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
    first = all(index == 0 for index, placement in zip(at, placements, strict=True) if placement.is_replicate())
    return Held(spec, box, tensor.to_local().detach(), first)


def pieces_of(state: Any, rank: int) -> tuple[list[LocalTensor], dict[str, Any]]:
    """(tensors this rank is to write, values that are no tensors). On CPU without a copy, where torch lies densely."""
    pieces, values = [], {}
    for name, leaf in leaves(state):
        if _is_tensor(leaf):
            share = held(name, leaf, rank)
            if share.writes and share.local is not None and fmt.volume(share.box) + (not share.spec.shape):
                pieces.append(LocalTensor(share.spec, share.box, _to_numpy(share.local, share.spec.dtype)))
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            values[name] = leaf
        else:
            raise _unusable(f"{name}: a {type(leaf).__name__} has no place in a checkpoint", "leave it out")
    return pieces, values


def load_state(checkpoint: Checkpoint, state: Any, rank: int) -> Any:
    """Fill a state dict of the same structure: tensors in place, each rank reading its own pieces; the result holds the
    values as saved. Raises TorchUnusable naming the first tensor that differs, CheckpointDamaged.
    """
    shares = [held(name, leaf, rank) for name, leaf in leaves(state) if _is_tensor(leaf)]
    for share in shares:
        _check_same(checkpoint, share.spec)
    wanted = [share for share in shares if share.local is not None]
    with checkpoint.ahead((share.spec.name, share.box) for share in wanted):
        for share in wanted:
            _fill(share.local, checkpoint.read(share.spec.name, share.box))
    values = checkpoint.manifest.meta.get(VALUES, {})
    return _with_values(state, (), lambda name, value: values.get(name, value))


class Checkpoints:
    """A run folder of packtrain's, used by the ranks of one torch job. Every method is called by all of them.

    `step` is what the last saved checkpoint holds, -1 for a new run. Without an initialised process group it is a world
    of one.
    """

    def __init__(self, folder: str, platform: Platform | None = None) -> None:
        self._platform = platform or LocalPlatform()
        self._folder = os.path.abspath(folder)
        self._rank, self._ranks = _world()
        self._writer = f"r{self._rank:05d}"
        self._buffer: Buffer | None = None
        said = _exchange(lambda: Said(node=(self._platform.boot_id(), self._platform.node())))
        if len({one.node for one in said}) > 1:
            nodes = ", ".join(sorted({one.node[1] for one in said}))
            raise _unusable(f"ranks on several nodes ({nodes}) cannot save here yet", "save from one node's ranks")
        self._log = CommitLog(self._platform, f"{self._folder}/commits")
        first = _exchange(self._started if self._rank == 0 else Said)[0]
        assert first.begin is not None
        self._begin, self._latest = first.begin, first.latest

    @property
    def step(self) -> int:
        return self._latest.step if self._latest else -1

    def save(self, step: int, state: Any, deadline_s: float = DEADLINE_S) -> int:
        """Write and publish; the number of its commit. Returns when it is durable.

        Raises SaveFailed (train on, try later) or CommitStale (a newer attempt began: stop), the same on all ranks.
        """
        end_ns = self._platform.boot_ns() + round(deadline_s * NS)
        values: dict[str, Any] = {}

        def offer() -> Said:
            pieces, found = pieces_of(state, self._rank)
            values.update(found)
            return self._offered(pieces)

        parts = tuple(one.part for one in _exchange(offer) if one.part is not None)
        save = Save(step, self._begin.attempt, parts, {"meta": {VALUES: values}}, end_ns)

        def publish() -> Said:
            return Said(latest=carry(self._platform, self._log, self._folder, save, Gate()))

        self._latest = _exchange(publish if self._rank == 0 else Said)[0].latest
        assert self._latest is not None
        return self._latest.number

    def load(self, state: Any) -> Any:
        """Fill `state` (see `load_state`) from the last checkpoint of this run's lineage."""
        assert self._latest is not None, "nothing was saved yet: ask `step` first"
        return load_state(open_checkpoint(self._platform, self._folder, self._latest), state, self._rank)

    def _started(self) -> Said:
        """Begin an attempt, by rank 0: from here on no earlier one can publish."""
        for name in ("checkpoints", "tombstones"):
            self._platform.mkdir(f"{self._folder}/{name}")
        self._log.probe()
        latest = self._log.restore_point()
        writers = [f"r{rank:05d}" for rank in range(self._ranks)]
        return Said(begin=self._log.begin(None, writers, self._platform.node()), latest=latest)

    def _offered(self, pieces: list[LocalTensor]) -> Said:
        """This rank's image, in its buffer."""
        layout = fmt.plan_image([(piece.spec, piece.box) for piece in pieces])
        if self._buffer is None:
            found = choose_buffer_folder(self._platform, self._folder, layout.bytes_total, self._writer)
            self._platform.mkdir(found.path, 0o700)
            self._buffer = Buffer(f"{found.path}/{self._writer}.a{self._begin.attempt:04d}.0")
        self._buffer.fill(layout, pieces)
        specs = tuple(dict.fromkeys(piece.spec for piece in pieces))
        return Said(part=Part(self._writer, self._buffer.path, layout.bytes_total, specs, layout.boxes))

    def close(self) -> None:
        """Give the buffer's memory back."""
        if self._buffer is not None:
            self._buffer.renew(self._platform)
            self._buffer = None


# --- between ranks -----------------------------------------------------------------------------------


class Said(msgspec.Struct):
    """What a rank tells the others: JSON over the job's own process group, so nothing is unpickled."""

    node: tuple[str, str] = ("", "")
    """Boot id and name."""
    part: Part | None = None
    begin: Commit | None = None
    latest: Commit | None = None
    error: dict[str, str] | None = None


def _world() -> tuple[int, int]:
    """(rank, ranks)"""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _exchange(work: Callable[[], Said]) -> list[Said]:
    """What `work` gave on each rank, on all of them. An error of any rank is raised on all: the first one's."""
    try:
        mine = work()
    except PacktrainError as error:
        mine = Said(error=error.as_dict())
    except OSError as error:
        failed = SaveFailed(f"the machine refuses: {error}", where="checkpoint", fix="free memory or disk space there")
        mine = Said(error=failed.as_dict())
    said = [msgspec.json.decode(line, type=Said) for line in _all_of(msgspec.json.encode(mine))]
    for one in said:
        if one.error is not None:
            raise error_named(**one.error)
    return said


def _all_of(line: bytes) -> list[bytes]:
    """Every rank's bytes, on every rank."""
    import torch
    import torch.distributed as dist

    ranks = _world()[1]
    if ranks == 1:
        return [line]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(line)], device=device))
    most = max(int(size) for size in sizes)
    lines = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(lines, torch.tensor([*line, *bytes(most - len(line))], dtype=torch.uint8, device=device))
    return [bytes(whole[: int(size)].tolist()) for whole, size in zip(lines, sizes)]


# --- leaves ------------------------------------------------------------------------------------------


def _is_tensor(leaf: Any) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor)


def _to_numpy(tensor: Any, dtype: str) -> np.ndarray[Any, Any]:
    import torch

    bytes_ = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes_.numpy().view(fmt.DTYPES[dtype][1]).reshape(tuple(tensor.shape))


def _fill(tensor: Any, array: np.ndarray[Any, Any]) -> None:
    import torch

    if array.size:
        loaded = torch.from_numpy(array.reshape(-1).view(np.uint8)).view(tensor.dtype)
        tensor.copy_(loaded.reshape(tuple(tensor.shape)))


def _with_values(state: Any, path: tuple[str, ...], value_of: Callable[[str, Any], Any]) -> Any:
    """The same containers with every value that is no tensor replaced; dicts and lists in place."""
    if isinstance(state, (list, tuple)):
        filled = [_with_values(value, (*path, str(n)), value_of) for n, value in enumerate(state)]
        if isinstance(state, tuple):
            return tuple(filled)
        state[:] = filled
    elif isinstance(state, Mapping):
        for key in state:
            state[key] = _with_values(state[key], (*path, str(key)), value_of)  # type: ignore[index]
    elif not _is_tensor(state):
        return value_of("/".join(path), state)
    return state


def _check_same(checkpoint: Checkpoint, wanted: TensorSpec) -> None:
    found = checkpoint.specs.get(wanted.name)
    there = "absent" if found is None else f"{found.dtype}{list(found.shape)}"
    here = f"{wanted.dtype}{list(wanted.shape)}"
    if there != here:
        raise _unusable(
            f"tensor {wanted.name} is {there} in the checkpoint and {here} in the state that is to be filled",
            "build the model and optimizer that were saved; an optimizer has its state after its first step",
            checkpoint.folder,
        )


def _key(key: object, path: tuple[str, ...]) -> str:
    if not isinstance(key, (str, int)) or not str(key) or any(c in str(key) for c in "/@"):
        raise _unusable(f"{'/'.join(path) or 'state'}: {key!r} cannot be part of a tensor's name", "rename this key")
    return str(key)


def _unusable(what: str, fix: str, where: str = "state dict") -> TorchUnusable:
    return TorchUnusable(what, where=where, fix=fix)

