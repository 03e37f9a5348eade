"""Where the specs of a run lie: `RUN/spec/0001.toml`, then the next number for each change. An attempt has one of them.
"""

from __future__ import annotations

import re

from packtrain.core.platform import Platform

_NAME = re.compile(r"(\d{4,})\.toml")


def spec_path(run: str, number: int) -> str:
    return f"{run}/spec/{number:04d}.toml"


def newest_number(platform: Platform, run: str) -> int:
    """The highest there is; 0: the folder holds no spec. Raises OSError."""
    folder = f"{run}/spec"
    names = platform.listdir(folder) if platform.is_dir(folder) else []
    return max((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), default=0)
