"""The sections of a run's specification that the trainer reads, each decoded strictly; others are not its business."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.config import read_section
from packtrain.core.errors import BadValue, RunMissing, RunUnusable
from packtrain.core.platform import Platform
from packtrain.core.specs import newest_number, spec_path
from packtrain.data.config import DataConfig
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig

LAST = re.compile(rb"^\[supervise\]", re.MULTILINE)
"""The section with which every recorded spec ends."""


@dataclass(frozen=True)
class Sections:
    seed: int = 0
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    guard: GuardConfig = GuardConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def parse(data: bytes, where: str = "") -> Sections:
    """Raises UnknownKey, BadValue, Contradiction or LayoutError, naming the key and `where`, the file."""
    return Sections(
        model=read_section(data, "model", ModelConfig, where),
        optim=read_section(data, "optim", OptimConfig, where),
        guard=read_section(data, "guard", GuardConfig, where),
        train=read_section(data, "train", TrainConfig, where),
        data=read_section(data, "data", DataConfig, where),
        checkpoint=read_section(data, "checkpoint", CheckpointConfig, where),
        seed=_seed(tomllib.loads(data.decode()).get("seed", 0), where),  # last: by now it is known to be TOML
    )


def _seed(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise BadValue(
            f"seed is {value!r}, not a whole number below 2**32", where=f"{where}: seed" if where else "seed",
            fix="use --set seed=0",
        )
    return value


def newest_spec(platform: Platform, run: str) -> str:
    """Path of the spec in force from the next attempt: the highest number in RUN/spec. Raises RunMissing."""
    number = newest_number(platform, run)
    if not number:
        raise RunMissing(
            "this folder holds no run: it has no spec", where=f"{run}/spec",
            fix="create the run with `packtrain train RECIPE`, or give the path of a run folder",
        )
    return spec_path(run, number)


def whole(data: bytes, where: str) -> bytes:
    """A recorded spec to its last section. Raises BadValue for one that is empty or cut: it would mean the defaults."""
    if not LAST.search(data):
        raise BadValue(
            "this spec is empty, or was cut: its last section, [supervise], is missing", where=where,
            fix="remove this file where an older one is beside it, which is then in force again; "
                "else give the run's command with --new",
        )
    return data


def read(platform: Platform, path: str) -> Sections:
    """What `parse` makes of the file, which must be whole. Raises RunUnusable when it cannot be read."""
    try:
        data = platform.read(path)
    except OSError as error:
        raise RunUnusable(f"the spec cannot be read: {error.strerror}", where=path, fix="make it readable") from error
    return parse(whole(data, path), path)


def load(platform: Platform, run: str) -> Sections:
    """The spec in force from the next attempt."""
    return read(platform, newest_spec(platform, run))
