"""What a run is that only keeps a program of anybody alive: the counterpart of `RunSpec` for `packtrain run`."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from packtrain.supervise.config import SuperviseConfig

KIND: Final = "program"


class ProgramSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written as `spec/0001.toml`; `kind` tells it from the spec of a recipe, which has none."""

    kind: Literal["program"] = KIND
    command: tuple[str, ...]
    folder: str
    """Where it is run: its relative paths are meant from there."""
    nodes: int = 1
    procs_per_node: int = 1
    spares: int = 0
    preload: tuple[str, ...] = ()
    """Modules that are imported before they are needed, in processes that wait."""
    overrides: tuple[str, ...] = ()
    """`supervise.key=value` as given on the command line."""
    supervise: SuperviseConfig = SuperviseConfig()
