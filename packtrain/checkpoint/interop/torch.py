"""PyTorch state dicts in this format: saved by any number of ranks, loaded by any other number, or by JAX.

    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from packtrain.checkpoint.interop.torch import Checkpoints

    with Checkpoints("runs/mine") as checkpoints:           # collective, as are save and load
        model_state, optim_state = get_state_dict(model, optimizer)
        if checkpoints.step >= 0:
            state = checkpoints.load({"model": model_state, "optim": optim_state})
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        ...
        checkpoints.save(step, {"model": model_state, "optim": optim_state})

A DTensor (FSDP2, tensor parallel) is written in the pieces its ranks hold, one copy of each, and read so; a plain
tensor is the same on all ranks, and rank 0 writes it. Numbers, texts and None are kept in the manifest. Names are the
keys joined by `/`. Tested with torch 2.13, gloo on CPU; all ranks must be on one node. Saves are all kept: nothing is
purged, as no retention runs here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.asked import next_restored, wished
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.format import Box, LocalTensor, TensorSpec
from packtrain.checkpoint.interop.ranks import by_deadline, exchange, world
from packtrain.checkpoint.publish import Gate, Part, Save, carry
from packtrain.checkpoint.reader import Checkpoint, open_checkpoint
from packtrain.checkpoint.slots import Buffer, choose_buffer_folder
from packtrain.core.errors import TorchUnusable
from packtrain.core.holder import hold
from packtrain.core.platform import LocalPlatform, Lock, Platform
from packtrain.core.units import NS

DEADLINE_S = 300.0
"""Of a save; below what process groups allow a collective, in which the other ranks wait: NCCL's default is 600 s."""
VALUES = "torch"
"""Key of the manifest's meta under which values that are no tensors lie."""
FLOAT = "float"
"""Key of the one entry in which JSON holds what it has no number for: inf, -inf, nan."""

Leaf = tuple[str, Any]


class Held(NamedTuple):
    """A rank's share of one tensor. `local`: its piece, None where it holds none; `writes`: it may be the one that
    saves this piece; `alike`: every rank has the same."""

    spec: TensorSpec
    box: Box
    local: Any
    writes: bool
    alike: bool


class Plan(msgspec.Struct):
    """What one rank would save, before anything is copied."""

    alike: dict[str, Any] = {}
    """Of what is the same on all ranks: names and kinds of plain tensors, and the values."""
    pieces: list[tuple[str, Box]] = []
    """What it could write of tensors that are cut."""


class Said(msgspec.Struct):
    """What a rank tells the others."""

    node: tuple[str, str] = ("", "")
    """Boot id and name."""
    plan: Plan | None = None
    part: Part | None = None
    begin: Commit | None = None
    latest: Commit | None = None


def leaves(state: Any) -> dict[str, Any]:
    """name -> tensor or value, of all that is no dict, list or tuple. Raises TorchUnusable for a bad name."""
    found: dict[str, Any] = {}
    for name, leaf in _walk(state, ()):
        if name in found:
            raise _unusable(f"{name}: two keys of the state would have this one name", "rename one of them")
        found[name] = leaf
    return found


def _walk(state: Any, path: tuple[str, ...]) -> Iterator[Leaf]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _walk(value, (*path, _key(key, path)))
    elif isinstance(state, (list, tuple)):
        for n, value in enumerate(state):
            yield from _walk(value, (*path, str(n)))
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
        return Held(spec, fmt.whole(shape), tensor.detach(), rank == 0, True)
    return _held_of_mesh(spec, tensor)


def _held_of_mesh(spec: TensorSpec, tensor: Any) -> Held:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place_of

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise _unusable(f"{spec.name}: it is a sum that has not been made (Partial)", "redistribute it before saving")
    if mesh.get_coordinate() is None:
        return Held(spec, fmt.whole(spec.shape), None, False, False)
    sizes, offsets = place_of(tensor.shape, mesh, placements)
    box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
    is_something = fmt.volume(box) > 0 or not math.prod(spec.shape)
    return Held(spec, box, tensor.to_local().detach(), is_something, False)


class Share(NamedTuple):
    """Of one rank: its share of every tensor, and the values, as JSON holds them."""

    tensors: list[Held]
    values: dict[str, Any]

    def plan(self) -> Plan:
        plain = {one.spec.name: f"{one.spec.dtype}{list(one.spec.shape)}" for one in self.tensors if one.alike}
        cut = [(one.spec.name, one.box) for one in self.tensors if one.writes and not one.alike]
        return Plan(plain | self.values, cut)

    def pieces(self, taken: set[tuple[str, Box]]) -> list[LocalTensor]:
        """What this rank writes: not what a lower one does. On CPU without a copy, where torch lies densely."""
        return [
            LocalTensor(one.spec, one.box, _to_numpy(one.local, one.spec.dtype))
            for one in self.tensors if one.writes and (one.spec.name, one.box) not in taken
        ]


def share_of(state: Any, rank: int) -> Share:
    """Raises TorchUnusable naming what cannot be kept."""
    tensors: list[Held] = []
    values: dict[str, Any] = {}
    for name, leaf in leaves(state).items():
        if _is_tensor(leaf):
            tensors.append(held(name, leaf, rank))
        elif leaf is None or isinstance(leaf, (bool, int, str)):
            values[name] = leaf
        elif isinstance(leaf, float):
            values[name] = leaf if math.isfinite(leaf) else {FLOAT: str(leaf)}
        else:
            raise _unusable(f"{name}: a {type(leaf).__name__} has no place in a checkpoint", "leave it out")
    return Share(tensors, values)


def load_state(checkpoint: Checkpoint, state: Any, rank: int) -> Any:
    """Fill a state dict of the same structure: tensors in place, each rank reading its own pieces; the result holds the
    values as saved. Raises TorchUnusable naming the first name that only one side has, or a tensor that differs;
    CheckpointDamaged.
    """
    share, saved = share_of(state, rank), dict(checkpoint.manifest.meta.get(VALUES, {}))
    _check_same(checkpoint, share, saved)
    wanted = [one for one in share.tensors if one.local is not None]
    with checkpoint.ahead((one.spec.name, one.box) for one in wanted):
        for one in wanted:
            _fill(one.local, checkpoint.read(one.spec.name, one.box))
    return _with_values(state, (), {name: _value(value) for name, value in saved.items()})


class Checkpoints:
    """A run folder of packtrain's, used by the ranks of one torch job. Every method is called by all of them, and what
    one raises, all raise.

    `step` is what `load` would give, -1 where nothing was saved. Nothing is written before the first `save`: that holds
    the run (RunHeld where somebody else does) and begins an attempt. Without an initialised process group it is a world
    of one.
    """

    def __init__(self, folder: str, platform: Platform | None = None) -> None:
        self._platform = platform or LocalPlatform()
        self._folder = os.path.abspath(folder)
        self._rank, self._ranks = world()
        self._writer = f"r{self._rank:05d}"
        self._log = CommitLog(self._platform, f"{self._folder}/commits")
        self._lock: Lock | None = None
        self._begin: Commit | None = None
        self._buffer: Buffer | None = None
        said = exchange(self._found, Said)
        if len({one.node for one in said}) > 1:
            nodes = ", ".join(sorted({one.node[1] for one in said}))
            raise _unusable(f"ranks on several nodes ({nodes}) cannot save here yet", "save from one node's ranks")
        self._latest = said[0].latest

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        return self._latest.step if self._latest else -1

    def save(self, step: int, state: Any, deadline_s: float = DEADLINE_S) -> int:
        """Write and publish; the number of its commit. Returns when it is durable, or raises by `deadline_s`.

        Raises SaveFailed (train on, try later), CommitStale (a newer attempt began: stop), TorchUnusable, RunHeld.
        """
        end_ns = self._platform.boot_ns() + round(deadline_s * NS)
        if self._begin is None:
            self._begin = exchange(self._started if self._rank == 0 else Said, Said)[0].begin
        assert self._begin is not None
        share = share_of({}, self._rank)

        def plan() -> Said:
            nonlocal share
            share = share_of(state, self._rank)
            return Said(plan=share.plan())

        plans = [one.plan for one in exchange(plan, Said) if one.plan is not None]
        _check_alike(plans)
        taken = {piece for other in plans[: self._rank] for piece in other.pieces}
        try:
            offered = exchange(lambda: self._offered(share.pieces(taken)), Said)
            parts = tuple(one.part for one in offered if one.part is not None)
            save = Save(step, self._begin.attempt, parts, {"meta": {VALUES: share.values}}, end_ns)
            published = exchange((lambda: self._published(save)) if self._rank == 0 else Said, Said)
        finally:
            if self._buffer is not None:
                self._buffer.renew(self._platform)  # its memory goes back: a job that ends must leave none behind
        self._latest = published[0].latest
        assert self._latest is not None
        return self._latest.number

    def load(self, state: Any) -> Any:
        """Fill `state` (see `load_state`) from the checkpoint of `step`."""
        latest = self._latest
        assert latest is not None, "nothing was saved yet: ask `step` first"
        filled = None

        def fill() -> Said:
            nonlocal filled
            filled = load_state(open_checkpoint(self._platform, self._folder, latest), state, self._rank)
            return Said()

        exchange(fill, Said)
        return filled

    def close(self) -> None:
        """Let go of the run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _found(self) -> Said:
        latest = None
        if self._rank == 0 and self._platform.exists(f"{self._folder}/commits"):
            latest = next_restored(self._platform, self._folder, self._log)
        return Said(node=(self._platform.boot_id(), self._platform.node()), latest=latest)

    def _started(self) -> Said:
        """Begin an attempt, by rank 0, after what `step` says: from here on no earlier one can publish."""
        for name in ("checkpoints", "tombstones"):
            self._platform.mkdir(f"{self._folder}/{name}")
        self._lock = self._lock or hold(self._platform, self._folder, os.path.basename(self._folder))
        self._log.probe()
        asked = wished(self._platform, self._folder, self._log)
        writers = [f"r{rank:05d}" for rank in range(self._ranks)]
        return Said(begin=self._log.begin(asked.number if asked else None, writers, self._platform.node()))

    def _offered(self, pieces: list[LocalTensor]) -> Said:
        """This rank's image, in its buffer."""
        assert self._begin is not None
        layout = fmt.plan_image([(piece.spec, piece.box) for piece in pieces])
        if self._buffer is None:
            found = choose_buffer_folder(self._platform, self._folder, layout.bytes_total, self._writer)
            self._platform.mkdir(found.path, 0o700)
            self._buffer = Buffer(f"{found.path}/{self._writer}.a{self._begin.attempt:04d}.0")
        self._buffer.fill(self._platform, layout, pieces)
        specs = tuple(dict.fromkeys(piece.spec for piece in pieces))
        return Said(part=Part(self._writer, self._buffer.path, layout.bytes_total, specs, layout.boxes))

    def _published(self, save: Save) -> Said:
        gate = Gate()
        return by_deadline(
            lambda: Said(latest=carry(self._platform, self._log, self._folder, save, gate)), gate, save.end_ns,
            self._platform, self._folder,
        )


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


def _value(kept: Any) -> Any:
    return float(kept[FLOAT]) if isinstance(kept, dict) else kept


def _with_values(state: Any, path: tuple[str, ...], values: Mapping[str, Any]) -> Any:
    """The same containers with every value that is no tensor replaced; dicts and lists in place."""
    if isinstance(state, (list, tuple)):
        filled = [_with_values(value, (*path, str(n)), values) for n, value in enumerate(state)]
        if isinstance(state, tuple):
            return tuple(filled)
        state[:] = filled
    elif isinstance(state, Mapping):
        for key in state:
            state[key] = _with_values(state[key], (*path, str(key)), values)  # type: ignore[index]
    elif not _is_tensor(state):
        return values["/".join(path)]
    return state


def _check_same(checkpoint: Checkpoint, share: Share, saved: Mapping[str, Any]) -> None:
    """Neither side has a name that the other lacks; tensors are of the same kind."""
    there = {spec.name: f"{spec.dtype}{list(spec.shape)}" for spec in checkpoint.manifest.tensors}
    here = {one.spec.name: f"{one.spec.dtype}{list(one.spec.shape)}" for one in share.tensors}
    there, here = there | dict.fromkeys(saved, "a value"), here | dict.fromkeys(share.values, "a value")
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise _unusable(
                f"{name} is {there.get(name, 'absent')} in the checkpoint and {here.get(name, 'absent')} in the state "
                "that is to be filled",
                "build the model and optimizer that were saved; get_state_dict makes a fresh optimizer's state",
                checkpoint.folder,
            )


def _check_alike(plans: list[Plan]) -> None:
    """What is written by rank 0 alone, or kept as a value, every rank has alike."""
    first = plans[0].alike
    for rank, plan in enumerate(plans):
        for name in [*first, *plan.alike]:
            if first.get(name, "absent") != plan.alike.get(name, "absent"):
                raise _unusable(
                    f"{name} is {first.get(name, 'absent')} on rank 0 and {plan.alike.get(name, 'absent')} on rank "
                    f"{rank}",
                    "what is no DTensor must be the same on all ranks: leave it out, or give it a name of its rank's",
                )


def _key(key: object, path: tuple[str, ...]) -> str:
    if not isinstance(key, (str, int)) or not str(key) or any(c in str(key) for c in "/@"):
        raise _unusable(f"{'/'.join(path) or 'state'}: {key!r} cannot be part of a tensor's name", "rename this key")
    return str(key)


def _unusable(what: str, fix: str, where: str = "state dict") -> TorchUnusable:
    return TorchUnusable(what, where=where, fix=fix)
