"""`packtrain ckpt ls` and `packtrain ckpt show`: which saves a run has, and what is in one. No tensor is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packtrain.cli.options import Json, MaybeSave, Run

if TYPE_CHECKING:
    from packtrain.checkpoint.commits import Commit
    from packtrain.checkpoint.listing import Listed
    from packtrain.checkpoint.reader import Checkpoint
    from packtrain.core.platform import Platform

COLUMNS = ("step", "attempt", "commit", "size", "age", "state")
TENSOR_COLUMNS = ("tensor", "dtype", "shape", "dims", "size")
PART_COLUMNS = ("part", "size", "sha-256")


def ls(
    run: Run, json: Json = False,
    all_: Annotated[bool, typer.Option("--all", help="Those that were purged or not copied, too.")] = False,
) -> None:
    """List the saves of RUN, on the lineage and off it, and what is left of saves never published.

    Says which is restored next, pinned, one of the best, rolled back, tombstoned and for how long, uncommitted, or
    gone.
    """
    from packtrain.checkpoint.asked import next_restored
    from packtrain.checkpoint.listing import listing
    from packtrain.checkpoint.where import folder_named
    from packtrain.cli import folders, published
    from packtrain.cli.retained import surveyed
    from packtrain.core.platform import LocalPlatform

    platform, folder = LocalPlatform(), folders.find_run(run)
    log = published.log_of(platform, folder)
    restored = next_restored(platform, folder, log)
    rows = listing(*surveyed(platform, folder), restored)
    shown = [row for row in rows if all_ or not (row.purged or row.left)]
    sizes = {row.folder: bytes_in(platform, folder_named(platform, folder, row.folder)) for row in shown if row.present}
    if json:
        print_json([_plain(row, sizes.get(row.folder, 0)) for row in shown])
        return
    nothing = None if rows else published.nothing_yet(platform, folder)
    told = [nothing.what, f"  next:  {nothing.fix}"] if nothing else _lines(shown, sizes, len(rows) - len(shown))
    for line in told:
        typer.echo(line)
    last = log.last()
    if last is not None and last.kind == "moved" and last.place:
        typer.echo(f"closed: this run goes on in {last.place}")


def show(
    run: Run, step: MaybeSave = None, json: Json = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="The table of tensors.")] = False,
) -> None:
    """Tell what is in a checkpoint: where it stands, its meta data, tensors and parts. Needs no device."""
    from packtrain.checkpoint.mirrors import holders, noted_states
    from packtrain.checkpoint.reader import open_checkpoint
    from packtrain.cli import folders, published
    from packtrain.core.platform import LocalPlatform

    platform, folder = LocalPlatform(), folders.find_run(run)
    commit = published.named(platform, folder, step)
    checkpoint = open_checkpoint(platform, folder, commit)
    mirrors = holders(noted_states(platform, folder)).get(commit.number, ())
    row, stone = _standing(platform, folder, commit)
    if json:
        print_json({
            "commit": commit, "folder": checkpoint.folder, "manifest": checkpoint.manifest, "mirrors": mirrors,
            "kept": None if row is None else row.kept, "purge_in_s": None if row is None else row.purge_in_s,
        })
        return
    where = f"; on mirrors {', '.join(mirrors)}" if mirrors else ""
    typer.echo(f"step {commit.step}, attempt {commit.attempt}, commit {commit.number}{where}")
    if row is not None:
        typer.echo(f"  kept: {_why(row, stone)}")
    for line in (*_about(checkpoint), *(_tensors(checkpoint) if tensors else ())):
        typer.echo(line)


def print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


# --- ls ----------------------------------------------------------------------------------------------


def _plain(row: Listed, size: int) -> dict[str, Any]:
    import msgspec

    return {**msgspec.structs.asdict(row), "bytes": size}


def bytes_in(platform: Any, folder: str) -> int:
    """Of all images in a checkpoint folder, as everybody counts its size; one that is being purged has ever fewer."""
    from packtrain.checkpoint.format import is_image

    total = 0
    try:
        for name in filter(is_image, platform.listdir(folder)):
            total += platform.size(f"{folder}/{name}")
    except FileNotFoundError:
        return total
    return total


def _lines(rows: list[Listed], sizes: dict[str, int], left_out: int) -> list[str]:
    from packtrain.cli.runs import table

    lines = [table([COLUMNS, *(_row(row, sizes) for row in rows)])] if rows else ["no checkpoint is here"]
    if left_out:
        was = "was" if left_out == 1 else "were"
        lines.append(f"{left_out} more {was} purged by retention, or not copied (--all lists them)")
    if any(not (row.present or row.purged or row.left) for row in rows):
        lines.append(
            "GONE: taken by something else than retention; from a mirror a run that trains brings it back by itself, "
            "else packtrain ckpt repair"
        )
    return lines


def _row(row: Listed, sizes: dict[str, int]) -> tuple[str, ...]:
    from packtrain.cli.retained import purge_words
    from packtrain.core.units import bytes_text, duration_text

    left_s, state = row.purge_in_s, [row.words()] if row.words() else []
    if left_s is not None:
        state.append(f"tombstoned, purged {purge_words(left_s)}")
    return (
        str(row.step), str(row.attempt), str(row.commit or "-"),
        bytes_text(sizes[row.folder]) if row.present else "-",
        duration_text(max(0.0, row.age_s)) if row.present else "-", ", ".join(state),
    )


# --- show --------------------------------------------------------------------------------------------


def _standing(platform: Platform, folder: str, commit: Commit) -> tuple[Listed | None, str]:
    """How retention sees it, and why it has its tombstone; None: no spec that can be read here says what is kept."""
    from packtrain.checkpoint.listing import listing
    from packtrain.cli.retained import surveyed
    from packtrain.core.errors import PacktrainError

    try:
        seen, config = surveyed(platform, folder)
    except (PacktrainError, OSError):
        return None, ""
    stone = seen.tombstones.get(commit.folder)
    rows = [row for row in listing(seen, config, None) if row.folder == commit.folder]
    return (rows[0] if rows else None), "" if stone is None else stone.reason


def _why(row: Listed, stone: str) -> str:
    """As in `one of the last 3`, or when it goes and why."""
    from packtrain.cli.retained import purge_words
    from packtrain.monitor.report import one_line

    kept = ", ".join(reason.words for reason in row.kept)
    if row.purge_in_s is None:
        return kept or "no, retention lets it go"
    if kept:
        return f"{kept}; the next carrier takes its tombstone away"
    return f"no, tombstoned ({one_line(stone)}), purged {purge_words(row.purge_in_s)}"


def _about(checkpoint: Checkpoint) -> list[str]:
    from packtrain.cli.runs import table
    from packtrain.core.units import bytes_text
    from packtrain.monitor.report import printable

    manifest = checkpoint.manifest
    facts = {
        "data_index": manifest.data_index, "seed": manifest.seed, "plan_hash": manifest.plan_hash,
        "code_hash": manifest.code_hash, **manifest.meta,
    }
    parts = [(part.writer, bytes_text(part.bytes), part.sha256) for part in manifest.parts]
    return [
        f"  {checkpoint.folder}", *(printable(f"  {key}: {value}") for key, value in facts.items()),
        f"  {_total(checkpoint)}", table([PART_COLUMNS, *parts]),
    ]


def _total(checkpoint: Checkpoint) -> str:
    from packtrain.core.units import bytes_text, count_text
    from packtrain.monitor.report import counted

    specs = checkpoint.manifest.tensors
    elements: dict[str, int] = {}
    for spec in specs:
        elements[spec.dtype] = elements.get(spec.dtype, 0) + math.prod(spec.shape)
    of = ", ".join(f"{count_text(n)} {dtype}" for dtype, n in elements.items())
    size = bytes_text(sum(part.bytes for part in checkpoint.manifest.parts))
    return f"{len(specs)} tensors ({of or 'none'}), {size} in {counted(len(checkpoint.manifest.parts), 'part')}"


def _tensors(checkpoint: Checkpoint) -> list[str]:
    from packtrain.checkpoint.diff import bytes_of
    from packtrain.cli.runs import table
    from packtrain.core.units import bytes_text
    from packtrain.monitor.report import printable

    rows = [
        (printable(spec.name), spec.dtype, "x".join(map(str, spec.shape)) or "scalar", printable(" ".join(spec.dims)),
         bytes_text(bytes_of(spec)))
        for spec in checkpoint.manifest.tensors
    ]
    return [table([TENSOR_COLUMNS, *rows])]
