"""`packtrain ckpt restore`: where the next attempt begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from packtrain.cli.options import Run, Save

if TYPE_CHECKING:
    from packtrain.checkpoint.commits import Commit, CommitLog

STEPS_SHOWN = 8


def restore(run: Run, step: Save) -> None:
    """Make the next attempt of RUN begin from STEP; a finished run then goes on from there.

    Nothing is deleted. Asking again for another step replaces this. Refused while somebody trains the run.
    """
    from packtrain.checkpoint import asked
    from packtrain.checkpoint.reader import open_checkpoint
    from packtrain.cli import folders, published
    from packtrain.cli.retained import unheld
    from packtrain.core.platform import LocalPlatform

    platform, folder = LocalPlatform(), folders.find_run(run)
    with unheld(platform, folder, "packtrain ckpt restore"):
        log = published.log_of(platform, folder)
        log.require_open()
        last = log.last()
        commit = published.named(platform, folder, step)
        open_checkpoint(platform, folder, commit)  # what does not open is refused now, not in the night
        asked.wish(platform, folder, commit, last.number if last else 0)
        lost = abandoned(log, commit)
    typer.echo(f"the next attempt of {run} begins from step {commit.step} (attempt {commit.attempt}, {commit.folder})")
    if lost:
        names = ", ".join(str(one.step) for one in lost[-STEPS_SHOWN:])
        saves = "save" if len(lost) == 1 else "saves"
        typer.echo(f"  it abandons {len(lost)} later {saves}, up to step {lost[-1].step}: {names}")
        typer.echo("  those stay until retention takes them after its grace; `packtrain ckpt pin` keeps one")
    typer.echo("next: the command that trains it, as before")


def abandoned(log: CommitLog, commit: Commit) -> list[Commit]:
    """Saves of the lineage that are off it once `commit` is begun from, oldest first."""
    stays = {one.number for one in log.follow(commit.number)}
    return [one for one in reversed(log.lineage(log.head())) if one.kind == "save" and one.number not in stays]
