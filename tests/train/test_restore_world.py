"""Restores by real processes, over gloo: each byte is read once by all of them together, and all fail together."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from packtrain.checkpoint import slots
from packtrain.checkpoint.format import LocalTensor, TensorSpec
from packtrain.checkpoint.publish import Gate, Save, carry
from packtrain.checkpoint.saver import Saver
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import RestoreDone
from packtrain.train.assemble import restore_line
from tests.checkpoint.test_slots import Client
from tests.checkpoint.worlds import make_run, part_of
from tests.train.lowering import QUICK_FLAGS
from tests.train.restore_worker import CASES, FLIP, tensors
from tests.train.test_words import free_port

WORKER = pathlib.Path(__file__).with_name("restore_worker.py")
DEADLINE_S = 300
MIB = 1 << 20


def save(run: pathlib.Path, count: int, side: int, writers: int) -> int:
    """Publish the worker's tensors, the large ones cut by rows over the writers; bytes of all images."""
    platform, parts = LocalPlatform(), []
    log = make_run(platform, str(run))
    log.begin(0, tuple(f"r{n:05d}" for n in range(writers)), "node")
    for n in range(writers):
        pieces = [piece for name, array in tensors(count, side).items() for piece in rows(name, array, n, writers)]
        parts.append(part_of(platform, pieces, f"{run}/buffer{n}", f"r{n:05d}"))
    carry(platform, log, str(run), Save(1, 1, tuple(parts), {}, 1 << 62), Gate())
    return sum(part.bytes for part in parts)


def rows(name: str, array: np.ndarray, writer: int, writers: int) -> list[LocalTensor]:
    spec = TensorSpec(name, str(array.dtype), array.shape, ("d",) * array.ndim)
    if name.startswith("w"):
        step = array.shape[1] // writers
        box = ((0, array.shape[0]), (writer * step, (writer + 1) * step), (0, array.shape[2]))
        return [LocalTensor(spec, box, array[:, box[1][0] : box[1][1]])]
    return [LocalTensor(spec, tuple((0, n) for n in array.shape), array)] if writer == 0 else []


def world(run: pathlib.Path, ranks: int, devices: int, *arguments: str) -> list[list[dict[str, Any]]]:
    """What each rank said of each case."""
    common = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_FLAGS, "PYTHONPATH": str(pathlib.Path.cwd()), "DEVICES": str(devices),
    }
    command = [sys.executable, str(WORKER), str(run), *arguments]
    processes = []
    for rank in range(ranks):
        with open(run / f"{rank}.log", "w") as log:
            own = {"RANK": str(rank), "PACKTRAIN_NODE": f"n{rank}"}
            processes.append(subprocess.Popen(
                command, env=os.environ | common | own, stdout=subprocess.PIPE, stderr=log, text=True
            ))
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(run / f"{rank}.log").read_text()[-2000:] for rank in range(ranks)]
    assert [process.returncode for process in processes] == [0] * ranks, logs
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]


def check(images: int, said: list[list[dict[str, Any]]], cases: Sequence[str]) -> None:
    """Bits, and bytes: 1.05 times the checkpoint read by all ranks together (tables are read by each)."""
    for number, case in enumerate(cases):
        told = [lines[number] for lines in said]
        assert all(line["same"] for line in told), case
        assert images * 0.99 < sum(line["read"] for line in told) <= 1.05 * images, case


@pytest.mark.timeout(DEADLINE_S + 60)
def test_each_byte_is_read_once_by_all_and_all_fail_together(tmp_path: pathlib.Path) -> None:
    """Two processes of two devices, saved by rows: with replicas, by columns, both ways cut and whole everywhere it is
    bit for bit and read once. A flipped byte: one rank names tensor and file, the other that rank."""
    images = save(tmp_path, 2, 512, writers=2)
    said = world(tmp_path, 2, 2, "2", "512", *CASES, FLIP, "columns")
    check(images, said, list(CASES))
    failed = [lines[len(CASES)] for lines in said]
    assert [line["failed"] for line in failed] == ["checkpoint.damaged"] * 2
    named = [line for line in failed if line["what"].startswith("tensor w")]
    assert len(named) == 1 and named[0]["where"].endswith("part-r00001.safetensors")
    (other,) = [line for line in failed if line not in named]
    assert other["what"].startswith(f"rank {failed.index(named[0])} found damage")


class Node(LocalPlatform):
    """One of several on this machine."""

    def __init__(self, name: str) -> None:
        self.name = name

    def node(self) -> str:
        return self.name


def remember(run: pathlib.Path, count: int, side: int, nodes: int) -> int:
    """The worker's tensors in the memory of so many nodes, a writer each, and an attempt that begins from there; bytes
    of all images."""
    log, writers = make_run(LocalPlatform(), str(run)), tuple(f"r{n:05d}" for n in range(nodes))
    begun, helds, size = log.begin(0, writers, "n0"), list[slots.Held](), 0
    for n, writer in enumerate(writers):
        where = slots.BufferFolder(slots.memory_folder(str(run), f"n{n}"), slots=True)
        saver = Saver(Node(f"n{n}"), where, Client(), 1, writer, 60.0, begun)
        pieces = [piece for name, array in tensors(count, side).items() for piece in rows(name, array, n, nodes)]
        assert saver.remember(1, pieces, {}) is not None
        saver.wait_all(0.0)
        helds += slots.held(Node(f"n{n}"), str(run))
        size += sum(one.slot.bytes for one in slots.held_in(Node(f"n{n}"), where.path))
    log.begin(None, writers, "n0", memory=slots.choose(helds, begun).memory)
    return size


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_restore_from_the_memory_of_two_nodes(tmp_path: pathlib.Path, memory_disk: None) -> None:
    """Two processes, each a node with the slot of one writer: whatever each wants is bit for bit what was remembered,
    each byte read once and by the node that has it."""
    try:
        images = remember(tmp_path, 1, 256, nodes=2)
        said = world(tmp_path, 2, 2, "1", "256", "both")
        check(images, said, ["both"])
    finally:
        for n in range(2):
            shutil.rmtree(slots.memory_folder(str(tmp_path), f"n{n}"), ignore_errors=True)


@pytest.mark.soak
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("case", list(CASES))
def test_four_processes_read_once_and_stay_small(tmp_path: pathlib.Path, case: str) -> None:
    """400 MB saved by two writers, restored by four processes: 1.05 times the checkpoint read by all, and the memory of
    each grows by at most 1.1 times what its device holds and 256 MiB."""
    images = save(tmp_path, 25, 1024, writers=2)
    said = world(tmp_path, 4, 1, "25", "1024", case)
    check(images, said, [case])
    for (line,) in said:
        assert line["grown"] <= 1.1 * line["held"] + 256 * MIB, line


def test_a_restore_is_told_in_one_line() -> None:
    """From where and why, what was read here and by all, what was passed on, and how long it took."""
    done = RestoreDone(
        step=7, commit=9, rank=0, ranks=4, source="/r/checkpoints/x", reason="the nearest", read_bytes=5 << 19,
        read_bytes_all=10 << 20, sent_bytes=5 << 18, seconds=1.25,
    )
    assert restore_line(done) == (
        "restored step 7 from /r/checkpoints/x (the nearest): 2.5 MiB read here of 10.0 MiB by all 4 ranks, 1.2 MiB "
        "passed on, every block checked, 1.2 s"
    )
