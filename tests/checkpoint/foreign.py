"""The reader in examples/, as somebody has it who copied that one file."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType

from packtrain.core.platform import Platform
from tests.house.tree import ROOT

EXAMPLE = ROOT / "examples" / "read_checkpoint.py"


def copied(platform: Platform, folder: str, to: pathlib.Path) -> None:
    """Write what a Platform has under `folder` to a real folder."""
    to.mkdir(exist_ok=True)
    for name in platform.listdir(folder):
        path = f"{folder}/{name}"
        if platform.is_dir(path):
            copied(platform, path, to / name)
        else:
            (to / name).write_bytes(platform.read(path))


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_checkpoint", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
