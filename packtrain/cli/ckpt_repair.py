"""`packtrain ckpt repair`: mend a damaged checkpoint from another place that has it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from packtrain.cli.options import SAVE_HELP, Run
from packtrain.cli.places import Endpoint, KeyId, RateOption, Region, Secret

if TYPE_CHECKING:
    from packtrain.checkpoint.commits import Commit
    from packtrain.checkpoint.repair import Outcome, Places
    from packtrain.core.errors import PacktrainError
    from packtrain.core.platform import Platform
    from packtrain.core.stores import Store


def repair(
    run: Run,
    step: Annotated[
        str, typer.Argument(metavar="[STEP|latest|all]", help=f"{SAVE_HELP} latest: what a restart would read.")
    ] = "latest",
    from_: Annotated[
        list[str] | None, typer.Option(
            "--from", metavar="PLACE", help="A folder or bucket that holds a copy; again for another. "
            "Default: the run's checkpoint.mirrors.",
        )
    ] = None,
    promote: Annotated[
        str, typer.Option("--promote", metavar="PLACE", help="Make this folder of copies the run, and close RUN.")
    ] = "",
    lost: Annotated[
        bool, typer.Option("--lost", help="With --promote: RUN is gone for good, and nothing can train there.")
    ] = False,
    rate: RateOption = "", endpoint: Endpoint = "", region: Region = "", key_id: KeyId = "", secret: Secret = "",
) -> None:
    """Mend a checkpoint: fetch the blocks and files that are bad here, and no others, from a place that has them.

    Exit codes: 0 whole now, 75 a place or the disk is away, the same command goes on later, 78 no place has it whole.
    """
    from packtrain.checkpoint.repair import Places
    from packtrain.cli import ckpt_promote, folders
    from packtrain.cli.places import place, rate_of
    from packtrain.cli.published import to_mend
    from packtrain.core.platform import LocalPlatform

    if promote or lost:
        _refuse_mixture(run, step, from_, promote)
        ckpt_promote.promote(run, promote, lost)
        return
    platform, folder = LocalPlatform(), folders.find_run(run)
    chosen, limit = to_mend(platform, folder, step), rate_of(rate)
    stores = [place(platform, url, endpoint, region, key_id, secret) for url in from_ or []]
    others = _others(folder, stores or _mirrors(platform, folder))
    places = Places(platform, others, limit)
    _conclude(folder, places, [(commit, _mend(platform, folder, commit, places, step)) for commit in chosen])
    _compare_logs(platform, run, folder, others)


def _refuse_mixture(run: str, step: str, from_: list[str] | None, promote: str) -> None:
    from packtrain.core.errors import UsageError

    if not promote or from_ or step != "latest":
        raise UsageError(
            "--promote is given alone, or with --lost", where=f"ckpt repair {run}",
            fix="packtrain ckpt repair RUN --promote PLACE; mend PLACE before, with packtrain ckpt repair PLACE --from",
        )


def _compare_logs(platform: Platform, run: str, folder: str, others: list[Store]) -> None:
    """Raises NotMended where the run's log lost its last records and a place has them. A place that is away is not
    asked."""
    from packtrain.checkpoint.copies import goes_on_to
    from packtrain.core.errors import StoreRefused, StoreUnreachable

    for store in others:
        try:
            ends = goes_on_to(platform, folder, store)
        except (StoreRefused, StoreUnreachable):
            continue
        if ends is not None:
            raise _lost_records(run, folder, store, *ends)


def _lost_records(run: str, folder: str, store: Store, here: int, there: int) -> PacktrainError:
    from packtrain.core.errors import NotMended

    bring = "bring it to a folder, with any tool, names as they are; then " if "://" in store.url else ""
    return NotMended(
        f"the log here ends at record {here}, and in {store.url} it goes on to {there}: records were lost here",
        where=f"{folder}/commits",
        fix=f"{bring}packtrain ckpt repair {run} --promote {'FOLDER' if bring else store.url}; or restore the records "
        "from a backup of the run folder",
    )


def _mirrors(platform: Platform, folder: str) -> list[Store]:
    """Those the run's spec names. One that cannot even be opened is passed over, and that is said."""
    from packtrain.cli.retained import config_of
    from packtrain.core.errors import PacktrainError
    from packtrain.core.stores import open_store

    stores = []
    for mirror in config_of(platform, folder).mirrors:
        try:
            stores.append(open_store(platform, mirror.store))
        except PacktrainError as error:
            typer.echo(f"mirror {mirror.name} is passed over: {error.what}", err=True)
    return stores


def _others(folder: str, stores: list[Store]) -> list[Store]:
    """Without the run itself: it may have been a mirror once, and its spec still names it."""
    return [store for store in stores if os.path.realpath(store.url) != os.path.realpath(folder)]


def _mend(platform: Platform, folder: str, commit: Commit, places: Places, step: str) -> Outcome:
    """One checkpoint, under a bar of its own; what was bad is printed, and what became of it."""
    from packtrain.checkpoint.repair import Outcome, repair
    from packtrain.cli.bars import Bars
    from packtrain.core.errors import CheckpointGone
    from packtrain.core.units import bytes_text

    try:
        with Bars(sys.stderr, bytes_text) as bars:
            outcome = repair(platform, folder, commit, places, bars)
    except CheckpointGone:
        if step != "all":
            raise
        outcome = Outcome()
    typer.echo("".join(f"{line}\n" for line in _lines(commit, outcome)), nl=False)
    return outcome


def _lines(commit: Commit, outcome: Outcome) -> list[str]:
    from packtrain.cli.ckpt_verify import names_text
    from packtrain.core.units import bytes_text
    from packtrain.monitor.report import printable

    name = f"step {commit.step} (commit {commit.number})"
    left = {damage.file for damage in outcome.left}
    lines = [
        f"{name}: {'STILL DAMAGED' if bad.file in left else 'mended'} {bad.file}: {names_text(bad.tensors)}: {bad.what}"
        for bad in outcome.damage
    ]
    if not left:
        lines.append(f"{name}: whole, {bytes_text(outcome.bytes_fetched)} fetched")
    return [printable(line) for line in lines]


def _conclude(folder: str, places: Places, ended: list[tuple[Commit, Outcome]]) -> None:
    """Raises NotMended, or StoreUnreachable where a place that was away may have what is missing."""
    from packtrain.core.errors import AgainError, NotMended, StoreUnreachable

    left = [commit.step for commit, outcome in ended if outcome.left]
    if not left:
        return
    where = f"{folder}/checkpoints"
    what = f"still damaged: step {', '.join(map(str, left))}; {_why(places)}"
    if any(isinstance(error, AgainError) and error.name.startswith("store.") for error in places.refused.values()):
        raise StoreUnreachable(what, where=where, fix="see that the places are up; the same command goes on from here")
    raise NotMended(
        what, where=where, fix="name another place with --from, a folder or a bucket that was filled by `packtrain "
        "ckpt copy`; or go back with `packtrain ckpt restore`",
    )


def _why(places: Places) -> str:
    refused: dict[str, PacktrainError] = places.refused
    if not refused:
        return "no other place is known"
    return "; ".join(f"{url}: {error.what}" for url, error in refused.items())
