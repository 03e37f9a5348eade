"""One rank of a torch job: `torch_worker.py RANK RANKS RENDEZVOUS RUN WORD OUT`. Writes what it found to OUT on rank 0.

WORD: `save` trains two steps of a sharded model and saves; `load` fills another from the run and trains on; `uneven`
saves tensors cut every way, `reload` reads them under other cuts; `stale` saves after another job has begun; `bad`
hands over what cannot be kept, on the last rank only.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from packtrain.checkpoint.interop.torch import Checkpoints
from packtrain.core.errors import PacktrainError

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


def save(checkpoints: Checkpoints) -> Any:
    model, optimizer = trainer()
    train(model, optimizer, 2, 0)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "name": "mule", "none": None}
    commit, saved = checkpoints.save(2, state), whole(state)
    train(model, optimizer, 2, 2)
    return {"commit": commit, "state": saved, "after": whole(model.state_dict())}


def load(checkpoints: Checkpoints) -> Any:
    model, optimizer = trainer()
    train(model, optimizer, 1, 9)  # so that the optimizer has a state, another one
    optimizer.param_groups[0]["lr"] = 9.0
    wanted = {"model": model.state_dict(), "optim": optimizer.state_dict(), "name": "", "none": 1}
    state = checkpoints.load(wanted)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    found = whole(state)
    train(model, optimizer, 2, 2)
    return {"step": checkpoints.step, "state": found, "after": whole(model.state_dict())}


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
    Checkpoints(str(sys.argv[4]))
    checkpoints.save(7, {"x": torch.ones(3)})


def bad(checkpoints: Checkpoints) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    last = dist.get_rank() == dist.get_world_size() - 1
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    refused = []
    for state in ({"a/b": torch.ones(1)}, {"x": {1, 2}}, {"sum": part}, {"x": torch.ones(1, dtype=torch.complex64)}):
        try:
            checkpoints.save(8, state if last else {"x": torch.ones(1)})
        except PacktrainError as error:
            refused.append(error.what)
    return [refused, checkpoints.save(9, {"x": torch.ones(1)})]


WORDS = {"save": save, "load": load, "uneven": uneven, "reload": reload, "stale": stale, "bad": bad}


def main(rank: int, ranks: int, rendezvous: str, run: str, word: str, out: str) -> None:
    store = dist.FileStore(rendezvous, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    try:
        found = WORDS[word](Checkpoints(run))
    except PacktrainError as error:
        found = {"error": error.name, "what": error.what}
    with open(f"{out}.{rank}", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()
    os._exit(0)  # torch's threads now and then abort an interpreter that ends on a busy machine


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7])
