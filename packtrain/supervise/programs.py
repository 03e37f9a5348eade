"""The environment of a program that knows nothing of Packtrain: which rank it is and where the others are, under the
names that torch, JAX and MPI-style programs read. Pure; docs/SEAM.md says which name is there for whom.

What torchrun sets is set as torchrun sets it (torch/distributed/run.py, "Environment Variables"), with the store of
rank 0 itself: there is no agent of torch to serve one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

STALE_PREFIXES = (
    "JAX_COORDINATOR_", "MPI_LOCAL", "MV2_COMM_WORLD_", "OMPI_", "PACKTRAIN_", "PMI_", "PMIX_", "SLURM_STEP_",
    "TORCHELASTIC_",
)
STALE = (
    "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
    "RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NPROCS",
    "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_PROCID", "SLURM_TASK_PID", "SLURM_TASKS_PER_NODE", "WORLD_SIZE",
)
"""Ranks that whatever started us had: every process of ours would take itself for that one."""


class Seat(NamedTuple):
    """Where a process sits in the world of its attempt."""

    run: str
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def node_rank(self) -> int:
        """All nodes have the same number of processes, and the ranks of a node are neighbours."""
        return self.rank // self.local_world_size

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """What a program gets of the environment of whoever launched it: all but ranks that are not its own."""
    return {
        name: value for name, value in env.items() if name not in STALE and not name.startswith(STALE_PREFIXES)
    }


def seat_env(seat: Seat, env: Mapping[str, str]) -> dict[str, str]:
    """Names and values beyond `contract.worker_env`. `env`: what the person set, which stands where it is a choice."""
    return {**_torch(seat), **_jax(seat), **_mpi(seat), **threads(seat.local_world_size, env)}


def _torch(seat: Seat) -> dict[str, str]:
    return {
        "RANK": str(seat.rank), "WORLD_SIZE": str(seat.world_size), "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_world_size), "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": str(seat.master_port), "NODE_RANK": str(seat.node_rank), "GROUP_RANK": str(seat.node_rank),
        "GROUP_WORLD_SIZE": str(seat.nodes), "ROLE_NAME": "default", "ROLE_RANK": str(seat.rank),
        "ROLE_WORLD_SIZE": str(seat.world_size), "TORCHELASTIC_RUN_ID": seat.run,
        "TORCHELASTIC_RESTART_COUNT": str(seat.attempt - 1), "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _jax(seat: Seat) -> dict[str, str]:
    """Number and count of processes have no variable that jax.distributed reads (0.10): a program passes them."""
    return {"JAX_COORDINATOR_ADDRESS": f"{seat.master_addr}:{seat.master_port}"}


def _mpi(seat: Seat) -> dict[str, str]:
    """For programs that look at these to find their rank; no MPI library is served by them."""
    return {
        "OMPI_COMM_WORLD_RANK": str(seat.rank), "OMPI_COMM_WORLD_SIZE": str(seat.world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(seat.local_rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(seat.local_world_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(seat.local_rank), "PMI_RANK": str(seat.rank),
        "PMI_SIZE": str(seat.world_size),
    }


def threads(procs: int, env: Mapping[str, str]) -> dict[str, str]:
    """As torchrun: several processes of a node do not each start a thread for every core. Libraries read it when they
    are imported, so a standby needs it, too."""
    chosen = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if procs > 1:
        chosen["OMP_NUM_THREADS"] = "1"
    return {name: env.get(name, value) for name, value in chosen.items()}
