"""`packtrain ckpt verify`: read every byte and name what is wrong."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packtrain.cli.options import Json, MaybeSave, Run

if TYPE_CHECKING:
    from packtrain.checkpoint.commits import Commit
    from packtrain.checkpoint.reader import Damage
    from packtrain.core.errors import CheckpointUnreadable
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
    from packtrain.core.errors import UsageError
    from packtrain.core.platform import LocalPlatform

    if all_ and step is not None:
        raise UsageError("a step and --all were given", where=f"ckpt verify {run} {step} --all", fix="give one of them")
    platform, folder = LocalPlatform(), folders.find_run(run)
    chosen = published.present(platform, folder) if all_ else [published.named(platform, folder, step)]
    look(platform, folder, chosen, json)


@dataclass
class _Looked:
    """One checkpoint, as far as it was read."""

    commit: Commit
    damage: list[Damage] = field(default_factory=list)
    unreadable: CheckpointUnreadable | None = None
    purged: bool = False
    """Retention took it, or part of it, while it was read: what was missing then is no damage."""
    over: bool = False
    """Nothing more of it will be read."""


def look(platform: Platform, folder: str, chosen: list[Commit], json: bool) -> None:
    """Verify these one after the other and print each when it is over; damage is printed whatever comes after it.

    Raises DamageFound where there is any, else CheckpointUnreadable where the disk refused one.
    """
    looked: list[_Looked] = []
    try:
        for commit in chosen:
            looked.append(_Looked(commit))
            try:
                _verify(platform, folder, looked[-1])
            finally:
                if not json:
                    typer.echo("".join(f"{line}\n" for line in _lines(looked[-1])), nl=False)
    finally:
        if json:
            from packtrain.cli.ckpt_show import print_json

            print_json([_plain(one) for one in looked if one.over or one.damage])
    _conclude(folder, looked)


def _verify(platform: Platform, folder: str, looked: _Looked) -> None:
    """Read all of one checkpoint, under a bar of its own: on a terminal nothing can be printed beneath one."""
    from packtrain.checkpoint.reader import checkpoint_bytes, is_going, verify_commit
    from packtrain.cli.bars import Bars
    from packtrain.core.errors import CheckpointUnreadable
    from packtrain.core.units import bytes_text

    total = done = 0
    with Bars(sys.stderr, bytes_text) as bars:

        def told(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            bars(f"step {looked.commit.step}", done, total)

        try:
            total = checkpoint_bytes(platform, folder, looked.commit)
            verify_commit(platform, folder, looked.commit, told, looked.damage.append)
        except CheckpointUnreadable as error:
            looked.unreadable = error
    if (looked.damage or looked.unreadable) and is_going(platform, folder, looked.commit):
        looked.purged, looked.unreadable = True, None
        looked.damage.clear()
    looked.over = True


def _plain(one: _Looked) -> dict[str, Any]:
    return {
        "step": one.commit.step, "attempt": one.commit.attempt, "commit": one.commit.number,
        "whole": one.over and not (one.purged or one.damage) and one.unreadable is None, "purged": one.purged,
        "damage": [damage._asdict() for damage in one.damage],
        "unreadable": None if one.unreadable is None else one.unreadable.as_dict(),
    }


def _lines(one: _Looked) -> list[str]:
    from packtrain.monitor.report import printable

    name = f"step {one.commit.step} (commit {one.commit.number})"
    lines = [f"{name}: DAMAGED {damage.file}: {names_text(damage.tensors)}: {damage.what}" for damage in one.damage]
    if one.unreadable is not None:
        lines.append(f"{name}: UNREADABLE {one.unreadable.where}: {one.unreadable.what}")
    if one.over and not lines:
        lines.append(f"{name}: {'purged meanwhile' if one.purged else 'whole'}")
    return [printable(line) for line in lines]


def names_text(tensors: tuple[str, ...]) -> str:
    if tensors == ("*",):
        return "every tensor"
    more = len(tensors) - TENSORS_SHOWN
    return ", ".join(tensors[:TENSORS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _conclude(folder: str, looked: list[_Looked]) -> None:
    """Raises DamageFound where there is any, else CheckpointUnreadable where there is such."""
    from packtrain.core.errors import CheckpointUnreadable, DamageFound

    bad = [one.commit.step for one in looked if one.damage]
    errors = [one.unreadable for one in looked if one.unreadable is not None]
    there = [one for one in looked if not one.purged]
    whole = sum(not one.damage and one.unreadable is None for one in there)
    counts = f"{whole} of {len(there)} looked at {'is' if whole == 1 else 'are'} whole"
    unread = f"the disk refuses to read step {_listed([one.commit.step for one in looked if one.unreadable])} now"
    if bad:
        raise DamageFound(
            f"damaged: step {_listed(bad)}; {counts}" + (f"; {unread}" if errors else ""),
            where=f"{folder}/checkpoints",
            fix="`packtrain ckpt repair` fetches what is bad from another place that has it (--from, or "
                "checkpoint.mirrors); or go back with `packtrain ckpt restore`",
        )
    if errors:
        where, fix = errors[0].where, errors[0].fix
        raise CheckpointUnreadable(f"{unread}; {counts}", where=where, fix=fix) from errors[0]


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(steps)))
