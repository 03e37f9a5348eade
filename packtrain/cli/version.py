"""Which packtrain this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version() -> str:
    try:
        return installed("packtrain")
    except PackageNotFoundError:
        return "from source"
