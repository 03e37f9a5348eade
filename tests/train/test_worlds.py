"""The table of worlds: what a run can go on with when nodes are lost."""

from __future__ import annotations

import json

import pytest

from packtrain.core.errors import Contradiction, LayoutError
from packtrain.train import shape, worlds
from packtrain.train.config import TrainConfig
from tests.train import rig

MIB = 1 << 20


def of(nodes: int, devices: int = 1, memory_bytes: int = 0, **mesh: int) -> tuple[dict[str, dict[str, int]], set[str]]:
    table, left_out = worlds.worlds(rig.with_train(rig.SPEC, mesh=mesh), nodes, devices, memory_bytes)
    return table, set(left_out)


def test_fewer_nodes_are_narrower_pieces_or_fewer_copies() -> None:
    """Without a mesh all is on fsdp as far as the model (embed 16) can be cut, the rest are copies; each world takes
    all of its devices, the largest is first."""
    table, left_out = of(8)
    assert table == {
        "8": {"fsdp": 8}, "7": {"replica": 7}, "6": {"replica": 3, "fsdp": 2}, "5": {"replica": 5}, "4": {"fsdp": 4},
        "3": {"replica": 3}, "2": {"fsdp": 2}, "1": {"fsdp": 1},
    }
    assert list(table) == ["8", "7", "6", "5", "4", "3", "2", "1"] and left_out == set()


def test_copies_go_first() -> None:
    """What a user asked to be cut stays cut as wide: with fewer devices there are fewer copies of it."""
    assert of(4, 2, replica=4, fsdp=2)[0] == {
        "4": {"replica": 4, "fsdp": 2}, "3": {"replica": 3, "fsdp": 2}, "2": {"replica": 2, "fsdp": 2},
        "1": {"fsdp": 2},
    }


def test_what_lies_inside_stays() -> None:
    """Tensor and context are kept; a number of devices they do not divide has no world, and it is said why."""
    table, left_out = of(4, tensor=2, fsdp=2)
    assert table == {"4": {"fsdp": 2, "tensor": 2}, "2": {"tensor": 2}} and left_out == {"3", "1"}


def test_a_world_that_memory_cannot_hold_is_left_out() -> None:
    """By the formula of `packtrain shape`, for a device whose memory is known."""
    spec = rig.with_train(rig.SPEC, mesh={"fsdp": 2})
    needed = sum(shape.memory(shape.Layout(spec)).values())
    table, left_out = worlds.worlds(spec, 2, 1, round(needed / worlds.MEMORY_SHARE) + 1)
    assert list(table) == ["2"] and "on each device" in left_out["1"]


def test_the_whole_world_must_be() -> None:
    """A mesh that does not take the devices there are is the mistake it always was."""
    with pytest.raises(LayoutError, match="takes 8 devices"):
        of(4, fsdp=8)


def test_a_worker_takes_the_mesh_of_its_world() -> None:
    """From the table, where there is one; a world that is not in it is refused by name."""
    train = TrainConfig(mesh={"fsdp": 4}, worlds={"4": {"fsdp": 4}, "2": {"replica": 2}})
    assert worlds.mesh_for(train, 2) == {"replica": 2}
    assert worlds.mesh_for(TrainConfig(mesh={"fsdp": 4}), 3) == {"fsdp": 4}
    with pytest.raises(LayoutError, match="3 nodes"):
        worlds.mesh_for(train, 3)


def test_a_table_is_checked_as_a_mesh_is() -> None:
    """Names of axes, and numbers of nodes."""
    with pytest.raises(Contradiction, match="fsqp"):
        TrainConfig(worlds={"2": {"fsqp": 2}})
    with pytest.raises(Contradiction, match="'two'"):
        TrainConfig(worlds={"two": {"fsdp": 2}})


def test_it_is_printed_for_whoever_has_no_jax(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON on stdout, with the error in it where there is one."""
    path = f"{tmp_path}/spec.toml"
    with open(path, "w") as file:
        file.write("[train.mesh]\nfsdp = 16\n[supervise]\n")
    assert worlds.main([path, "--nodes", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["worlds"] == {"2": {"fsdp": 16}, "1": {"fsdp": 8}}
    assert worlds.main([path, "--nodes", "3"]) == 78
    assert json.loads(capsys.readouterr().out)["error"]["name"] == "layout.indivisible"
