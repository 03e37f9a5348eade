"""Text that is on every machine Packtrain runs on: the sources of the running Python's standard library, tests left
out."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

ENOUGH_BYTES = 8 << 20
INSTALLED_BYTES_MAX = 8 << 20
"""Installed packages can be a hundred times the library; they only fill up what it lacks."""
TESTS = frozenset({"test", "tests", "idle_test", "testing"})
INSTALLED = frozenset({"site-packages", "dist-packages"})


class Sources(NamedTuple):
    """`files` in sorted order, `bytes` in all; `installed_files`: how many of them are of installed packages, not
    Python's own."""

    files: list[str]
    bytes: int
    installed_files: int


def standard_library(library: str = "", installed: str = "", enough_bytes: int = ENOUGH_BYTES) -> Sources:
    """The library's sources; where a distribution ships less than `enough_bytes` of them, installed packages' too.

    Both folders are those of the running Python unless given. A source that is not UTF-8 is left out.
    """
    paths = sysconfig.get_paths()
    files = list(_sources(library or paths["stdlib"]))
    n = sum(os.path.getsize(file) for file in files)
    if n >= enough_bytes:
        return Sources(files, n, 0)
    own = set(files)
    more = []
    for file in _sources(installed or paths["purelib"]):
        size = os.path.getsize(file)
        if file not in own and n + size <= enough_bytes + INSTALLED_BYTES_MAX:
            more.append(file)
            n += size
    return Sources(files + more, n, len(more))


def _sources(folder: str) -> Iterator[str]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in TESTS | INSTALLED and f != "__pycache__")
        for name in sorted(names):
            path = os.path.join(here, name)
            if name.endswith(".py") and os.path.isfile(path) and _is_utf8(path):
                yield path


def _is_utf8(path: str) -> bool:
    with open(path, "rb") as file:
        try:
            file.read().decode()
        except UnicodeDecodeError:
            return False
    return True
