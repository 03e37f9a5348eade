"""Reads checkpoints: any box of any tensor, whatever boxes the writers wrote, every byte checked before it is used.

A range is widened to whole blocks of its image, and a block is used only when its crc32c agrees with the part's table,
whose SHA-256 the manifest holds, whose SHA-256 the commit holds. Memory beyond the result is bounded by
blocks.CACHE_BYTES.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint import recall
from packtrain.checkpoint.asked import pins
from packtrain.checkpoint.best import Judged
from packtrain.checkpoint.blocks import Block, Blocks, as_damaged, as_unreadable, read_stored
from packtrain.checkpoint.commits import RECORD_BYTES_MAX, Commit, CommitLog, parse_record
from packtrain.checkpoint.format import Box, Manifest, PartEntry, PartTable, PlacedBox, TensorSpec
from packtrain.checkpoint.mirrors import holders, noted_states
from packtrain.checkpoint.retention import (
    TOMBSTONE_BYTES_MAX,
    Survey,
    Tombstone,
    parse_tombstone,
    purging_name,
    tombstone_name,
)
from packtrain.checkpoint.where import checkpoint_folder, reachable_folder
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable, FormatUnknown
from packtrain.core.platform import Platform

SLAB_BYTES = 8 << 20
"""Bytes of one stored box looked at at a time."""
TABLE_BYTES_MAX = 1 << 30
COPIED = "copied"
"""Folder of a place that holds copies: the record of each, named as in the log."""


class Damage(NamedTuple):
    """Something found wrong. `tensors`: all whose bytes it can have touched; ("*",) where that is every one."""

    file: str
    tensors: tuple[str, ...]
    what: str


class _Stored(NamedTuple):
    placed: PlacedBox
    table: PartTable


class Checkpoint:
    """An open checkpoint: manifest and tables checked against the digest, boxes known to tile every tensor."""

    def __init__(
        self, platform: Platform, folder: str, manifest: Manifest, tables: list[PartTable], published: bool = True,
        readers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.manifest = manifest
        self.folder = folder
        self.published = published
        """False: it is held in memory and nowhere else."""
        self.readers = readers
        """Of each part the processes that can read it, by their numbers in their world; None: all can read all."""
        self.specs = {spec.name: spec for spec in manifest.tensors}
        self._platform = platform
        self._tables = tables
        self._blocks = Blocks(platform, folder)
        self._stored: dict[str, list[_Stored]] = {name: [] for name in self.specs}
        for table in tables:
            for placed in table.boxes:
                self._stored[placed.tensor].append(_Stored(placed, table))
        for name, stored in self._stored.items():
            fmt.check_tiling(self.specs[name], [s.placed.box for s in stored], folder)

    @property
    def tables(self) -> list[PartTable]:
        """One for each part, as the manifest lists them."""
        return self._tables

    def read(self, name: str, box: Box | None = None) -> np.ndarray[Any, Any]:
        """The elements of `box` (default: the whole tensor). Raises CheckpointDamaged naming tensor and file."""
        spec = self.specs[name]
        box = fmt.whole(spec.shape) if box is None else box
        assert fmt.is_inside(box, spec.shape), f"{name}: box {box} is outside {spec.shape}"
        out = np.empty(fmt.box_shape(box), fmt.DTYPES[spec.dtype][1])
        for stored in self._stored[name]:
            common = fmt.intersect(stored.placed.box, box)
            if common is not None:
                self._copy(stored, common, out, box)
        return out

    def ahead(self, boxes: Iterable[tuple[str, Box]]) -> AbstractContextManager[None]:
        """Inside, disk and checksums work ahead of `read`, if that is called for these tensors and boxes in this order.

        For the speed alone: any other order is right as well.
        """
        return self._blocks.ahead(
            block
            for name, box in boxes for stored in self._stored[name]
            if (common := fmt.intersect(stored.placed.box, box)) is not None
            for block in _blocks_of(stored, common)
        )

    def blocks(self, order: Sequence[tuple[int, int]]) -> Generator[bytes, None, None]:
        """These blocks (part, number in it), checked, loaded a little ahead. Raises CheckpointDamaged naming tensors
        and file, CheckpointUnreadable.
        """
        with self._blocks.ahead((self._tables[part], index) for part, index in order):
            for part, index in order:
                table = self._tables[part]
                try:
                    block = self._blocks.fresh(table, index)
                except CheckpointDamaged as error:
                    first, *others = touched(table, index)
                    name = f"{first} (and {len(others)} more)" if others else first
                    raise as_damaged(f"tensor {name}: {error.what}", error.where) from error
                yield block

    def _copy(self, stored: _Stored, common: Box, out: np.ndarray[Any, Any], box: Box) -> None:
        placed, table = stored
        dtype = fmt.DTYPES[placed.dtype][1]
        try:
            for slab, at in slabs(placed.box, common, dtype.itemsize):
                start = placed.offset + at
                raw = self._blocks.span(table, start, start + fmt.volume(slab) * dtype.itemsize)
                held = raw.view(dtype)
                part = fmt.intersect(slab, common)
                assert part is not None
                out[within(part, box)] = held.reshape(fmt.box_shape(slab))[within(part, slab)]
        except CheckpointDamaged as error:
            raise as_damaged(f"tensor {placed.tensor}: {error.what}", error.where) from error

    def verify(
        self, told: Callable[[int], None] = lambda n_bytes: None, found: Callable[[Damage], None] = lambda damage: None
    ) -> list[Damage]:
        """Read every byte of every image; what is wrong, by file and tensor. Raises CheckpointUnreadable.

        `told` hears after each block how many bytes it had; `found` of each damage at once, whatever comes after it.
        """
        damages = []
        with self._blocks.ahead((table, index) for table in self._tables for index in range(len(table.crc32c))):
            for table in self._tables:
                for damage in self._verify_part(table, told):
                    found(damage)
                    damages.append(damage)
        return damages

    def _verify_part(self, table: PartTable, told: Callable[[int], None]) -> Iterator[Damage]:
        path, digest = f"{self.folder}/{table.file}", hashlib.sha256()
        damaged = False
        for index in range(len(table.crc32c)):
            try:
                digest.update(self._blocks.fresh(table, index))
            except CheckpointDamaged as error:
                damaged = True
                yield Damage(table.file, touched(table, index), error.what)
            told(min(table.block_bytes, table.bytes - index * table.block_bytes))
        try:
            size = self._platform.size(path)
        except FileNotFoundError as error:
            yield Damage(table.file, touched(table, None), str(error))
            return
        except OSError as error:
            raise as_unreadable(error, path) from error
        if size != table.bytes:
            yield Damage(table.file, touched(table, None), f"{size} bytes long, not {table.bytes}")
        elif not damaged and digest.hexdigest() != table.sha256:
            yield Damage(table.file, touched(table, None), "SHA-256 differs although every block's crc32c agrees")


def open_checkpoint(platform: Platform, run_folder: str, commit: Commit) -> Checkpoint:
    """Open what a save commit published. Reads manifest and tables, no tensor; needs no device.

    Raises CheckpointDamaged naming the file, or the tensor whose boxes do not tile it; FormatUnknown if it is newer;
    CheckpointUnreadable when the disk refuses, which says nothing about the checkpoint.
    """
    assert commit.kind == "save", f"commit {commit.number} is no save"
    folder = checkpoint_folder(platform, run_folder, commit)
    manifest = _read_manifest(platform, folder, commit)
    specs = {spec.name: spec for spec in manifest.tensors}
    tables = [_read_table(platform, folder, entry, specs) for entry in manifest.parts]
    return Checkpoint(platform, folder, manifest, tables)


def open_restore(platform: Platform, run_folder: str, number: int, digest: str) -> Checkpoint:
    """Open what PACKTRAIN_RESTORE names: a commit number and the digest that was chosen with it."""
    log = CommitLog(platform, f"{run_folder}/commits")
    commit = log.read(number)
    if commit is None or commit.kind != "save" or commit.digest != digest:
        raise as_damaged(f"record {number} is not the save that was to be restored", log.path(number))
    return open_checkpoint(platform, run_folder, commit)


@contextmanager
def restoring(
    platform: Platform, run_folder: str, number: int, digest: str, share: recall.Share = recall.alone
) -> Iterator[Checkpoint]:
    """Open what PACKTRAIN_RESTORE names, to be read inside: a save, or what a `begin` names in memory.

    All processes of a world come here together: `share` lets each tell all of the slots on its node. Raises as
    `open_restore` and `Checkpoint.read`; of memory SlotDamaged in their place.
    """
    commit = CommitLog(platform, f"{run_folder}/commits").read(number)
    if commit is None or commit.memory is None or commit.memory[2] != digest:
        yield open_restore(platform, run_folder, number, digest)
        return
    with recall.distrusting(platform, run_folder, commit):
        folder, manifest, tables, readers = recall.opened(platform, run_folder, commit, share)
        yield Checkpoint(platform, folder, manifest, tables, published=False, readers=readers)


def verify_commit(
    platform: Platform, run_folder: str, commit: Commit, told: Callable[[int], None] = lambda n_bytes: None,
    found: Callable[[Damage], None] = lambda damage: None,
) -> list[Damage]:
    """All damage of one published checkpoint, that which keeps it from being opened included.

    `told` and `found` as in `Checkpoint.verify`. Raises CheckpointUnreadable: a disk that refuses is no damage.
    """
    try:
        return open_checkpoint(platform, run_folder, commit).verify(told, found)
    except (CheckpointDamaged, FormatUnknown) as error:
        damage = Damage(error.where.rpartition("/")[2], ("*",), error.what)
        found(damage)
        return [damage]


def checkpoint_bytes(platform: Platform, run_folder: str, commit: Commit) -> int:
    """Of all its images, for showing progress; 0 where the manifest cannot tell."""
    try:
        folder = checkpoint_folder(platform, run_folder, commit)
        return sum(part.bytes for part in _read_manifest(platform, folder, commit).parts)
    except (CheckpointDamaged, CheckpointUnreadable, FormatUnknown):
        return 0


def missing(platform: Platform, run_folder: str, commit: Commit) -> str:
    """The first file of a published checkpoint that is not there, or not as long as it was; "": none.

    Names and sizes only: what is in the files is for `verify`. What lies in a place that is away is not there. Raises
    OSError where the disk refuses to say, and what a manifest that cannot be read raises.
    """
    folder = reachable_folder(platform, run_folder, commit)
    try:
        data = platform.read(f"{folder}/{fmt.MANIFEST}", 0, TABLE_BYTES_MAX)
    except FileNotFoundError:
        there = f"its folder, in {commit.place}" if commit.place else "its folder"
        return fmt.MANIFEST if platform.is_dir(folder) else there
    if fmt.sha256(data) != commit.digest:
        return fmt.MANIFEST if len(data) == 0 else ""  # other bytes are damage, which `repair` is for
    for entry in fmt.decode(data, fmt.Manifest, folder).parts:
        files = ((fmt.image_name(entry.writer), entry.bytes), (fmt.table_name(entry.writer), entry.table_bytes))
        for name, size in files:
            if not _has(platform, f"{folder}/{name}", size):
                return name
    return ""


def is_going(platform: Platform, run_folder: str, commit: Commit) -> bool:
    """Whether a purge of what `commit` published has begun: it was claimed, or it is marked and has no manifest."""
    stones = f"{run_folder}/tombstones"
    if platform.exists(f"{stones}/{purging_name(commit.folder)}"):
        return True
    return platform.exists(f"{stones}/{tombstone_name(commit.folder)}") and _beheaded(platform, run_folder, commit)


def survey(platform: Platform, run_folder: str, judge: Callable[[], Judged] = Judged) -> Survey:
    """What retention decides from: log, folders with their ages, tombstones, pins. The one place that lists folders.

    `judge` looks into the journal (judged.py), after the log was read: so it knows of the evaluations of all saves.
    """
    now_s = platform.wall_s()
    ages: dict[str, float] = {}
    for name, path in _entries(platform, f"{run_folder}/checkpoints"):
        if fmt.parse_folder(name) is not None:
            with suppress(FileNotFoundError):  # purged since it was listed
                ages[name] = now_s - platform.modified_s(path)
    commits = CommitLog(platform, f"{run_folder}/commits").all()
    for commit in commits:
        if commit.kind == "save" and commit.place and commit.folder not in ages:
            # Purged, or that disk is away: what nobody sees nobody purges.
            with suppress(OSError, CheckpointDamaged, CheckpointUnreadable):
                ages[commit.folder] = now_s - platform.modified_s(checkpoint_folder(platform, run_folder, commit))
    stones = _tombstones(platform, run_folder)
    marked = [commit for commit in commits if commit.folder in stones.keys() & ages.keys()]
    return Survey(
        commits=tuple(commits), tombstones=stones, ages_s=ages, now_s=now_s,
        going=frozenset(commit.folder for commit in marked if _beheaded(platform, run_folder, commit)),
        pinned=frozenset(pins(platform, run_folder)),
        copied=copied_numbers(platform, run_folder, commits),
        mirrored=holders(noted_states(platform, run_folder)), judged=judge(),
    )


def copied_numbers(platform: Platform, run_folder: str, commits: Sequence[Commit]) -> frozenset[int]:
    """Numbers of the records whose checkpoints were brought here. `commits`: the whole log.

    A copy names its checkpoint before the log leads to it. Where the place was promoted in between, the log went on
    otherwise, and that name counts for nothing.
    """
    named = {int(name): path for name, path in _entries(platform, f"{run_folder}/{COPIED}") if name.isdecimal()}
    found = set()
    for number, path in named.items():
        if 0 < number <= len(commits):
            record = parse_record(platform.read(path, 0, RECORD_BYTES_MAX))
            found |= {number} if record in (None, commits[number - 1]) else set()
    if not any(commit.kind == "moved" for commit in commits[max(found, default=0) :]):
        found |= {number for number in named if number > len(commits)}
    return frozenset(found)


def _tombstones(platform: Platform, run_folder: str) -> dict[str, Tombstone]:
    stones: dict[str, Tombstone] = {}
    for name, path in _entries(platform, f"{run_folder}/tombstones"):
        with suppress(FileNotFoundError):
            stone = parse_tombstone(platform.read(path, 0, TOMBSTONE_BYTES_MAX))
            if stone is not None and name == tombstone_name(stone.folder):
                stones[stone.folder] = stone
    return stones


def _entries(platform: Platform, folder: str) -> list[tuple[str, str]]:
    names = platform.listdir(folder) if platform.exists(folder) else []
    return [(name, f"{folder}/{name}") for name in names]


# --- leaves ------------------------------------------------------------------------------------------

def _has(platform: Platform, path: str, size: int) -> bool:
    try:
        return platform.size(path) == size
    except FileNotFoundError:
        return False


def _beheaded(platform: Platform, run_folder: str, commit: Commit) -> bool:
    """Its manifest is gone. False where its place is away: nobody knows."""
    with suppress(CheckpointDamaged, CheckpointUnreadable):  # or a record that leads nowhere
        return not platform.exists(f"{checkpoint_folder(platform, run_folder, commit)}/{fmt.MANIFEST}")
    return False


def _read_manifest(platform: Platform, folder: str, commit: Commit) -> Manifest:
    path = f"{folder}/{fmt.MANIFEST}"
    return manifest_of(read_stored(platform, path, 0, TABLE_BYTES_MAX), commit, path)


def manifest_of(data: bytes, commit: Commit, path: str) -> Manifest:
    """The manifest that `commit` published. Raises CheckpointDamaged where these bytes are not it, FormatUnknown."""
    if fmt.sha256(data) != commit.digest:
        raise as_damaged(f"the manifest is not the one that commit {commit.number} published", path)
    manifest = fmt.decode(data, Manifest, path)
    fmt.check_manifest(manifest, path)
    return manifest


def _read_table(platform: Platform, folder: str, entry: PartEntry, specs: dict[str, TensorSpec]) -> PartTable:
    path = f"{folder}/{fmt.table_name(entry.writer)}"
    return table_of(read_stored(platform, path, 0, TABLE_BYTES_MAX), entry, specs, path)


def table_of(data: bytes, entry: PartEntry, specs: dict[str, TensorSpec], path: str) -> PartTable:
    """The table that the manifest lists. Raises CheckpointDamaged where these bytes are not it, FormatUnknown."""
    if len(data) != entry.table_bytes or fmt.sha256(data) != entry.table_sha256:
        raise as_damaged(f"the table of part {entry.writer} is not the one in the manifest", path)
    table = fmt.decode(data, PartTable, path)
    fmt.check_table(table, entry, specs, path)
    return table


def slabs(
    stored: Box, common: Box, item_bytes: int, slab_bytes: int = SLAB_BYTES
) -> Iterator[tuple[Box, int]]:
    """Cut the part of `stored` that holds `common` into contiguous slabs of at most `slab_bytes` (or one element).

    Yields (slab, byte offset in the stored box). A slab spans whole rows below its first free dim: one byte range.
    """
    strides = [item_bytes * math.prod(b - a for a, b in stored[d + 1 :]) for d in range(len(stored))]
    yield from _cut(stored, common, [(stride, slab_bytes // stride) for stride in strides], (), 0)


def _cut(
    stored: Box, common: Box, strides: list[tuple[int, int]], fixed: Box, at: int
) -> Iterator[tuple[Box, int]]:
    """`strides`: per dim, bytes of a row and how many make a slab; `fixed`: rows chosen in the dims before."""
    dim = len(fixed)
    if dim == len(stored):
        yield fixed, at
        return
    (origin, _), (start, stop), (stride, rows) = stored[dim], common[dim], strides[dim]
    for row in range(start, stop, max(rows, 1)):
        here = at + (row - origin) * stride
        if rows:
            yield (*fixed, (row, min(row + rows, stop)), *stored[dim + 1 :]), here
        else:
            yield from _cut(stored, common, strides, (*fixed, (row, row + 1)), here)


def _blocks_of(stored: _Stored, common: Box) -> Iterator[Block]:
    """What `_copy` asks for, in its order."""
    placed, table = stored
    item_bytes = fmt.DTYPES[placed.dtype][1].itemsize
    for slab, at in slabs(placed.box, common, item_bytes):
        first = placed.offset + at
        last = first + fmt.volume(slab) * item_bytes - 1
        for index in range(first // table.block_bytes, last // table.block_bytes + 1):
            yield table, index


def within(part: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(a - origin, b - origin) for (a, b), (origin, _) in zip(part, box, strict=True))


def touched(table: PartTable, index: int | None) -> tuple[str, ...]:
    """Names of tensors with bytes in that block; of all in the part when None, or when only the header is there."""
    if index is None:
        return tuple(dict.fromkeys(placed.tensor for placed in table.boxes))
    start, stop = index * table.block_bytes, (index + 1) * table.block_bytes
    names = dict.fromkeys(p.tensor for p in table.boxes if p.offset < stop and p.offset + p.bytes > start)
    return tuple(names) or touched(table, None)
