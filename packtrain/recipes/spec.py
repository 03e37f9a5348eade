"""The complete configuration of a run: one section a room. A recipe is a function that returns one of these."""

from __future__ import annotations

import msgspec

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.data.config import DataConfig
from packtrain.supervise.config import SuperviseConfig
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written as `spec/0001.toml`; each room decodes its own section strictly (`core.config.read_section`)."""

    recipe: str
    overrides: tuple[str, ...] = ()
    """`key=value` as given on the command line; compared when the same run is asked for again."""
    chosen: tuple[str, ...] = ()
    """`key=value` that a command found out by itself, such as a number of steps; not compared."""
    seed: int = 0
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    guard: GuardConfig = GuardConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervise: SuperviseConfig = SuperviseConfig()
