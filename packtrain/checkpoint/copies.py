"""A published checkpoint in another store: its parts first, its manifest last, every byte verified there.

The names are those of the run folder (`checkpoints/step-.../...`), so a folder that holds a copy is read like a run's.
Without its manifest a copy is nothing; with it, it is whole. Which copy counts is not decided here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.errors import CheckpointDamaged, NameAbsent, NameTaken
from packtrain.core.platform import Platform
from packtrain.core.stores import Folder, Store
from packtrain.core.transfer import Item, Progress, Rate, Tally, TransferConfig, copy, unlimited


def send(
    platform: Platform, run_folder: str, commit: Commit, target: Store, config: TransferConfig | None = None, *,
    rate: Rate = unlimited, stop: threading.Event | None = None, progress: Callable[[Progress], None] | None = None,
) -> Tally:
    """Copy what `commit` published into `target`. Called again, it keeps what is good there and mends what is not.

    Raises NameTaken where another checkpoint is published under that name, CheckpointDamaged and TransferDamaged
    where this one is not whole, and whatever `transfer.copy` and the stores raise.
    """
    source = Folder(platform, run_folder)
    parts = part_items(platform, run_folder, commit)
    manifest = _item(source, f"checkpoints/{commit.folder}/{fmt.MANIFEST}", commit.digest)
    _refuse_another(target, manifest.target, commit)
    # What lies there under these names is this checkpoint's, or was never part of a whole one: it may be replaced.
    done = copy(platform, source, target, parts, config, rate=rate, stop=stop, progress=progress, replace=True)
    last = copy(platform, source, target, [manifest], config, rate=rate, stop=stop, replace=True)
    done.add(**{field: getattr(last, field) for field in _COUNTS})
    return done


_COUNTS = (
    "bytes_total", "bytes_sent", "bytes_kept", "bytes_checked", "chunks_read_again", "chunks_sent_again", "items_kept",
)


def part_items(platform: Platform, run_folder: str, commit: Commit) -> list[Item]:
    """All files but the manifest, each with its checksums; the tables were checked against the manifest's digest."""
    checkpoint = open_checkpoint(platform, run_folder, commit)
    source, folder = Folder(platform, run_folder), f"checkpoints/{commit.folder}"
    items = []
    for entry, table in zip(checkpoint.manifest.parts, checkpoint.tables, strict=True):
        image = f"{folder}/{table.file}"
        items.append(Item(image, image, table.bytes, 0, tuple(table.crc32c), table.block_bytes))
        items.append(_item(source, f"{folder}/{fmt.table_name(entry.writer)}", entry.table_sha256))
    return items


def _item(source: Store, name: str, sha256: str) -> Item:
    """A small file whose SHA-256 is known, with the checksums of the bytes that have it."""
    data = source.read(name, 0, source.size(name))
    if fmt.sha256(data) != sha256:
        raise CheckpointDamaged(f"{name} is not what was published", where=source.url, fix=fmt.DAMAGED_FIX)
    blocks = range(0, len(data), fmt.BLOCK_BYTES)
    sums = tuple(fmt.crc32c(data[at : at + fmt.BLOCK_BYTES]) for at in blocks)
    return Item(name, name, len(data), 0, sums, fmt.BLOCK_BYTES)


def _refuse_another(target: Store, manifest: str, commit: Commit) -> None:
    """Where a manifest is there already it is this checkpoint's, or damaged beyond reading as any."""
    try:
        there = target.read(manifest, 0, target.size(manifest))
    except NameAbsent:
        return
    if fmt.sha256(there) == commit.digest:
        return
    try:
        fmt.decode(there, fmt.Manifest, manifest)
    except CheckpointDamaged:
        return
    raise NameTaken(
        "another checkpoint is published there under the same name", where=f"{target.url} {manifest}",
        fix="copy to another place: two runs must not share one",
    )
