"""The sections of a run's specification that the trainer reads, each decoded strictly; others are not its business."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.config import read_section
from packtrain.core.errors import BadValue, RunMissing
from packtrain.core.platform import Platform
from packtrain.data.config import DataConfig
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig


@dataclass(frozen=True)
class Sections:
    seed: int = 0
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    guard: GuardConfig = GuardConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def parse(data: bytes) -> Sections:
    """Raises UnknownKey, BadValue, Contradiction or LayoutError, naming the key."""
    return Sections(
        seed=_seed(tomllib.loads(data.decode()).get("seed", 0)),
        model=read_section(data, "model", ModelConfig),
        optim=read_section(data, "optim", OptimConfig),
        guard=read_section(data, "guard", GuardConfig),
        train=read_section(data, "train", TrainConfig),
        data=read_section(data, "data", DataConfig),
        checkpoint=read_section(data, "checkpoint", CheckpointConfig),
    )


def _seed(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise BadValue(f"seed is {value!r}, not a whole number below 2**32", where="seed", fix="use --set seed=0")
    return value


def newest_spec(platform: Platform, run: str) -> str:
    """Path of the spec in force from the next attempt: the highest number in RUN/spec. Raises RunMissing."""
    folder = os.path.join(run, "spec")
    names = platform.listdir(folder) if platform.is_dir(folder) else []
    numbered = [name for name in names if name.endswith(".toml") and name[:-5].isdigit()]
    if not numbered:
        raise RunMissing(
            "this folder holds no run: it has no spec", where=folder,
            fix="create the run with `packtrain train RECIPE`, or give the path of a run folder",
        )
    return os.path.join(folder, max(numbered, key=lambda name: int(name[:-5])))


def load(platform: Platform, run: str) -> Sections:
    return parse(platform.read(newest_spec(platform, run)))
