"""One rank of a torch job: `torch_worker.py RANK RANKS RENDEZVOUS RUN WORD OUT`. Writes what it found to OUT on rank 0.

WORD: `save` trains two steps of a sharded model and saves; `load` fills another from the run and trains on; `uneven`
saves tensors cut every way, `reload` reads them under other cuts; the others say it themselves.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.interop.torch import Checkpoints
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import LocalPlatform

SHAPES = {"wide": (5, 7), "long": (9,), "even": (8, 4, 2), "one": (1, 3), "scalar": ()}
CUTS = (
    (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate()),
    (Replicate(), Replicate()),
)


def whole(state: Any) -> Any:
    """The same with every tensor gathered."""
    if isinstance(state, dict):
        return {str(key): whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole(value) for value in state]
    return (state.full_tensor() if isinstance(state, DTensor) else state).tolist() if torch.is_tensor(state) else state


def trainer() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3, bias=False))
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: Any, optimizer: Any, steps: int, first: int) -> None:
    for n in range(first, first + steps):
        x = torch.from_numpy(np.random.default_rng(n).standard_normal((4, 6), np.float32))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """As the docstring of the module says."""
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state, "name": "mule", "none": None, "best": float("inf")}


def save(checkpoints: Checkpoints) -> Any:
    model, optimizer = trainer()
    train(model, optimizer, 2, 0)
    state = state_of(model, optimizer)
    commit, saved = checkpoints.save(2, state), whole(state)
    train(model, optimizer, 2, 2)
    return {"commit": commit, "state": saved, "after": whole(model.state_dict())}


def load(checkpoints: Checkpoints) -> Any:
    """Into a fresh model and a fresh optimizer."""
    model, optimizer = trainer()
    optimizer.param_groups[0]["lr"] = 9.0
    state = checkpoints.load(state_of(model, optimizer) | {"name": "", "none": 1, "best": 0.0})
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    found = whole(state)
    train(model, optimizer, 2, 2)
    return {"step": checkpoints.step, "state": found, "after": whole(model.state_dict())}


def forgetful(checkpoints: Checkpoints) -> Any:
    """A fresh optimizer's own state dict is empty."""
    model, optimizer = trainer()
    checkpoints.load({"model": model.state_dict(), "optim": optimizer.state_dict()})


def tensors(salt: int, turn: int) -> dict[str, Any]:
    """Tensors of every dtype we keep, each cut in another way."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    state: dict[str, Any] = {}
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.bool)
    for n, (name, shape) in enumerate(SHAPES.items()):
        for at, dtype in enumerate(dtypes):
            rng = np.random.default_rng((n, at) if salt else (99, 99))
            plain = torch.from_numpy(rng.integers(0, 2 if dtype == torch.bool else 99, shape)).to(torch.float32)
            cut = CUTS[(n + at + turn) % len(CUTS)]
            cut = tuple(p if p.is_replicate() or p.dim < len(shape) else Replicate() for p in cut)
            whole_ = distribute_tensor(plain, mesh, cut)
            state[f"{name}-{at}"] = DTensor.from_local(
                whole_.to_local().to(dtype), mesh, cut, shape=plain.shape, stride=plain.stride(), run_check=False
            )
    return state


def as_floats(state: dict[str, Any]) -> dict[str, Any]:
    """Gathered, as lists; by way of f32, which holds each value exactly and which gloo can send."""
    found = {}
    for name, tensor in state.items():
        local = tensor.to_local().to(torch.float32)
        place = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
        found[name] = DTensor.from_local(local, tensor.device_mesh, tensor.placements, **place).full_tensor().tolist()
    return found


def uneven(checkpoints: Checkpoints) -> Any:
    state = tensors(1, 0)
    checkpoints.save(1, {"t": state})
    return as_floats(state)


def reload(checkpoints: Checkpoints) -> Any:
    return as_floats(checkpoints.load({"t": tensors(0, 2)})["t"])


def stale(checkpoints: Checkpoints) -> Any:
    """Another machine, which sees no lock of ours, begins an attempt."""
    checkpoints.save(7, {"x": torch.ones(3)})
    if dist.get_rank() == 0:
        CommitLog(LocalPlatform(), f"{sys.argv[4]}/commits").begin(None, ("other",), "elsewhere")
    dist.barrier()
    checkpoints.save(8, {"x": torch.ones(3)})


def two(checkpoints: Checkpoints) -> Any:
    """A second user of the run may read it, and not save."""
    checkpoints.save(1, {"x": torch.ones(3)})
    with Checkpoints(sys.argv[4]) as second:
        read = second.load({"x": torch.zeros(3)})["x"].tolist()
        try:
            second.save(2, {"x": torch.ones(3)})
        except PacktrainError as error:
            return [second.step, read, error.name]


class Breaks(dict):  # type: ignore[type-arg]
    """A state that raises what nobody planned for."""

    def items(self) -> Any:
        raise NotImplementedError("a meta tensor")


def bad(checkpoints: Checkpoints) -> Any:
    """What the last rank alone hands over is refused on all; then a save works."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    last = dist.get_rank() == dist.get_world_size() - 1
    one, part = torch.ones(1), DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    states = (
        {"a/b": one}, {"x": {1, 2}}, {"sum": part}, {"x": torch.ones(1, dtype=torch.complex64)},
        {"k": {1: one, "1": one}}, Breaks(), {"x": one, "mine": one}, {"x": torch.ones(2)}, {"x": one, "seed": 1},
    )
    refused = []
    for state in states:
        try:
            checkpoints.save(8, state if last else {"x": one})
        except PacktrainError as error:
            refused.append(error.what)
    return [refused, checkpoints.save(9, {"x": one, "none": torch.ones(0, 4)})]


def groups(checkpoints: Checkpoints) -> Any:
    """Tensor parallelism beside replicas: a mesh of which a tensor knows one axis. And a tensor without elements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def state(fill: float) -> dict[str, Any]:
        plain = torch.arange(12.0).reshape(4, 3) + fill
        return {"w": distribute_tensor(plain, mesh["tp"], [Shard(0)]), "none": torch.full((0, 4), fill)}

    checkpoints.save(1, state(5.0))
    return whole(checkpoints.load(state(0.0)))


WORDS = {
    "save": save, "load": load, "uneven": uneven, "reload": reload, "stale": stale, "bad": bad,
    "forgetful": forgetful, "two": two, "groups": groups,
}


def main(rank: int, ranks: int, rendezvous: str, run: str, word: str, out: str) -> None:
    store = dist.FileStore(rendezvous, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    try:
        with Checkpoints(run) as checkpoints:
            found = WORDS[word](checkpoints)
    except PacktrainError as error:
        found = {"error": error.name, "what": error.what}
    with open(f"{out}.{rank}", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()
    os._exit(0)  # torch's threads now and then abort an interpreter that ends on a busy machine


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7])
