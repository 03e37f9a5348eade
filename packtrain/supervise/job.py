"""What a run is and how it is kept alive: written once by whoever launches it, read by coordinator and agents.

A file of JSON that only its owner may read: the environment in it may hold secrets. What differs from attempt to
attempt comes in messages (`messages.Launch`), not from here.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.errors import BadValue, PacktrainError, RunUnusable
from packtrain.core.platform import Platform
from packtrain.supervise.config import SuperviseConfig


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths are absolute, and the same on every node."""

    name: str
    run_folder: str
    worker: tuple[str, ...]
    """Command of a worker; everything else reaches it through its environment."""
    carrier: tuple[str, ...]
    """Command of the carrier, to which `--run RUN --socket PATH --begin N --checkpoint JSON` is added. Empty: none."""
    env: dict[str, str] = {}
    cwd: str = ""
    """Folder that workers start in; empty: the agent's."""
    version: str
    spec: int = 1
    supervise: SuperviseConfig = SuperviseConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    nodes: int = 1
    """In a full world."""
    procs: int = 1
    """Workers of a node."""
    spares: int = 0
    """Nodes beyond `nodes` that wait."""
    worlds: dict[str, dict[str, int]] = {}
    """Number of nodes -> mesh, for the worlds that this run may shrink to."""
    plain: bool = False
    """Any program, not train/: what it does not say is not waited for."""
    second_log: str = ""
    """Folder of this start's own, where the coordinator's log goes on when its home cannot be written; empty: none."""
    preload: tuple[str, ...] = ()
    """Modules that a standby imports before it is needed; empty: no standby."""


def write_job(platform: Platform, path: str, job: Job) -> None:
    """Create `path` with mode 0600; it must not exist. Raises RunUnusable."""
    try:
        platform.write_new(path, msgspec.json.format(msgspec.json.encode(job)) + b"\n", 0o600)
    except OSError as error:
        raise _unusable(f"the job cannot be written: {error.strerror}", path) from error


def read_job(platform: Platform, path: str) -> Job:
    """Raises RunUnusable where it cannot be read, BadValue where it is no job of this version."""
    try:
        return msgspec.json.decode(platform.read(path), type=Job)
    except OSError as error:
        raise _unusable(f"the job cannot be read: {error.strerror}", path) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, PacktrainError) as error:
        raise BadValue(
            f"this is no job of this version: {error}", where=path, fix="start the run again with this packtrain"
        ) from error


def run_id(run_folder: str) -> str:
    """Twelve digits that tell runs of one user apart, on every node; a run made anew under its path has the same."""
    return hashlib.sha256(os.path.realpath(run_folder).encode()).hexdigest()[:12]


def _unusable(what: str, path: str) -> RunUnusable:
    return RunUnusable(what, where=path, fix="see that the folder is there, writable and not full; then start it again")
