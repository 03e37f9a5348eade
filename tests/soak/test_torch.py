"""PyTorch state dicts: saved on four ranks, loaded on two, by JAX, and back; errors are the same on every rank."""

from __future__ import annotations

import glob
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import Checkpoint, open_checkpoint
from packtrain.checkpoint.slots import memory_folder
from packtrain.core.platform import LocalPlatform

pytest.importorskip("torch", reason="torch is not installed (extra: interop-test)")
pytestmark = pytest.mark.interop
WORKER = Path(__file__).with_name("torch_worker.py")


def job(tmp_path: Path, run: Path, word: str, ranks: int) -> list[Any]:
    """What each rank of a torch job found."""
    out = tmp_path / f"{word}-{ranks}"
    argv = [f"{out}.meet", str(run), word, str(out)]
    world = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), str(ranks), *argv], stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[1] for process in world]
    assert [process.returncode for process in world] == [0] * ranks, "\n".join(said)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


def latest(run: Path) -> Checkpoint:
    commit = CommitLog(LocalPlatform(), f"{run}/commits").restore_point()
    assert commit is not None
    return open_checkpoint(LocalPlatform(), str(run), commit)


def test_saved_on_four_ranks_it_trains_on_alike_on_two(tmp_path: Path) -> None:
    """FSDP2 model and AdamW: tensors and values come back as saved, and two more steps lead to the same weights."""
    run = tmp_path / "run"
    saved = job(tmp_path, run, "save", 4)
    loaded = job(tmp_path, run, "load", 2)
    assert loaded[0]["step"] == 2
    assert loaded[0]["state"] == loaded[1]["state"] == saved[0]["state"]
    assert loaded[0]["state"]["name"] == "mule" and loaded[0]["state"]["best"] == float("inf")
    assert any("lr" in name for name in str(loaded[0]["state"]["optim"]["param_groups"]).split("'"))
    for name, weights in saved[0]["after"].items():
        # The batch is the same on every rank, so gradients differ by the order of a mean over ranks alone.
        np.testing.assert_allclose(loaded[0]["after"][name], weights, rtol=1e-5, atol=1e-6)


def test_what_torch_saved_jax_reads_and_the_other_way_round(tmp_path: Path) -> None:
    """Each tensor of the sharded model is one logical array for JAX; saved by JAX, it fills two ranks of torch."""
    run, back = tmp_path / "run", tmp_path / "back"
    state = job(tmp_path, run, "save", 4)[0]["state"]
    checkpoint = latest(run)
    arrays = {name: jax.numpy.asarray(checkpoint.read(name)) for name in checkpoint.specs}
    assert len(checkpoint.manifest.parts) == 4
    for name, weights in state["model"].items():
        assert np.array_equal(np.asarray(arrays[f"model/{name}"]), np.float32(weights))
    from_jax(back, arrays, checkpoint)
    assert job(tmp_path, back, "load", 2)[0]["state"] == state


def from_jax(run: Path, arrays: dict[str, jax.Array], like: Checkpoint) -> None:
    """A checkpoint of JAX arrays, each written in the pieces its devices hold."""
    from packtrain.checkpoint.format import LocalTensor
    from packtrain.checkpoint.publish import Gate, Save, carry
    from packtrain.train.saving import box_of
    from tests.checkpoint.worlds import make_run, part_of

    platform = LocalPlatform()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    pieces = []
    for name, array in arrays.items():
        shape, devices = array.shape, len(jax.devices())
        spec = jax.sharding.PartitionSpec(*("d" if n % devices == 0 else None for n in shape[:1]))
        placed = jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))
        pieces += [
            LocalTensor(like.specs[name], box_of(shard.index, shape), np.asarray(shard.data))
            for shard in placed.addressable_shards if shard.replica_id == 0
        ]
    log = make_run(platform, str(run))
    log.begin(0, ("r00000",), "node")
    part = part_of(platform, pieces, f"{run}/buffer", "r00000")
    carry(platform, log, str(run), Save(2, 1, (part,), {"meta": like.manifest.meta}, 1 << 62), Gate())


def test_tensors_of_any_dtype_cut_any_way_load_under_any_other_cut(tmp_path: Path) -> None:
    """Uneven and empty pieces, dims cut twice, replicas, scalars: bit for bit, and each element written once."""
    run = tmp_path / "run"
    saved = job(tmp_path, run, "uneven", 4)
    loaded = job(tmp_path, run, "reload", 2)
    assert loaded[0] == loaded[1] == saved[0] and len(saved[0]) == 25
    assert latest(run).verify() == []


def test_ranks_hear_the_same_error_and_can_go_on(tmp_path: Path) -> None:
    """What one rank cannot keep, or has alone, or fails at in a way nobody planned for, is refused on all with the same
    words; the next save works."""
    found = job(tmp_path, tmp_path / "run", "bad", 2)
    assert found[0] == found[1]
    refused, commit = found[0]
    words = (
        "'a/b' cannot be", "a set has no place", "Partial", "complex64", "k/1: two keys", "rank 1: NotImplementedError",
        "mine is absent on rank 0", "x is float32[1] on rank 0 and float32[2] on rank 1", "seed is absent on rank 0",
    )
    for what, word in zip(refused, words, strict=True):
        assert word in what
    assert commit > 0


def test_a_state_without_the_optimizers_part_is_refused(tmp_path: Path) -> None:
    """Moments that were saved are not dropped in silence because a fresh optimizer has none."""
    run = tmp_path / "run"
    job(tmp_path, run, "save", 2)
    found = job(tmp_path, run, "forgetful", 2)
    assert {one["error"] for one in found} == {"checkpoint.torch_unusable"}
    assert "optim/" in found[0]["what"]


def test_a_run_in_use_can_be_read_and_not_saved_into(tmp_path: Path) -> None:
    """Opening a run begins no attempt; a save of a second user is refused, the first one's goes on."""
    assert job(tmp_path, tmp_path / "run", "two", 2) == [[1, [1.0, 1.0, 1.0], "run.held"]] * 2


def test_a_mesh_beside_replicas_and_a_tensor_without_elements(tmp_path: Path) -> None:
    """Of pieces that several ranks hold the lowest writes one; what has no elements is there all the same."""
    found = job(tmp_path, tmp_path / "run", "groups", 4)
    wanted = (np.arange(12.0).reshape(4, 3) + 5).tolist()
    assert [one["w"] for one in found] == [wanted] * 4 and found[0]["none"] == []


def test_no_image_stays_in_memory(tmp_path: Path) -> None:
    """What a job's ranks filled is given back when it has saved."""
    run = tmp_path / "run"
    job(tmp_path, run, "save", 2)
    assert glob.glob(f"{memory_folder(str(run), '*')}/*") == []


def test_a_job_that_was_replaced_cannot_save(tmp_path: Path) -> None:
    """Once another job began on the run, every rank of the first is told to stop."""
    assert [found["error"] for found in job(tmp_path, tmp_path / "run", "stale", 2)] == ["commits.stale"] * 2


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    """Tensors that are not there, or of another shape, are named before anything is filled."""
    run = tmp_path / "run"
    job(tmp_path, run, "uneven", 2)
    found = job(tmp_path, run, "load", 2)
    assert {one["error"] for one in found} == {"checkpoint.torch_unusable"}
    assert all("model/0.weight is absent" in one["what"] for one in found)
