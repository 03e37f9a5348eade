"""The memory tier: files of each writer on tmpfs, and the records that say which of them hold a whole state.

    /dev/shm/packtrain-<user>-<run>/            0700, one folder a run
      r00000.a0007.1.g0         an image, byte for byte that of a checkpoint
      r00000.a0007.1.g0.json    Slot: whose state, of which step, and the crc32c of each of its blocks

A slot is whole when its record is there. The record goes before the image is touched and comes back, by one rename,
when all of it was copied and summed; so a worker that is killed at any moment leaves no record or a true one, and what
it had copied before stays usable. Slots are no commits and no copies: an attempt may begin from what every writer of
the last begun attempt holds, and its `begin` names that by a digest over the records. The digest vouches for the
records, a record for each block: what changed since is found before it is used.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.format import ImageLayout, LocalTensor, Manifest, PartEntry, PartTable, PlacedBox, TensorSpec
from packtrain.core.bulk import Mapped
from packtrain.core.errors import CheckpointDamaged, CheckpointUnreadable, SlotDamaged
from packtrain.core.memory import left_for
from packtrain.core.platform import Platform
from packtrain.core.units import bytes_text

BUFFERS, SLOTS = 2, 3
"""Images of a writer: one written away while another is filled; with the memory tier a third is whole meanwhile."""
MEMORY_FOLDER = "/dev/shm"
MEMORY_SHARE_MAX = 0.5
"""Of what is left there."""
RECORD = ".json"
RECORD_BYTES_MAX = 1 << 30

Memory = tuple[int, int, str]
"""As `Commit.memory`: attempt, step, digest over the records of all writers."""


class BufferFolder(NamedTuple):
    """Where buffers lie. `fallback`: why not in memory, in words for a warning; empty: they are in memory."""

    path: str
    fallback: str = ""
    slots: bool = False
    """Whether there is room for a memory tier, where one is wanted."""
    no_slots: str = ""
    """Why not, where there is none."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """The record beside an image."""

    format: int = fmt.FORMAT
    begin: str
    """Nonce of the record that began the attempt: another run in the same place is another one."""
    attempt: int
    step: int
    writer: str
    bytes: int
    block_bytes: int = fmt.BLOCK_BYTES
    crc32c: tuple[int, ...] = ()
    tensors: tuple[TensorSpec, ...]
    boxes: tuple[PlacedBox, ...]
    about: dict[str, Any]
    """data_index, plan_hash, seed, code_hash and meta of a manifest."""


class Held(NamedTuple):
    """A slot that was found whole. `sha256`: of its record."""

    image: str
    slot: Slot
    sha256: str


class Buffer:
    """One image in memory. `held`: a carrier reads it. `lent`: one may read on, so it is not filled again."""

    def __init__(self, stem: str) -> None:
        self.held = self.lent = False
        self.step = -1
        """Of the state it was filled with last; -1: none."""
        self._stem = stem
        self._generation = 0
        self._adopted = ""
        self._mapped: Mapped | None = None
        self._header = b""
        self._recorded = False

    @property
    def path(self) -> str:
        return self._adopted or f"{self._stem}.g{self._generation}"

    def fill(self, platform: Platform, layout: ImageLayout, tensors: Sequence[LocalTensor]) -> None:
        """Copy. Raises OSError where there is no room, or the record of what it held does not go."""
        self.forget(platform)
        mapped = self._mapped
        if mapped is None or self._header != layout.header:
            mapped = self._mapped = platform.map_file(self.path, layout.bytes_total)
            layout.fill_header(mapped.buffer)
            mapped.filled(0, len(layout.header))
            self._header = layout.header
        for index, (tensor, placed) in enumerate(zip(tensors, layout.boxes, strict=True)):
            layout.fill(mapped.buffer, index, tensor.array)
            mapped.filled(placed.offset, placed.offset + placed.bytes)

    def seal(self, platform: Platform, slot: Slot) -> None:
        """Sum up what was filled, then write the record: from then on it is whole. Raises OSError."""
        assert self._mapped is not None, "nothing was filled"
        image = np.frombuffer(self._mapped.buffer, np.uint8, count=slot.bytes)
        crcs = tuple(fmt.crc32c(image[at : at + slot.block_bytes]) for at in range(0, slot.bytes, slot.block_bytes))
        self._recorded = True
        platform.write_replacing(self.path + RECORD, render(msgspec.structs.replace(slot, crc32c=crcs)))

    def adopt(self, image: str, step: int) -> None:
        """Take over what an earlier attempt left, until it is renewed."""
        self._adopted, self.step = image, step
        self.lent = self._recorded = True

    def renew(self, platform: Platform) -> None:
        """Leave the file to whoever may still read it: its name goes, the next fill makes another."""
        for path in (self.path + RECORD, self.path):
            with suppress(OSError):
                platform.unlink(path)
        self._generation += not self._adopted
        self._adopted, self._mapped = "", None
        self.step, self.lent, self._recorded = -1, False, False

    def forget(self, platform: Platform) -> None:
        """No record may stand beside an image that is being filled."""
        if self._recorded:
            with suppress(FileNotFoundError):
                platform.unlink(self.path + RECORD)
            self._recorded = False
        self.step = -1


# --- where ---------------------------------------------------------------------------------------------


def memory_folder(run_folder: str) -> str:
    """In memory, of this user and this run alone."""
    name = hashlib.sha256(os.path.realpath(run_folder).encode()).hexdigest()[:16]
    return f"{MEMORY_FOLDER}/packtrain-{os.getuid()}-{name}"


def choose_buffer_folder(
    platform: Platform, run_folder: str, image_bytes: int, writer: str | None = None, begun: Commit | None = None
) -> BufferFolder:
    """Where this run's buffers lie: in memory if its images take at most half of what is left, else beside the run.

    `begun`: the record of an attempt that wants a memory tier; it gets one if three images fit. What dead attempts of
    `writer` left in either place goes first, but for what `begun` restores: it is no reason to find too little room.
    A folder in memory must be ours alone: anybody may make names there.
    """
    folder, beside = memory_folder(run_folder), f"{run_folder}/buffers"
    kept = adoptable(platform, folder, begun, writer) if writer is not None else None
    for candidate in (folder, beside) if writer is not None else ():
        with suppress(OSError):
            drop_left_behind(platform, candidate, writer or "", kept)
    try:
        found = _in_memory(platform, folder, image_bytes, kept.slot.bytes if kept is not None else 0, begun is not None)
    except OSError as error:
        found = f"{MEMORY_FOLDER} cannot be used: {error}"
    if isinstance(found, BufferFolder):
        return found
    return BufferFolder(beside, f"save buffers are on the run's own disk: {found}", no_slots=found if begun else "")


def _in_memory(
    platform: Platform, folder: str, image_bytes: int, kept_bytes: int, slots: bool
) -> BufferFolder | str:
    """The folder, made, or why it cannot be there. Raises OSError."""
    left = left_for(platform, MEMORY_FOLDER)
    room = MEMORY_SHARE_MAX * (left.bytes + kept_bytes)
    if BUFFERS * image_bytes > room:
        return f"{BUFFERS} x {bytes_text(image_bytes)} is over half of the {bytes_text(left.bytes)} {left.where}"
    platform.mkdir(folder, 0o700)
    if not platform.is_private(folder):
        return f"{folder} is not a folder of this user alone"
    return BufferFolder(folder, "", *_slots(image_bytes, room, left.where, slots))


def _slots(image_bytes: int, room: float, where: str, wanted: bool) -> tuple[bool, str]:
    if not wanted or SLOTS * image_bytes <= room:
        return wanted, ""
    left = f"{bytes_text(room / MEMORY_SHARE_MAX)} {where}"
    return False, f"no copies in memory: {SLOTS} x {bytes_text(image_bytes)} is over half of the {left}"


def drop_left_behind(platform: Platform, folder: str, writer: str, kept: Held | None = None) -> None:
    """Images of this writer's earlier attempts: what still reads them can publish nothing any more."""
    names = () if kept is None else (kept.image, kept.image + RECORD)
    for name in platform.listdir(folder):
        if name.startswith(f"{writer}.a") and f"{folder}/{name}" not in names:
            with suppress(OSError):
                platform.unlink(f"{folder}/{name}")


# --- what is there -------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What the next attempt may begin from, and what to say of it; empty: nothing."""

    memory: Memory | None = None
    note: str = ""


def look(platform: Platform, run_folder: str, log: CommitLog) -> Found:
    """The newest step that every writer of the last begun attempt holds whole, if it is newer than what is on disk.

    An attempt that began from memory and holds nothing of its own yet may be begun again from the same. What cannot be
    looked at is not there: the disk has what was published. Nor is anything once the log was taken over: what was
    copied after its last record belongs to the log that was closed.
    """
    begun = next((commit for commit in log.follow(log.head()) if commit.kind != "save"), None)
    point = log.restore_point()
    if begun is None or begun.kind == "moved":
        return Found()
    try:
        held = held_in(platform, memory_folder(run_folder))
    except OSError as error:
        return Found(None, f"memory cannot be looked at: {error}")
    whole = _whole(held, begun)
    if not whole and any(one.slot.begin == begun.nonce for one in held):
        return Found(None, "memory holds no whole step of the last attempt")
    return _newest(whole, point.step if point is not None else -1)


def _newest(whole: dict[int, tuple[int, str]], on_disk: int) -> Found:
    step = max(whole, default=-1)
    if step <= on_disk:
        return Found()
    attempt, digest = whole[step]
    ahead = f"{step - on_disk} steps newer than the newest on disk" if on_disk >= 0 else "nothing is on disk yet"
    return Found((attempt, step, digest), f"step {step} from memory: {ahead}")


def _whole(held: Collection[Held], begun: Commit) -> dict[int, tuple[int, str]]:
    """Step -> (attempt, digest) of what all writers hold."""
    own = [one for one in held if one.slot.begin == begun.nonce]
    whole = {}
    for step in {one.slot.step for one in own}:
        parts = [one for one in own if one.slot.step == step]
        if {one.slot.writer for one in parts} == set(begun.writers):
            whole[step] = (begun.attempt, digest_of(parts))
    if begun.memory is not None and _named(held, begun.memory):
        attempt, step, digest = begun.memory
        whole[step] = (attempt, digest)
    return whole


def held_in(platform: Platform, folder: str) -> list[Held]:
    """Every slot of a run that has a true record and an image of that size. Raises OSError; none where no folder is."""
    if not platform.exists(folder) or not platform.is_private(folder):
        return []
    found = []
    for name in platform.listdir(folder):
        image = f"{folder}/{name.removesuffix(RECORD)}"
        with suppress(FileNotFoundError):
            slot = parse(platform.read(image + RECORD, 0, RECORD_BYTES_MAX)) if name.endswith(RECORD) else None
            if slot is not None and platform.size(image) == slot[0].bytes:
                found.append(Held(image, *slot))
    return found


def adoptable(platform: Platform, folder: str, begun: Commit | None, writer: str) -> Held | None:
    """The slot of this writer that its attempt began from."""
    if begun is None or begun.memory is None:
        return None
    with suppress(OSError):
        return next((one for one in _named(held_in(platform, folder), begun.memory) if one.slot.writer == writer), None)
    return None


def digest_of(parts: Collection[Held]) -> str:
    """Over the records of one step, whatever order they were found in."""
    lines = sorted(f"{one.slot.writer} {one.sha256}\n" for one in parts)
    return fmt.sha256("".join(lines).encode())


def _named(held: Collection[Held], memory: Memory) -> list[Held]:
    """The slots that a `begin` names; none unless all of them are there as they were."""
    attempt, step, digest = memory
    for begin in {one.slot.begin for one in held}:
        parts = [one for one in held if (one.slot.begin, one.slot.attempt, one.slot.step) == (begin, attempt, step)]
        if parts and digest_of(parts) == digest:
            return parts
    return []


# --- reading -------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """What a reader of checkpoints needs."""

    folder: str
    manifest: Manifest
    tables: list[PartTable]


def opened(platform: Platform, run_folder: str, begin: Commit) -> Opened:
    """What record `begin` names in memory, read as a checkpoint is. Raises CheckpointDamaged, CheckpointUnreadable."""
    assert begin.memory is not None, f"record {begin.number} begins from no memory"
    folder, (attempt, step, _) = memory_folder(run_folder), begin.memory
    parts = _parts(platform, folder, begin.memory)
    tensors = list(dict.fromkeys(spec for one in parts for spec in one.slot.tensors))
    entries = [PartEntry(one.slot.writer, one.slot.bytes, "", 0, "") for one in parts]
    manifest = Manifest(step=step, attempt=attempt, tensors=tensors, parts=entries, **parts[0].slot.about)
    fmt.check_manifest(manifest, folder)
    specs = {spec.name: spec for spec in tensors}
    return Opened(folder, manifest, [_table(one, specs) for one in parts])


def _parts(platform: Platform, folder: str, memory: Memory) -> list[Held]:
    try:
        parts = _named(held_in(platform, folder), memory)
    except OSError as error:
        raise CheckpointUnreadable(f"memory cannot be read: {error}", where=folder, fix=fmt.DAMAGED_FIX) from error
    if not parts:
        raise CheckpointDamaged("what the attempt began from is gone or changed", where=folder, fix=fmt.DAMAGED_FIX)
    return parts


def _table(one: Held, specs: dict[str, TensorSpec]) -> PartTable:
    slot = one.slot
    if len(slot.crc32c) != fmt.block_count(slot.bytes, slot.block_bytes):
        raise CheckpointDamaged("the record does not fit its image", where=one.image, fix=fmt.DAMAGED_FIX)
    for placed in slot.boxes:
        fmt.check_placed(placed, specs.get(placed.tensor), slot.bytes, one.image)
    return PartTable(
        format=slot.format, writer=slot.writer, file=one.image.rpartition("/")[2], bytes=slot.bytes, sha256="",
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
        _forget(platform, memory_folder(run_folder), begin.memory)
        raise SlotDamaged(
            f"step {begin.memory[1]} cannot be restored from memory: {error.what}", where=error.where,
            fix="nothing: the run goes on from its newest save on disk; where this comes again, test the memory",
        ) from error


def _forget(platform: Platform, folder: str, memory: Memory) -> None:
    with suppress(OSError):
        for one in held_in(platform, folder):
            if (one.slot.attempt, one.slot.step) == memory[:2]:
                platform.unlink(one.image + RECORD)


# --- records -------------------------------------------------------------------------------------------


def render(slot: Slot) -> bytes:
    """SHA-256 of what follows, in hex; the record as JSON."""
    body = msgspec.json.encode(slot)
    return b"%s\n%s" % (fmt.sha256(body).encode(), body)


def parse(data: bytes) -> tuple[Slot, str] | None:
    """The record and its SHA-256; None for anything but a whole one of this format."""
    digest, _, body = data.partition(b"\n")
    if fmt.sha256(body).encode() != digest:
        return None
    try:
        slot = msgspec.json.decode(body, type=Slot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    sane = slot.format == fmt.FORMAT and 0 < slot.block_bytes <= fmt.BLOCK_BYTES_MAX
    return (slot, digest.decode()) if sane else None
