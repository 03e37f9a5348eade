"""One save, from whole buffers to a published commit. Blocking code over a Platform: the carrier runs it in a thread.

A failed write gets a new try in a new folder until the deadline; no file is ever overwritten, and after a failed fsync
nothing of that try is believed. What is written in a home is written by a thread that can be left there (homes.py): it
only writes. What makes it safe to give a save up while its own thread hangs: that must pass the save's Gate before it
publishes, and a closed gate never opens again.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.format import FolderName, Manifest, PartEntry, PartTable, PlacedBox, TensorSpec
from packtrain.checkpoint.homes import Hangs, Homes
from packtrain.checkpoint.pour import pour
from packtrain.checkpoint.purge import discard_try
from packtrain.checkpoint.where import is_place
from packtrain.core.errors import CheckpointDamaged, CommitStale, CommitUnknown, SaveFailed, SaveFellBack
from packtrain.core.platform import Platform
from packtrain.core.units import NS, bytes_text

RETRY_S_MIN = 0.1
RETRY_S_MAX = 10.0
HOME_TRIES = 3
"""In a home that is not the last, before the next one is tried."""
RANK_TRY = 300
"""Tries in the second home are numbered from here on, in the third from twice as much, and so on."""
SLACK_BYTES = 1 << 20
"""Left free beside the images: for tables, the manifest, and the log."""


class Part(NamedTuple):
    """What one writer offers: a whole file image in a buffer, and what lies where in it."""

    writer: str
    buffer: str
    """Its path; empty: it lies on another node, whose carrier writes the part."""
    bytes: int
    specs: tuple[TensorSpec, ...]
    boxes: tuple[PlacedBox, ...]


class Others:
    """Who writes the parts that lie on other nodes; here nobody does, because there are none."""

    def begin(self, rank: int, folder: str, end_ns: int) -> None:
        """A try has its folder, in that home: they are to write there, until then."""

    def parts(self) -> list[PartEntry]:
        """What they wrote, once all is durable there. Raises OSError where a try failed or its time is over,
        SaveFailed where no other would help."""
        return []

    def leave(self, path: str) -> None:
        """The folder of a try that failed could not be taken away: somebody still writes there."""

    def left(self, home: str) -> list[str]:
        """Those folders in that home, each once: to be taken away again."""
        return []


class Save(NamedTuple):
    """One step of one attempt, all its parts there."""

    step: int
    attempt: int
    parts: tuple[Part, ...]
    about: dict[str, Any]
    """data_index, plan_hash, seed, code_hash and meta of the manifest."""
    end_ns: int
    """Deadline, boot time."""
    others: Others = Others()


class Gate:
    """Open until somebody gives the save up, or its thread goes through to publish; whoever is first, decides."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = "open"

    def shut(self) -> bool:
        """Give the save up. False: too late, it is being published."""
        with self._lock:
            if self._state == "open":
                self._state = "shut"
            return self._state == "shut"

    def go_through(self) -> bool:
        """Enter to publish. False: the save has been given up."""
        with self._lock:
            if self._state == "open":
                self._state = "through"
            return self._state == "through"

    @property
    def is_shut(self) -> bool:
        return self._state == "shut"

    @property
    def is_passed(self) -> bool:
        return self._state == "through"


def carry(
    platform: Platform, log: CommitLog, run_folder: str, save: Save, gate: Gate, homes: Homes | None = None,
    told: Callable[[SaveFellBack], None] = lambda warning: None,
) -> Commit:
    """Write the parts, publish them. Raises CommitStale: stop; SaveFailed with the last obstacle at the deadline, and
    where a later step of this attempt was published first: saves of several nodes become whole in any order.

    `homes`: tried in order, the run folder first; without them it is the only one. `told` hears when another one was
    needed.
    """
    specs = check_parts(save)
    written = _written(platform, homes or Homes(platform, [run_folder]), save, specs, gate)
    if not gate.go_through():
        discard_try(platform, f"{written.home}/checkpoints/{written.folder}")
        raise _failed(save, run_folder, "the disk was too slow")
    commit = _published(platform, log, run_folder, save, written)
    if commit.place and commit.folder == written.folder:
        told(_fell_back(save, run_folder, written))
    return commit


def _published(platform: Platform, log: CommitLog, run_folder: str, save: Save, written: _Written) -> Commit:
    """Try until the deadline. Once a link was tried it may be published, whatever is heard: then the folder stays.

    What the carrier before this one published without living to say so is published: the state of a step of an attempt
    is one. What it published meanwhile of a later step is not known before (the carrier looks at what it knows), and
    is no newer attempt.
    """
    place = "" if written.home == run_folder else written.home
    pause, links = _Pause(platform, save.end_ns), log.links_tried
    try:
        while True:
            try:
                return log.publish(save.attempt, save.step, written.digest, written.folder, place)
            except CommitUnknown as error:
                if not pause.wait():
                    raise _failed(save, run_folder, f"written but not confirmed as published: {error.what}") from error
    except (CommitStale, SaveFailed) as error:
        if log.links_tried == links:
            discard_try(platform, f"{written.home}/checkpoints/{written.folder}")
        saves = _saves_of(log, save.attempt) if isinstance(error, CommitStale) else []
        same = next((one for one in saves if one.step == save.step), None)
        if same is not None:
            return same
        if saves and saves[0].step > save.step:
            raise overtaken(save.step, saves[0].step, run_folder) from error
        raise


def overtaken(step: int, later: int, run_folder: str) -> SaveFailed:
    return SaveFailed(
        f"step {step} was not published: step {later} was, before all of it had come", where=run_folder,
        fix="nothing: the later one holds more",
    )


def _saves_of(log: CommitLog, attempt: int) -> list[Commit]:
    """What this attempt published, the newest first; nothing where another record followed."""
    with suppress(CommitUnknown):
        own = itertools.takewhile(lambda one: (one.kind, one.attempt) == ("save", attempt), log.follow(log.head()))
        return list(own)
    return []


def check_parts(save: Save) -> list[TensorSpec]:
    """The tensor table, once every box of every part fits it and they tile it. Raises SaveFailed."""
    specs: dict[str, TensorSpec] = {}
    for spec in (spec for part in save.parts for spec in part.specs):
        if specs.setdefault(spec.name, spec) != spec:
            raise _refused(save, f"tensor {spec.name} is not the same tensor for every writer")
    boxes: dict[str, list[fmt.Box]] = {name: [] for name in specs}
    try:
        fmt.check_manifest(_manifest(save, list(specs.values()), []), f"step {save.step}")
        for part in save.parts:
            for placed in part.boxes:
                fmt.check_placed(placed, specs.get(placed.tensor), part.bytes, f"part {part.writer}")
                boxes[placed.tensor].append(placed.box)
        for name, spec in specs.items():
            fmt.check_tiling(spec, boxes[name], f"step {save.step}")
    except CheckpointDamaged as error:
        raise _refused(save, error.what) from error
    return list(specs.values())


class _Written(NamedTuple):
    """All of a save, durable in one folder."""

    home: str
    folder: str
    digest: str
    obstacles: tuple[str, ...]
    """Why the homes before would not take it."""


def _written(platform: Platform, homes: Homes, save: Save, specs: list[TensorSpec], gate: Gate) -> _Written:
    """Try one home after the other. All but the last get a few tries and half of the time that is left.

    One that hangs is left with the thread in it, so the next has what is left of the time, too.
    """
    usable = homes.usable()
    hung = [home for home in homes.paths if home not in usable]
    obstacles = [f"{home}: it hangs, so it is left alone until it answers" for home in hung]
    for home in usable:
        is_last = home == usable[-1]
        rank, now_ns = homes.paths.index(home), platform.boot_ns()
        end_ns = save.end_ns if is_last else now_ns + max(0, save.end_ns - now_ns) // 2
        write = partial(_written_in, platform, home, save, specs, gate, rank, end_ns, 0 if is_last else HOME_TRIES)
        try:
            folder, digest = homes.within(home, write, end_ns, partial(_discard, platform, home))
            return _Written(home, folder, digest, tuple(obstacles))
        except (_HomeFailed, Hangs) as error:
            obstacle = "the disk hangs" if isinstance(error, Hangs) else str(error)
            obstacles.append(obstacle if len(homes.paths) == 1 else f"{home}: {obstacle}")
    raise _failed(save, homes.paths[0], "; ".join(obstacles))


def _discard(platform: Platform, home: str, written: tuple[str, str]) -> None:
    """What a thread wrote that came back when nobody waited for it any more."""
    discard_try(platform, f"{home}/checkpoints/{written[0]}")


def _written_in(
    platform: Platform, home: str, save: Save, specs: list[TensorSpec], gate: Gate, rank: int, end_ns: int,
    tries_max: int,
) -> tuple[str, str]:
    """Try until all is durable in one folder there: its name, and the digest of its manifest. Raises _HomeFailed.

    Names of tries do not repeat from one home to the next: what is left of one must not pass for another.
    """
    pause = _Pause(platform, end_ns)

    def check() -> None:
        if gate.is_shut or platform.boot_ns() >= end_ns:
            raise OutOfTime

    obstacle, trial = "the disk was too slow", 0
    while True:
        trial += 1
        try:
            if rank:
                _open_home(platform, home)
            return _write_try(platform, home, save, specs, _Try(rank, trial, end_ns), check)
        except OSError as error:
            obstacle = obstacle_of(error)
        except OutOfTime:
            raise _HomeFailed(obstacle) from None
        if gate.is_shut or trial == tries_max or not pause.wait():
            raise _HomeFailed(obstacle)


def _open_home(platform: Platform, home: str) -> None:
    """The folder it lies in is never made here: where that is missing, a disk is not mounted.

    A path that no record may name takes no save: nobody could read it.
    """
    if not is_place(home):
        raise _HomeFailed("no record may name this path")
    root = home.rpartition("/")[0] or "/"
    if not platform.is_dir(root):
        raise OSError(errno.ENOENT, "this folder is not there", root)
    platform.mkdir(f"{home}/checkpoints")
    for folder in (home, root):
        platform.fsync_dir(folder)


def _tidy(platform: Platform, home: str, others: Others) -> None:
    """Take away tries that others still wrote into when they failed."""
    for path in others.left(home):
        if not discard_try(platform, path):
            others.leave(path)


class _Try(NamedTuple):
    rank: int
    number: int
    end_ns: int

    @property
    def first_name(self) -> int:
        return self.rank * RANK_TRY + self.number


def _write_try(
    platform: Platform, home: str, save: Save, specs: list[TensorSpec], trial: _Try, check: Callable[[], None]
) -> tuple[str, str]:
    """One try, in a folder of its own. Whatever stops it, the folder goes: the log has never heard of it."""
    checkpoints = f"{home}/checkpoints"
    check()
    _tidy(platform, home, save.others)
    _require_room(platform, checkpoints, sum(part.bytes for part in save.parts))
    folder = new_try(platform, checkpoints, FolderName(save.step, save.attempt, trial.first_name))
    path = f"{checkpoints}/{folder}"
    try:
        save.others.begin(trial.rank, folder, trial.end_ns)
        own = [_write_part(platform, path, part, check) for part in save.parts if part.buffer]
        entries = {entry.writer: entry for entry in (*own, *save.others.parts())}
        manifest = fmt.encode(_manifest(save, specs, [entries[part.writer] for part in save.parts]))
        platform.write_new(f"{path}/{fmt.MANIFEST}", manifest)
        platform.fsync_dir(path)
        platform.fsync_dir(checkpoints)
        check()
    except Exception:
        if not discard_try(platform, path):
            save.others.leave(path)
        raise
    _tidy(platform, home, save.others)
    return folder, fmt.sha256(manifest)


def write_parts(
    platform: Platform, home: str, folder: str, parts: Sequence[Part], check: Callable[[], None]
) -> list[PartEntry]:
    """Parts of this node into the folder of a try that a carrier elsewhere has made; durable when this returns.

    What is left where it fails is not taken away: that folder, and all in it, is the other carrier's.
    """
    path = f"{home}/checkpoints/{folder}"
    entries = [_write_part(platform, path, part, check) for part in parts]
    platform.fsync_dir(path)
    check()
    return entries


def _write_part(platform: Platform, folder: str, part: Part, check: Callable[[], None]) -> PartEntry:
    """The image as it lies in the buffer, and its table."""

    def read(offset: int, chunk: memoryview) -> None:
        _read_chunk(platform, part, offset, chunk)

    poured = pour(platform, read, f"{folder}/{fmt.image_name(part.writer)}", part.bytes, check)
    table = fmt.encode(
        PartTable(
            format=fmt.FORMAT, writer=part.writer, file=fmt.image_name(part.writer), bytes=part.bytes,
            sha256=poured.sha256, block_bytes=fmt.BLOCK_BYTES, crc32c=poured.crcs, boxes=list(part.boxes),
        )
    )
    platform.write_new(f"{folder}/{fmt.table_name(part.writer)}", table)
    return PartEntry(part.writer, part.bytes, poured.sha256, len(table), fmt.sha256(table))


def _read_chunk(platform: Platform, part: Part, offset: int, chunk: memoryview) -> None:
    try:
        found = platform.read_into(part.buffer, offset, chunk)
    except OSError as error:
        raise _BufferLost(f"the buffer cannot be read: {error}") from error
    if found != len(chunk):
        raise _BufferLost(f"the buffer holds {offset + found} bytes of {part.bytes}")


def _manifest(save: Save, specs: list[TensorSpec], parts: list[PartEntry]) -> Manifest:
    return Manifest(step=save.step, attempt=save.attempt, tensors=specs, parts=parts, **save.about)


def new_try(platform: Platform, checkpoints: str, first: FolderName) -> str:
    """The first name from this try's on that nobody has, made here and by nobody else: it may be discarded again.

    A carrier before this one may have used some, or a thread that was given up and wakes late.
    """
    for number in itertools.count(first.trial):
        name = str(first._replace(trial=number))
        try:
            platform.mkdir_new(f"{checkpoints}/{name}")
            break
        except FileExistsError:
            continue
    return name


def _require_room(platform: Platform, checkpoints: str, image_bytes: int) -> None:
    """Do not begin what cannot end: a try that fills the disk takes the room of journal and log, too."""
    free = platform.free_bytes(checkpoints)
    if free < image_bytes + SLACK_BYTES:
        raise OSError(errno.ENOSPC, f"{bytes_text(image_bytes)} to write and {bytes_text(free)} free")


class _Pause:
    """Longer and longer waits between tries, up to the deadline."""

    def __init__(self, platform: Platform, end_ns: int) -> None:
        self._platform = platform
        self._end_ns = end_ns
        self._next_s = RETRY_S_MIN

    def wait(self) -> bool:
        """False when the deadline leaves no time for another try."""
        left_s = (self._end_ns - self._platform.boot_ns()) / NS
        if left_s <= self._next_s:
            return False
        self._platform.sleep(self._next_s)
        self._next_s = min(self._next_s * 2, RETRY_S_MAX)
        return True


# --- errors ------------------------------------------------------------------------------------------


class OutOfTime(Exception):
    """The deadline passed, or the save was given up."""


class _HomeFailed(Exception):
    """One home would not take a save; says why."""


class _BufferLost(SaveFailed):
    """What was offered is not there: another try would not find it either."""

    def __init__(self, what: str) -> None:
        super().__init__(what, where="buffer", fix="the next save uses a new one; see whether the worker still runs")


def obstacle_of(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error.strerror})"
    return str(error)


def _failed(save: Save, run_folder: str, obstacle: str) -> SaveFailed:
    return SaveFailed(
        f"step {save.step} was not published by its deadline: {obstacle}", where=f"{run_folder}/checkpoints",
        fix="free space there, or lower checkpoint.keep_last; where it hangs, see why; training goes on and the next "
        "save is tried as usual",
    )


def _refused(save: Save, what: str) -> SaveFailed:
    return SaveFailed(
        f"step {save.step} cannot become a checkpoint: {what}", where="what its writers offered",
        fix="each element of each tensor belongs to exactly one writer's box; see how the program cuts its state",
    )


def _fell_back(save: Save, run_folder: str, written: _Written) -> SaveFellBack:
    return SaveFellBack(
        f"step {save.step} is published, but lies on another disk: {'; '.join(written.obstacles)}",
        where=f"{written.home}/checkpoints/{written.folder}",
        fix=f"free space in {run_folder}/checkpoints, or mend that disk; later saves try it first",
    )
