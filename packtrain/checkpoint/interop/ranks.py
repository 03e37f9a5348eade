"""What the ranks of a torch job tell each other while they save: JSON over the job's own process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from packtrain.checkpoint.publish import Gate
from packtrain.core.errors import PacktrainError, SaveFailed, error_named
from packtrain.core.platform import Platform
from packtrain.core.units import NS

CONFIRM_S = 5.0
"""After its deadline, a save that is being published may still say that it is."""

T = TypeVar("T")


def world() -> tuple[int, int]:
    """(rank, ranks)"""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def exchange(work: Callable[[], T], kind: type[T]) -> list[T]:
    """What `work` gave on each rank, on all of them. What it raised on any is raised on all: the first rank's."""
    rank, _ = world()
    error: PacktrainError | None = None
    try:
        line = msgspec.json.encode({"ok": work()})
    except PacktrainError as found:
        error = found
    except Exception as found:  # the others are waiting: a fault of ours, too, must reach them
        what = f"rank {rank}: {type(found).__name__}: {found}"
        error = SaveFailed(what, where="checkpoint", fix="see that machine's memory and disk; else report it")
        error.__cause__ = found
    if error is not None:
        line = msgspec.json.encode({"error": error.as_dict()})
    answers = [msgspec.json.decode(one) for one in _all_of(line)]
    first = next((answer["error"] for answer in answers if "error" in answer), None)
    if first is not None:
        raise error if error is not None and error.as_dict() == first else error_named(**first)
    return [msgspec.convert(answer["ok"], kind) for answer in answers]


def by_deadline(work: Callable[[], T], gate: Gate, end_ns: int, platform: Platform, where: str) -> T:
    """What `work` gives, or raises; SaveFailed at the deadline, by which the gate is shut if it still can be.

    In a thread of its own: a dead file system may hold that for good. However this is left, the gate is shut behind it.
    """
    ended: list[Callable[[], T]] = []
    over = threading.Event()

    def attempt() -> None:
        try:
            result = work()
            ended.append(lambda: result)
        except BaseException as error:
            ended.append(_raising(error))
        over.set()

    threading.Thread(target=attempt, daemon=True).start()
    try:
        over.wait(max(0.0, (end_ns - platform.boot_ns()) / NS))
    finally:
        shut = gate.shut()
    over.wait(CONFIRM_S)
    if ended:
        return ended[0]()
    said = "the disk hangs" if shut else "the commit log hangs; it may be published all the same"
    raise SaveFailed(f"the save is not over at its deadline: {said}", where=where, fix="see whether that disk is well")


def _raising(error: BaseException) -> Callable[[], Any]:
    def throw() -> Any:
        raise error

    return throw


def _all_of(line: bytes) -> list[bytes]:
    """Every rank's bytes, on every rank. Nothing is pickled."""
    import torch
    import torch.distributed as dist

    ranks = world()[1]
    if ranks == 1:
        return [line]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(line)], device=device))
    most = max(int(size) for size in sizes)
    mine = torch.zeros(most, dtype=torch.uint8)
    mine[: len(line)] = torch.frombuffer(bytearray(line), dtype=torch.uint8)
    lines = [torch.zeros(most, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(lines, mine.to(device))
    return [whole[: int(size)].cpu().numpy().tobytes() for whole, size in zip(lines, sizes)]
