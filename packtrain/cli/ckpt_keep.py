"""`packtrain ckpt pin`, `unpin` and `tombstone`: what stays and what may go. Nothing is deleted here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.options import Run, Save

if TYPE_CHECKING:
    from packtrain.checkpoint.commits import Commit
    from packtrain.checkpoint.config import CheckpointConfig
    from packtrain.checkpoint.retention import Survey
    from packtrain.core.platform import Platform


def pin(
    run: Run, step: Save, reason: Annotated[str, typer.Option("--reason", help="For whoever reads it later.")] = "",
) -> None:
    """Keep a checkpoint whatever retention plans, also of a run that trains just now. Takes a tombstone away."""
    from packtrain.checkpoint import asked

    platform, folder, commit = _found(run, step)
    asked.pin(platform, folder, commit.folder, reason)
    lifted = _lifted(platform, folder, commit)
    typer.echo(f"pinned: step {commit.step} of {run} stays until `packtrain ckpt unpin {run} {step}`{lifted}")


def unpin(run: Run, step: Save) -> None:
    """Leave a pinned checkpoint to retention again."""
    from packtrain.checkpoint import asked

    platform, folder, commit = _found(run, step)
    if commit.folder not in asked.pins(platform, folder):
        typer.echo(f"step {commit.step} of {run} was not pinned")
        return
    asked.unpin(platform, folder, commit.folder)
    typer.echo(f"unpinned: step {commit.step} of {run} is left to retention")


def tombstone(
    run: Run, step: Save, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False
) -> None:
    """Mark a checkpoint to be purged when checkpoint.grace_s has passed, by the carrier of a later save.

    Refused for what a restart would read, the last checkpoint.keep_last of the lineage, and what is pinned.
    """
    from packtrain.checkpoint.asked import wished
    from packtrain.checkpoint.purge import execute
    from packtrain.checkpoint.retention import Action, reasons, why_kept
    from packtrain.cli.published import log_of
    from packtrain.cli.retained import surveyed
    from packtrain.core.errors import CheckpointKept, error_named

    platform, folder, commit = _found(run, step)
    seen, config = surveyed(platform, folder)
    why = why_kept(seen, config, commit.folder)
    if commit == wished(platform, folder, log_of(platform, folder)):
        why = "the next attempt was asked to begin from it"
    if why is not None:
        raise CheckpointKept(
            f"step {commit.step} stays: {why}", where=f"{folder}/checkpoints/{commit.folder}",
            fix="packtrain ckpt ls shows what else there is; unpin it, or let the run save more",
        )
    kept = [f", {reason.words}" for reason in reasons(seen, config).get(commit.folder, ())]
    named = f"step {commit.step} of {run} (attempt {commit.attempt}, {commit.folder}{''.join(kept)})"
    _confirmed(f"purge {named} {_when(seen, config, commit.folder)}?", yes)
    action = Action("tombstone", commit.folder, "a person asked for it", asked=True)
    for done in execute(platform, folder, seen.commits[-1].attempt, [action], config.grace_s):
        if done.error is not None:
            raise error_named(**done.error)
    when = _when(*surveyed(platform, folder), commit.folder)
    typer.echo(f"tombstoned: step {commit.step} of {run} may be purged {when}; `ckpt pin` takes that back")


def _when(seen: Survey, config: CheckpointConfig, folder: str) -> str:
    """When it goes: a tombstone that was there before has served some of its time, a new one none."""
    from packtrain.checkpoint.listing import purge_in_s
    from packtrain.cli.retained import purge_words

    left_s = purge_in_s(seen, config, folder)
    return purge_words(config.grace_s if left_s is None else left_s)


def _found(run: str, step: str) -> tuple[Platform, str, Commit]:
    from packtrain.cli import folders, published
    from packtrain.core.platform import LocalPlatform

    platform, folder = LocalPlatform(), folders.find_run(run)
    return platform, folder, published.named(platform, folder, step)


def _lifted(platform: Platform, folder: str, commit: Commit) -> str:
    """Take its tombstone away, so that it does not go on serving its time; words about that."""
    from packtrain.checkpoint.purge import execute
    from packtrain.checkpoint.reader import survey
    from packtrain.checkpoint.retention import Action

    seen = survey(platform, folder)
    if commit.folder not in seen.tombstones:
        return ""
    execute(platform, folder, seen.commits[-1].attempt, [Action("lift", commit.folder, "pinned")], 0.0)
    return "; its tombstone is gone"


def _confirmed(question: str, yes: bool) -> None:
    """Raises UsageError where nobody can answer, StoppedOnRequest where the answer is no."""
    from packtrain.core.errors import StoppedOnRequest, UsageError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked", where="ckpt tombstone", fix="add --yes")
    if not typer.confirm(question):
        raise StoppedOnRequest("nothing was marked", where="ckpt tombstone")
