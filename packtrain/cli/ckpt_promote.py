"""`packtrain ckpt repair RUN --promote PLACE`: a folder of copies becomes the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from packtrain.checkpoint.promote import Promoted
    from packtrain.core.platform import Platform

STEPS_SHOWN = 8
VERB = "packtrain ckpt repair --promote"


def promote(run: str, place: str, lost: bool) -> None:
    """Close the run's log and make PLACE the run. Raises PromoteRefused, RunHeld, RunMoved."""
    from packtrain.cli import spec
    from packtrain.cli.retained import unheld
    from packtrain.core.platform import LocalPlatform
    from packtrain.train.sections import newest_spec

    platform, folder = LocalPlatform(), _folder(place)
    spec.read(newest_spec(platform, folder))
    with _old(platform, run, folder, lost) as old, unheld(platform, folder, VERB):
        promoted = _made(platform, old, folder, lost)
    typer.echo("\n".join([*_lines(run, folder, promoted), *_next(folder)]))


def _made(platform: Platform, old: str | None, folder: str, lost: bool) -> Promoted:
    """Under a bar: every byte of a checkpoint is read."""
    from packtrain.checkpoint.promote import promote as make_run
    from packtrain.cli.bars import Bars
    from packtrain.core.units import bytes_text

    done = 0
    with Bars(sys.stderr, bytes_text) as bars:

        def told(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            bars("verifying", done, 0)

        return make_run(platform, old, folder, lost, told)


def _folder(place: str) -> str:
    """Absolute, as the record names it. Raises PromoteRefused for a bucket and where no copy lies, StoreRefused,
    StoreUnreachable where there is no folder."""
    from packtrain.cli import folders
    from packtrain.core.errors import PromoteRefused, RunMissing
    from packtrain.core.platform import LocalPlatform
    from packtrain.core.stores import Folder

    if "://" in place.removeprefix("file://"):
        raise PromoteRefused(
            "a bucket cannot hold the log of a run", where=place,
            fix="bring it to a folder, with any tool, names as they are; then promote that",
        )
    path = place.removeprefix("file://")
    try:
        return os.path.realpath(folders.find_run(path))
    except RunMissing:
        Folder(LocalPlatform(), os.path.abspath(path)).exists(folders.SPEC)  # what is no folder is told as such
        raise PromoteRefused(
            "no copy of a run lies there: it has no spec", where=path,
            fix="give the folder that `packtrain ckpt copy` or a mirror filled",
        ) from None


@contextmanager
def _old(platform: Platform, run: str, folder: str, lost: bool) -> Iterator[str | None]:
    """The run's folder, which nobody trains meanwhile; None where it is not there or cannot be written."""
    from packtrain.cli import folders
    from packtrain.cli.retained import unheld
    from packtrain.core.errors import RunMissing, RunUnusable, UsageError

    try:
        old = os.path.realpath(folders.find_run(run))
    except RunMissing:
        if not lost:
            raise
        _refuse_mistyped(platform, run, folder)
        yield None
        return
    if old == folder:
        raise UsageError("RUN and PLACE are one folder", where=f"ckpt repair {run}", fix="name the folder of copies")
    with ExitStack() as held:
        try:
            held.enter_context(unheld(platform, old, VERB))
        except RunUnusable:
            yield None
        else:
            yield old


def _refuse_mistyped(platform: Platform, run: str, folder: str) -> None:
    """What is said to be lost may only be misspelt: a run that is here would stay open."""
    from packtrain.checkpoint.promote import is_origin
    from packtrain.cli import folders
    from packtrain.core.errors import PromoteRefused

    for name in folders.run_names():
        other = os.path.realpath(f"{folders.runs_folder()}/{name}")
        if other != folder and is_origin(platform, other, folder):
            raise PromoteRefused(
                f"there is no run called {run!r}, and what was copied there is of {name}, which is not lost",
                where=other, fix=f"packtrain ckpt repair {name} --promote {folder}",
            )


def _lines(run: str, folder: str, promoted: Promoted) -> list[str]:
    lines = [
        f"{folder} is the run now; it goes on from step {promoted.restored.step}",
        f"  the log of {run} is closed: nothing trains or publishes there any more" if promoted.closed else
        f"  the log of {run} is not closed: when that disk comes back, give this command again before anything else",
    ]
    if not promoted.closed:
        lines.append("  where it went back, or was asked to, after the last copy came here is not known")
    if promoted.left:
        steps = ", ".join(str(commit.step) for commit in promoted.left[-STEPS_SHOWN:])
        lines.append(f"  saves that never came here, and stay in the old place: {steps}")
    return lines


def _next(folder: str) -> list[str]:
    """How to train there; runs are found by name, so one that lies elsewhere is linked."""
    from packtrain.cli import folders

    name, runs = os.path.basename(folder), folders.runs_folder()
    inside = os.path.dirname(folder) == os.path.realpath(runs)
    link = [] if inside else [f"next: ln -s {folder} {runs}/{name}"]
    return [*link, f"next: the command that trains it, with --run {name}"]
