"""The memory tier: files of each writer on tmpfs, and the records that say which of them hold a whole state.

    /dev/shm/packtrain-<user>-<run>-<node>/           0700, one folder a run and node
      r00000.a0007.1.g0         an image, byte for byte that of a checkpoint
      r00000.a0007.1.g0.json    Slot: whose state, of which step, and the crc32c of each of its blocks
    /dev/shm/packtrain-<user>-<run>-<node>.peers/     the same, kept for another node (holding.py)

A slot is whole when its record is there. The record goes before the image is touched and comes back, by one rename,
when all of it was copied and summed; so a worker that is killed at any moment leaves no record or a true one, and what
it had copied before stays usable. Slots are no commits and no copies: an attempt may begin from what every writer of
the last begun attempt holds, and its `begin` names that by a digest over the records. The digest vouches for the
records, a record for each block: what changed since is found before it is used.

Where an attempt has several nodes each has the slots of its own writers. Each says what it holds (`held`), `choose`
finds the newest step that is whole over all of them, and `recall.py` reads it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.format import ImageLayout, LocalTensor, PlacedBox, TensorSpec
from packtrain.core.bulk import Mapped
from packtrain.core.memory import Budget, budget_for
from packtrain.core.platform import Platform

BUFFERS, SLOTS = 2, 3
"""Images of a writer: one written away while another is filled; with the memory tier a third is whole meanwhile."""
LENT = 2
"""With copies on a peer two more: one is sent there, the one sent before stays meanwhile."""
KEPT = 2
"""Images of each writer of another node: one whole while the next arrives."""
MEMORY_FOLDER = "/dev/shm"
MEMORY_SHARE_MAX = 0.5
"""Of what is left there."""
FILLERS, SHARED_BYTES_MIN = 2, 16 << 20
"""Threads that copy a state into an image while training waits, and from what size on."""
RECORD = ".json"
RECORD_BYTES_MAX = 1 << 30
NAMED_MAX = 4
"""Writers that a sentence lists."""

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
    lends: bool = False
    """Whether there is room for copies on peers, where they are wanted: what is sent here and what is kept for another.
    """
    no_lends: str = ""


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


class Whole(NamedTuple):
    """A slot that was found whole. `sha256`: of its record."""

    image: str
    slot: Slot
    sha256: str


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """That a node has a whole slot, as it tells whoever begins the next attempt."""

    begin: str
    attempt: int
    step: int
    writer: str
    node: str
    """Where it lies."""
    sha256: str
    """Of its record."""
    own: bool
    """It lies where the workers of that node look; False: it is kept there for a peer."""


def _fill(mapped: Mapped, layout: ImageLayout, index: int, tensor: LocalTensor) -> None:
    layout.fill(mapped.buffer, index, tensor.array)
    placed = layout.boxes[index]
    mapped.filled(placed.offset, placed.offset + placed.bytes)


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
        if mapped is None or self._header != layout.header or not self._is_there(platform):
            mapped = self._mapped = self._map(platform, layout)
        assert len(tensors) == len(layout.boxes), "an image has its own tensors and no others"
        work = [partial(_fill, mapped, layout, index, tensor) for index, tensor in enumerate(tensors)]
        if layout.bytes_total < SHARED_BYTES_MIN:
            for copy in work:
                copy()
            return
        with platform.crew(FILLERS) as crew:
            for wait in [crew.start(copy) for copy in work]:
                wait()

    def _is_there(self, platform: Platform) -> bool:
        """Somebody may have removed it; if not it is as old as what it is filled with."""
        try:
            platform.touch(self.path)
        except FileNotFoundError:
            return False
        return True

    def _map(self, platform: Platform, layout: ImageLayout) -> Mapped:
        folder = os.path.dirname(self.path)
        if not platform.exists(folder):
            platform.mkdir(folder, 0o700)
            if not platform.is_private(folder):
                raise PermissionError(errno.EPERM, "not a folder of this user alone", folder)
        mapped = platform.map_file(self.path, layout.bytes_total)
        layout.fill_header(mapped.buffer)
        mapped.filled(0, len(layout.header))
        self._header = layout.header
        return mapped

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


def memory_folder(run_folder: str, node: str) -> str:
    """In memory, of this user and this run on this node alone: several nodes may be one machine."""
    name = hashlib.sha256(os.path.realpath(run_folder).encode()).hexdigest()[:16]
    return f"{MEMORY_FOLDER}/{_ours()}{name}-{node}"


class LeftInMemory(NamedTuple):
    folder: str
    bytes: int
    age_s: float
    """Since the newest record was made or the last image was filled."""


def ours_in_memory(platform: Platform) -> list[LeftInMemory]:
    """Every folder of this user's runs here, those that train included."""
    found = []
    for name in platform.listdir(MEMORY_FOLDER) if platform.exists(MEMORY_FOLDER) else []:
        if name.startswith(_ours()):
            folder, size, newest_s = f"{MEMORY_FOLDER}/{name}", 0, 0.0
            with suppress(FileNotFoundError, NotADirectoryError):  # it ends just now
                for path in (f"{folder}/{file}" for file in platform.listdir(folder)):
                    size, newest_s = size + platform.size(path), max(newest_s, platform.modified_s(path))
                found.append(LeftInMemory(folder, size, platform.wall_s() - newest_s))
    return found


def _ours() -> str:
    return f"packtrain-{os.getuid()}-"


def peer_folder(run_folder: str, node: str) -> str:
    """What this node keeps for others; their workers never look here."""
    return f"{memory_folder(run_folder, node)}.peers"


def choose_buffer_folder(
    platform: Platform, run_folder: str, image_bytes: int, writer: str | None = None, begun: Commit | None = None,
    peer: bool = False,
) -> BufferFolder:
    """Where this run's buffers lie: in memory if its images take at most half of what is left, else beside the run.

    `begun`: the record of an attempt that wants a memory tier; it gets one if three images fit, and if it wants `peer`
    copies those if seven do: two more here and two that are kept for a node like this one. What dead attempts of
    `writer` left in either place goes first, but for what `begun` restores: it is no reason to find too little room.
    A folder in memory must be ours alone: anybody may make names there.
    """
    folder, beside = memory_folder(run_folder, platform.node()), f"{run_folder}/buffers"
    kept = adoptable(platform, folder, begun, writer) if writer is not None else None
    for candidate in (folder, beside) if writer is not None else ():
        with suppress(OSError):
            drop_left_behind(platform, candidate, writer or "", kept)
    try:
        kept_bytes = kept.slot.bytes if kept is not None else 0
        budget = budget_for(platform, MEMORY_FOLDER, MEMORY_SHARE_MAX, kept_bytes)
        found = _in_memory(platform, folder, image_bytes, budget)
    except OSError as error:
        found = f"{MEMORY_FOLDER} cannot be used: {error}"
    if isinstance(found, BufferFolder):
        return _with_slots(found, image_bytes, budget, peer) if begun is not None else found
    return BufferFolder(beside, f"save buffers are on the run's own disk: {found}", no_slots=found if begun else "")


def _in_memory(platform: Platform, folder: str, image_bytes: int, budget: Budget) -> BufferFolder | str:
    """The folder, made, or why it cannot be there. Raises OSError."""
    lack = budget.lack(BUFFERS, image_bytes)
    if lack:
        return lack
    platform.mkdir(folder, 0o700)
    if not platform.is_private(folder):
        return f"{folder} is not a folder of this user alone"
    return BufferFolder(folder)


def _with_slots(where: BufferFolder, image_bytes: int, budget: Budget, peer: bool) -> BufferFolder:
    """The folder with what else there is room for."""
    lack = budget.lack(SLOTS, image_bytes)
    if lack:
        return where._replace(no_slots=f"no copies in memory: {lack}")
    lack = budget.lack(SLOTS + LENT + KEPT, image_bytes) if peer else ""
    return where._replace(slots=True, lends=peer and not lack, no_lends=lack and f"no copies on other nodes: {lack}")


def drop_left_behind(platform: Platform, folder: str, writer: str, kept: Whole | None = None) -> None:
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
    looked at is not there: the disk has what was published.
    """
    begun, point = last_begun(log), log.restore_point()
    if begun is None:
        return Found()
    try:
        here = held(platform, run_folder)
    except OSError as error:
        return Found(None, f"memory cannot be looked at: {error}")
    chosen = choose([one for one in here if one.own], begun, point.step if point is not None else -1)
    return Found(chosen.memory, chosen.note if chosen.memory or chosen.lacking else "")


def last_begun(log: CommitLog) -> Commit | None:
    """The record of the last attempt, from whose slots another may begin. None in a log that was closed or taken over:
    what was copied after its last record belongs to the log that was closed.
    """
    last = next((commit for commit in log.follow(log.head()) if commit.kind != "save"), None)
    return last if last is not None and last.kind == "begin" else None


class Chosen(NamedTuple):
    """What the next attempt may begin from, in the memory of several nodes."""

    memory: Memory | None = None
    holders: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Writer -> the nodes that have its slot, those first where a worker finds it."""
    note: str = ""
    """Why this, or why nothing."""
    lacking: tuple[str, ...] = ()
    """Where no step is whole: the writers whose slot nobody has, of the step that lacks fewest."""


def choose(helds: Collection[Held], begun: Commit, on_disk: int = -1) -> Chosen:
    """The newest step of which every writer of `begun`, the last attempt, has a slot somewhere. `on_disk`: the newest
    step there; what is no newer is not taken.

    An attempt that began from memory and holds nothing of its own yet may be begun again from the same. Copies of one
    slot have one record; a step of which a writer has two different ones is passed over: nobody can tell which is good.
    """
    steps = _steps(helds, begun)
    whole = {step: found for step, found in steps.items() if set(found) == set(begun.writers)}
    again = _named(helds, begun.memory) if begun.memory is not None else {}
    if begun.memory is not None and again:
        whole[begun.memory[1]] = again
    if not whole:
        return _lacking(steps, begun)
    step = max(whole)
    if step <= on_disk:
        return Chosen(note=f"memory holds step {step}, and step {on_disk} is on disk")
    ahead = f"{step - on_disk} steps newer than the newest on disk" if on_disk >= 0 else "nothing is on disk yet"
    return _taken(whole[step], f"step {step} from memory: {ahead}")


def _taken(parts: _Parts, note: str) -> Chosen:
    first = next(iter(parts.values()))[0]
    memory = (first.attempt, first.step, digest_of((writer, same[0].sha256) for writer, same in parts.items()))
    holders = {writer: tuple(one.node for one in sorted(same, key=_nearest)) for writer, same in parts.items()}
    return Chosen(memory, holders, note)


_Parts = dict[str, list[Held]]
"""Writer -> copies of its slot, all alike."""


def _steps(helds: Iterable[Held], begun: Commit) -> dict[int, _Parts]:
    """What there is of each step of that attempt, but steps with two different slots of one writer."""
    own = [one for one in helds if one.begin == begun.nonce and one.writer in begun.writers]
    parts = ((step, _parts_of(one for one in own if one.step == step)) for step in sorted({one.step for one in own}))
    return {step: found for step, found in parts if found}


def _parts_of(helds: Iterable[Held]) -> _Parts:
    """By writer; nothing where two are not alike."""
    found: _Parts = {}
    for one in helds:
        found.setdefault(one.writer, []).append(one)
    alike = all(len({one.sha256 for one in same}) == 1 for same in found.values())
    return found if alike else {}


def _named(helds: Iterable[Held], memory: Memory) -> _Parts:
    """The slots that a `begin` names; none unless all of them are there as they were."""
    attempt, step, digest = memory
    alike = [one for one in helds if (one.attempt, one.step) == (attempt, step)]
    for begin in sorted({one.begin for one in alike}):
        parts = _parts_of(one for one in alike if one.begin == begin)
        if parts and digest_of((writer, same[0].sha256) for writer, same in parts.items()) == digest:
            return parts
    return {}


def _lacking(steps: Mapping[int, _Parts], begun: Commit) -> Chosen:
    if not steps:
        return Chosen(note="memory holds nothing of the last attempt")
    step = max(steps, key=lambda step: (len(steps[step]), step))
    lacking = tuple(writer for writer in begun.writers if writer not in steps[step])
    note = f"memory holds no whole step of the last attempt: {_some(lacking)} of step {step}"
    return Chosen(note=note, lacking=lacking)


def _some(writers: Sequence[str]) -> str:
    rest = f" and {len(writers) - NAMED_MAX} more" if len(writers) > NAMED_MAX else ""
    return f"nobody has {', '.join(writers[:NAMED_MAX])}{rest}"


def _nearest(one: Held) -> tuple[bool, str]:
    return not one.own, one.node


def bringing(chosen: Chosen, homes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Node -> {writer: node to fetch its slot from}: what must move before workers restore from `chosen`. `homes`:
    writer -> the node of the next attempt that is to read its slot; of writers without one the first holder is.

    A node that keeps a slot for a peer fetches it from itself: then it lies where its workers look.
    """
    moves: dict[str, dict[str, str]] = {}
    for writer, nodes in chosen.holders.items():
        home = homes.get(writer, nodes[0])
        moves.setdefault(home, {})[writer] = home if home in nodes else nodes[0]
    return moves


def held(platform: Platform, run_folder: str) -> list[Held]:
    """What this node has, its own writers' and its peers'. Raises OSError."""
    node = platform.node()
    places = ((memory_folder(run_folder, node), True), (peer_folder(run_folder, node), False))
    return [
        Held(
            begin=one.slot.begin, attempt=one.slot.attempt, step=one.slot.step, writer=one.slot.writer, node=node,
            sha256=one.sha256, own=own,
        )
        for folder, own in places for one in held_in(platform, folder)
    ]


def held_in(platform: Platform, folder: str) -> list[Whole]:
    """Every slot of a run that has a true record and an image of that size. Raises OSError; none where no folder is."""
    if not platform.exists(folder) or not platform.is_private(folder):
        return []
    found = []
    for name in platform.listdir(folder):
        image = f"{folder}/{name.removesuffix(RECORD)}"
        with suppress(FileNotFoundError):
            slot = parse(platform.read(image + RECORD, 0, RECORD_BYTES_MAX)) if name.endswith(RECORD) else None
            if slot is not None and platform.size(image) == slot[0].bytes:
                found.append(Whole(image, *slot))
    return found


def adoptable(platform: Platform, folder: str, begun: Commit | None, writer: str) -> Whole | None:
    """The slot of this writer that its attempt began from: the digest, over the records of all, is the reader's to see.
    """
    if begun is None or begun.memory is None:
        return None
    with suppress(OSError):
        found = named_by(begun.memory, held_in(platform, folder))
        return next((one for one in found if one.slot.writer == writer), None)
    return None


def named_by(memory: Memory, found: Iterable[Whole]) -> list[Whole]:
    """Slots of its attempt and step; whether they are the very ones is for its digest to say."""
    return [one for one in found if (one.slot.attempt, one.slot.step) == memory[:2]]


def images_in(platform: Platform, folder: str) -> list[str]:
    """Every image that is there, whole or not, and those of which only the record is left. Raises OSError."""
    names = platform.listdir(folder) if platform.exists(folder) else []
    return sorted({f"{folder}/{name.partition(RECORD)[0]}" for name in names})


def drop_folder(platform: Platform, folder: str) -> None:
    """All of it. Raises OSError."""
    for name in platform.listdir(folder):
        platform.unlink(f"{folder}/{name}")
    platform.rmdir(folder)


def drop_slot(platform: Platform, image: str) -> None:
    """An image and its record, that first: no record stands alone. What the file system keeps is tried again later."""
    for path in (image + RECORD, image):
        try:
            platform.unlink(path)
        except FileNotFoundError:
            continue
        except OSError:
            return


def forget_named(platform: Platform, folder: str, memory: Memory) -> None:
    """Nothing is to begin from these again: their records go."""
    with suppress(OSError):
        for one in named_by(memory, held_in(platform, folder)):
            forget_slot(platform, one.image)


def forget_slot(platform: Platform, image: str) -> None:
    """Its record goes, the image stays for whoever reads it. Raises OSError."""
    with suppress(FileNotFoundError):
        platform.unlink(image + RECORD)


def digest_of(parts: Iterable[tuple[str, str]]) -> str:
    """Over writers and the SHA-256 of their records of one step, whatever order they were found in."""
    return fmt.sha256("".join(sorted(f"{writer} {sha256}\n" for writer, sha256 in parts)).encode())


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
