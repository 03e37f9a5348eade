"""Where runs and stores are, and what a person may call them."""

from __future__ import annotations

import difflib
import os
import re

from packtrain.core.errors import RunMissing, UsageError

HOME = "PACKTRAIN_HOME"
SPEC = "spec/0001.toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def home() -> str:
    return os.path.abspath(os.environ.get(HOME) or ".")


def runs_folder() -> str:
    return f"{home()}/runs"


def stores_folder() -> str:
    return f"{home()}/stores"


def is_run(folder: str) -> bool:
    return os.path.isfile(f"{folder}/{SPEC}")


def run_names() -> list[str]:
    """Runs of the home folder, sorted."""
    folder = runs_folder()
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if is_run(f"{folder}/{name}"))


def named(name: str) -> str:
    """The folder a new or known run of this name has. Raises UsageError for what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a run", where="--run",
            fix="use letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        )
    return f"{runs_folder()}/{name}"


def name_after(path: str) -> str:
    """A name no run has yet, after the last part of a path."""
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(os.path.abspath(path))).lstrip("._-")
    return free_name(last[:80] or "mine")


def find_run(run: str) -> str:
    """Absolute folder of a run given by name or path. Raises RunMissing with the nearest name."""
    for folder in (f"{runs_folder()}/{run}", os.path.abspath(run)):
        if run and is_run(folder):
            return folder
    known = run_names()
    near = difflib.get_close_matches(run, known, n=1)
    if near:
        fix = f"did you mean {near[0]}?"
    elif known:
        fix = f"there are: {', '.join(known[:8])}"
    else:
        fix = "make one with `packtrain first-light` or `packtrain train RECIPE`"
    raise RunMissing(f"there is no run called {run!r}", where=runs_folder(), fix=fix)


def free_name(name: str) -> str:
    """`name`, or name-2, name-3, ...: the first that no run has."""
    if not is_run(named(name)):
        return name
    n = 2
    while is_run(named(f"{name}-{n}")):
        n += 1
    return f"{name}-{n}"
