"""Reads what an attempt begins from in memory, over all nodes of its world: as a checkpoint is read, block by block.

In:   the record that began the attempt, and `share`, by which each rank tells all others of the slots it can read.
Out:  manifest and tables over the slots of all writers, and which ranks have the image of each.
Fails: on all ranks when on one; damage ends the trust in what was named, on every node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.format import Manifest, PartEntry, PartTable, TensorSpec
from packtrain.checkpoint.slots import (
    RECORD,
    RECORD_BYTES_MAX,
    Memory,
    Slot,
    Whole,
    digest_of,
    forget_named,
    held_in,
    memory_folder,
    named_by,
    parse,
)
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable, SlotDamaged
from packtrain.core.platform import Platform

Share = Callable[[bytes], Sequence[bytes]]
"""What this rank tells all ranks of its world -> what each of them told, by rank; all call it together."""

REFUSED = b"!"
"""Told instead of records, with the error of the file system behind it."""


def alone(data: bytes) -> Sequence[bytes]:
    """A world of one."""
    return [data]


class Opened(NamedTuple):
    """What a reader of checkpoints needs."""

    folder: str
    manifest: Manifest
    tables: list[PartTable]
    readers: list[tuple[int, ...]]
    """Of each part the ranks that have its image."""


class _Told(NamedTuple):
    """A record that ranks told of."""

    slot: Slot
    sha256: str
    ranks: list[int]


def opened(platform: Platform, run_folder: str, begin: Commit, share: Share = alone) -> Opened:
    """What record `begin` names in memory, read as a checkpoint is. Raises CheckpointDamaged, CheckpointUnreadable; on
    all ranks that `share` when on one.
    """
    assert begin.memory is not None, f"record {begin.number} begins from no memory"
    folder, (attempt, step, _) = memory_folder(run_folder, platform.node()), begin.memory
    parts, files = _parts(platform, folder, begin.memory, share)
    tensors = list(dict.fromkeys(spec for one in parts for spec in one.slot.tensors))
    entries = [PartEntry(one.slot.writer, one.slot.bytes, "", 0, "") for one in parts]
    manifest = Manifest(step=step, attempt=attempt, tensors=tensors, parts=entries, **parts[0].slot.about)
    fmt.check_manifest(manifest, folder)
    specs = {spec.name: spec for spec in tensors}
    names = (files.get(one.slot.writer, f"{one.slot.writer}.elsewhere") for one in parts)
    tables = [_table(one.slot, name, specs, folder) for one, name in zip(parts, names)]
    return Opened(folder, manifest, tables, [tuple(one.ranks) for one in parts])


def _parts(platform: Platform, folder: str, memory: Memory, share: Share) -> tuple[list[_Told], dict[str, str]]:
    """The records that `memory` names, by writer, and the images among them that are here."""
    here, records = _here(platform, folder, memory)
    told = share(records)
    for rank, data in enumerate(told):
        if data.startswith(REFUSED):
            what = f"rank {rank} cannot read memory: {data.removeprefix(REFUSED).decode(errors='replace')}"
            raise CheckpointUnreadable(what, where=folder, fix=fmt.DAMAGED_FIX)
    parts = _agreed(told, memory)
    if not parts:
        raise CheckpointDamaged("what the attempt began from is gone or changed", where=folder, fix=fmt.DAMAGED_FIX)
    good = {one.sha256 for one in parts}
    return parts, {one.slot.writer: one.image.rpartition("/")[2] for one in here if one.sha256 in good}


def _here(platform: Platform, folder: str, memory: Memory) -> tuple[list[Whole], bytes]:
    """The slots on this node, and what is told of them."""
    try:
        here = named_by(memory, held_in(platform, folder))
        return here, b"\n".join(platform.read(one.image + RECORD, 0, RECORD_BYTES_MAX) for one in here)
    except OSError as error:
        return [], REFUSED + str(error).encode()


def _agreed(told: Sequence[bytes], memory: Memory) -> list[_Told]:
    """Of all that ranks told the records that `memory` names; nothing unless they are all there."""
    found: dict[str, _Told] = {}
    for rank, data in enumerate(told):
        lines = data.split(b"\n")
        for digest, body in zip(lines[::2], lines[1::2]):  # a record is two lines
            record = parse(digest + b"\n" + body)
            if record is not None:
                found.setdefault(record[1], _Told(*record, [])).ranks.append(rank)
    by_begin: dict[str, list[_Told]] = {}
    for one in sorted(found.values(), key=lambda one: one.slot.writer):
        by_begin.setdefault(one.slot.begin, []).append(one)
    return next((
        parts for parts in by_begin.values() if digest_of((one.slot.writer, one.sha256) for one in parts) == memory[2]
    ), [])


def _table(slot: Slot, file: str, specs: dict[str, TensorSpec], folder: str) -> PartTable:
    image = f"{folder}/{file}"
    if len(slot.crc32c) != fmt.block_count(slot.bytes, slot.block_bytes):
        raise CheckpointDamaged("the record does not fit its image", where=image, fix=fmt.DAMAGED_FIX)
    for placed in slot.boxes:
        fmt.check_placed(placed, specs.get(placed.tensor), slot.bytes, image)
    return PartTable(
        format=slot.format, writer=slot.writer, file=file, bytes=slot.bytes, sha256="",
        block_bytes=slot.block_bytes, crc32c=list(slot.crc32c), boxes=list(slot.boxes),
    )


@contextmanager
def distrusting(platform: Platform, run_folder: str, begin: Commit) -> Iterator[None]:
    """Inside, damage ends the trust in what `begin` names: its records go, so no attempt begins from it again.

    Raises SlotDamaged instead of the errors of a checkpoint: the newest save on disk is not concerned.
    """
    try:
        yield
    except (CheckpointDamaged, CheckpointUnreadable) as error:
        assert begin.memory is not None
        forget_named(platform, memory_folder(run_folder, platform.node()), begin.memory)
        raise SlotDamaged(
            f"step {begin.memory[1]} cannot be restored from memory: {error.what}", where=error.where,
            fix="nothing: the run goes on from its newest save on disk; where this comes again, test the memory",
        ) from error
