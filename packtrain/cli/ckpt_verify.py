"""`packtrain ckpt verify`: read every byte and name what is wrong."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packtrain.cli.options import Json, MaybeSave, Run

if TYPE_CHECKING:
    from packtrain.checkpoint.commits import Commit
    from packtrain.checkpoint.reader import Damage
    from packtrain.core.platform import Platform

TENSORS_SHOWN = 8


def verify(
    run: Run, step: MaybeSave = None, json: Json = False,
    all_: Annotated[bool, typer.Option("--all", help="Every published checkpoint that is there.")] = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its checksums; name tensor and file of any damage.

    Exit codes: 0 whole, 75 the disk refuses to read, 78 damaged (or no such run or step).
    """
    from packtrain.cli import folders, published
    from packtrain.cli.bars import Bars
    from packtrain.core.errors import UsageError
    from packtrain.core.platform import LocalPlatform
    from packtrain.core.units import bytes_text

    if all_ and step is not None:
        raise UsageError("a step and --all were given", where=f"ckpt verify {run} {step} --all", fix="give one of them")
    platform, folder = LocalPlatform(), folders.find_run(run)
    chosen = published.present(platform, folder) if all_ else [published.named(platform, folder, step)]
    with Bars(sys.stderr, bytes_text) as bars:
        found = {commit: _verified(platform, folder, commit, bars) for commit in chosen}
    if json:
        from packtrain.cli.ckpt_show import print_json

        print_json([_plain(commit, damage) for commit, damage in found.items()])
    else:
        for commit, damage in found.items():
            typer.echo("\n".join(_lines(commit, damage)))
    _conclude(folder, found)


def _verified(platform: Platform, folder: str, commit: Commit, bars: Any) -> list[Damage]:
    """All damage of one checkpoint. Raises CheckpointUnreadable."""
    from packtrain.checkpoint.reader import checkpoint_bytes, verify_commit

    total, done = checkpoint_bytes(platform, folder, commit), 0

    def told(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        bars(f"step {commit.step}", done, total)

    return verify_commit(platform, folder, commit, told)


def _plain(commit: Commit, damage: list[Damage]) -> dict[str, Any]:
    return {
        "step": commit.step, "attempt": commit.attempt, "commit": commit.number, "whole": not damage,
        "damage": [one._asdict() for one in damage],
    }


def _lines(commit: Commit, damage: list[Damage]) -> list[str]:
    from packtrain.monitor.report import printable

    if not damage:
        return [f"step {commit.step} (commit {commit.number}): whole"]
    return [
        printable(f"step {commit.step} (commit {commit.number}): DAMAGED {one.file}: {_names(one.tensors)}: {one.what}")
        for one in damage
    ]


def _names(tensors: tuple[str, ...]) -> str:
    if tensors == ("*",):
        return "every tensor"
    more = len(tensors) - TENSORS_SHOWN
    return ", ".join(tensors[:TENSORS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _conclude(folder: str, found: dict[Commit, list[Damage]]) -> None:
    """Raises DamageFound where there is any."""
    from packtrain.core.errors import DamageFound

    bad = [commit.step for commit, damage in found.items() if damage]
    if bad:
        raise DamageFound(
            f"damaged: step {', '.join(map(str, bad))}; {len(found) - len(bad)} of {len(found)} looked at are whole",
            where=f"{folder}/checkpoints",
            fix="copy the files named from another copy of the run folder, or go back with `packtrain ckpt restore`",
        )
