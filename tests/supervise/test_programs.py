"""The environment of a program that knows nothing of Packtrain, as others read it."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

from packtrain.supervise.programs import STALE, STALE_PREFIXES, Seat, inherited, seat_env
from tests.house import tree

SEAT = Seat("small", 3, 5, 8, 1, 4, "10.0.0.7", 29411)
"""The second process of the second of two nodes, in the third attempt."""


def test_every_rank_has_its_own_place() -> None:
    """Over a world, global ranks, (node, local rank) and MPI's ranks name each process once and agree."""
    seen = set()
    for rank in range(6):
        env = seat_env(Seat("a", 1, rank, 6, rank % 2, 2, "h", 1), {})
        assert env["RANK"] == env["OMPI_COMM_WORLD_RANK"] == env["PMI_RANK"] == env["ROLE_RANK"] == str(rank)
        assert int(env["GROUP_RANK"]) * 2 + int(env["LOCAL_RANK"]) == rank
        assert env["NODE_RANK"] == env["GROUP_RANK"] and env["GROUP_WORLD_SIZE"] == "3"
        assert env["WORLD_SIZE"] == env["OMPI_COMM_WORLD_SIZE"] == env["PMI_SIZE"] == env["ROLE_WORLD_SIZE"] == "6"
        assert env["LOCAL_RANK"] == env["OMPI_COMM_WORLD_LOCAL_RANK"]
        assert env["LOCAL_WORLD_SIZE"] == env["OMPI_COMM_WORLD_LOCAL_SIZE"] == "2"
        seen.add((env["GROUP_RANK"], env["LOCAL_RANK"]))
    assert len(seen) == 6


def test_where_the_others_are() -> None:
    """Torch and JAX are told one address, torch to serve the store itself, and how often it was started again."""
    env = seat_env(SEAT, {})
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.7", "29411")
    assert env["JAX_COORDINATOR_ADDRESS"] == "10.0.0.7:29411"
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2" and env["TORCHELASTIC_RUN_ID"] == "small"


def test_jax_finds_its_coordinator_there() -> None:
    """jax.distributed reads the name we set, and none for the number of a process, as docs/SEAM.md says."""
    jax = pytest.importorskip("jax")
    source = (pathlib.Path(jax.__file__).parent / "_src/distributed.py").read_text()
    read = set(re.findall(r"'(JAX_[A-Z_]+)'", source))
    assert "JAX_COORDINATOR_ADDRESS" in read
    assert not read & {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}


def test_threads_are_not_multiplied() -> None:
    """Several processes of a node get one thread each, unless the person chose; a process alone has the machine."""
    assert seat_env(SEAT, {})["OMP_NUM_THREADS"] == "1"
    assert seat_env(SEAT, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in seat_env(Seat("a", 1, 0, 2, 0, 1, "h", 1), {})


def test_ranks_of_whoever_started_us_are_not_inherited() -> None:
    """Of a launcher around us no rank and no connection is left, and everything else is."""
    around = {
        "RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0",
        "PMI_FD": "7", "TORCHELASTIC_RUN_ID": "x", "PACKTRAIN_RUN": "/other", "JAX_COORDINATOR_ADDRESS": "h:1",
    }
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "9", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO", "RANKED": "1"}
    assert inherited({**around, **kept}) == kept


def test_what_is_set_is_never_inherited() -> None:
    """Whatever says who a process is, is set anew or removed: nothing of it can come from around us."""
    choices = {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    for name in set(seat_env(SEAT, {})) - choices:
        assert name in STALE or name.startswith(STALE_PREFIXES), name


def test_every_name_is_in_the_table() -> None:
    """docs/SEAM.md names each variable, and which are removed."""
    page = (tree.ROOT / "docs/SEAM.md").read_text()
    for name in [*seat_env(SEAT, {}), "SLURM_PROCID", "PMIX_"]:
        assert f"`{name}" in page, name


def test_torchrun_sets_no_name_that_we_leave_out() -> None:
    """All that torchrun's documentation promises is set, but what belongs to its own agent."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: interop-test)")
    page = ast.get_docstring(ast.parse((pathlib.Path(torch.__file__).parent / "distributed/run.py").read_text())) or ""
    promised = set(re.findall(r"^\d+\. ``([A-Z_]+)``", page, re.MULTILINE))
    assert {"RANK", "TORCHELASTIC_RUN_ID"} <= promised
    assert promised - set(seat_env(SEAT, {})) <= {"TORCHELASTIC_MAX_RESTARTS", "PYTHON_EXEC"}
