"""Mends a published checkpoint where it lies: what is bad is fetched from other places that have it, and nothing else.

A published file is never written to. A mended one is made beside it, an image out of the blocks that are good here and
of those fetched; each block is checked against the part table, the whole against its SHA-256, and only then, durable,
it takes the name. Images come first, tables next, the manifest last, and that only where all else is whole: so a
checkpoint whose files had gone is none until it is whole, and whatever ends a repair, nothing is worse than before.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.blocks import as_damaged
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.format import Manifest, PartEntry, PartTable, TensorSpec
from packtrain.checkpoint.pour import pour
from packtrain.checkpoint.reader import TABLE_BYTES_MAX, Damage, manifest_of, table_of, touched
from packtrain.checkpoint.retention import purging_name, tombstone_name
from packtrain.checkpoint.where import reachable_folder
from packtrain.core.bulk import Crew
from packtrain.core.errors import (
    CheckpointDamaged,
    CheckpointGone,
    FormatUnknown,
    NameAbsent,
    PacktrainError,
    RunUnusable,
    StoreRefused,
    StoreUnreachable,
)
from packtrain.core.holder import hold
from packtrain.core.platform import Platform
from packtrain.core.stores import TEMP, Store
from packtrain.core.transfer import Throttle

AHEAD, READERS = 8, 4
"""Blocks asked for before they are needed, and by how many threads."""
AWAY = 3
"""Times in a row that a place may not answer before it is asked no more."""
T = TypeVar("T")
Told = Callable[[str, int, int], None]
"""(what is done, bytes of it so far, bytes of all)."""


@dataclass
class Outcome:
    """What a repair came to."""

    damage: list[Damage] = field(default_factory=list)
    """One for each file that was bad."""
    left: list[Damage] = field(default_factory=list)
    """Of these, what stays as it was; `what` says why."""
    bytes_fetched: int = 0


class Places:
    """Other places that may have what is bad here, in the order in which they are asked. Safe from several threads."""

    def __init__(self, platform: Platform, stores: Sequence[Store], bytes_per_s_max: float = math.inf) -> None:
        self.fetched: dict[str, int] = {}
        """Bytes that were read there, by url: what turned out bad included."""
        self.refused: dict[str, PacktrainError] = {}
        """By url, what kept a place from giving something, the last time."""
        self._stores = stores
        self._silent = {store.url: 0 for store in stores}
        self._throttle = Throttle(platform, lambda: bytes_per_s_max, lambda: None)
        self._lock = threading.Lock()

    @property
    def bytes_fetched(self) -> int:
        return sum(self.fetched.values())

    def fetch(self, name: str, offset: int, size: int, is_good: Callable[[bytes], bool]) -> bytes | None:
        """Bytes of the first place that has them as they should be; None: no place has. `size` -1: up to the end."""
        for store in self._stores:
            if self._silent[store.url] >= AWAY:
                continue
            try:
                data = self._read(store, name, offset, size)
            except (NameAbsent, StoreRefused, StoreUnreachable) as error:
                self._note(store, error)
                continue
            if is_good(data):
                return data
            where = f"{store.url} {name}"
            self._note(store, as_damaged(f"bytes {offset}..{offset + len(data)} are damaged there, too", where))
        return None

    def _read(self, store: Store, name: str, offset: int, size: int) -> bytes:
        size = min(store.size(name), TABLE_BYTES_MAX) if size < 0 else size
        self._throttle.take(size)
        data = store.read(name, offset, size)
        with self._lock:
            self._silent[store.url] = 0
            self.fetched[store.url] = self.fetched.get(store.url, 0) + len(data)
        return data

    def _note(self, store: Store, error: PacktrainError) -> None:
        with self._lock:
            self.refused[store.url] = error
            self._silent[store.url] += isinstance(error, StoreRefused | StoreUnreachable)


def repair(
    platform: Platform, run_folder: str, commit: Commit, places: Places,
    told: Told = lambda stage, done, total: None,
) -> Outcome:
    """Verify every block of what `commit` published, and mend what is bad from `places`.

    What they cannot give is in `Outcome.left`, and the rest is mended all the same. A file that the disk refuses to
    read counts as bad. Raises CheckpointGone where retention took the checkpoint or is about to, RunHeld where
    somebody else repairs this run, RunUnusable where the disk refuses to be written. Called again it goes on.
    """
    try:
        lock = hold(platform, run_folder, "packtrain ckpt repair", "let that repair end", "repairing")
        try:
            _refuse_purged(platform, run_folder, commit)
            return _Repair(platform, run_folder, commit, places, told).run()
        finally:
            lock.release()
    except OSError as error:
        raise RunUnusable(
            f"what is mended cannot be written: {error.strerror or error}", where=str(error.filename or run_folder),
            fix="free space there or mend its permissions; then the same command goes on from what is mended",
        ) from error


def _refuse_purged(platform: Platform, run_folder: str, commit: Commit) -> None:
    """What retention takes must not come back to life under its hands."""
    stones = f"{run_folder}/tombstones"
    going = platform.exists(f"{stones}/{purging_name(commit.folder)}")
    marked = platform.exists(f"{stones}/{tombstone_name(commit.folder)}")
    if going or (marked and not platform.is_dir(reachable_folder(platform, run_folder, commit))):
        raise CheckpointGone(
            "retention took this checkpoint, or is about to", where=f"{run_folder}/checkpoints/{commit.folder}",
            fix="packtrain ckpt ls RUN shows those that stay",
        )


class _Missing(Exception):
    """No place has a block of what is mended."""


class _Repair:
    """One checkpoint. Small files are fetched first, because they tell what is bad, and written last."""

    def __init__(self, platform: Platform, run_folder: str, commit: Commit, places: Places, told: Told) -> None:
        self._platform, self._commit, self._places, self._told = platform, commit, places, told
        self._folder = reachable_folder(platform, run_folder, commit)
        self._name = f"checkpoints/{commit.folder}"
        self._outcome = Outcome()
        self._small: list[tuple[str, bytes]] = []
        """Fetched, to be written: the manifest first, if it is among them."""
        self._done = {"checking": 0, "mending": 0}
        self._total = {"checking": 0, "mending": 0}
        """Bytes."""

    def run(self) -> Outcome:
        before = self._places.bytes_fetched
        manifest = self._manifest()
        if manifest is not None:
            specs = {spec.name: spec for spec in manifest.tensors}
            self._total["checking"] = sum(entry.bytes for entry in manifest.parts)
            for entry in manifest.parts:
                table = self._table(entry, specs)
                if table is not None:
                    self._image(table)
        for file, data in reversed(self._small):
            self._write_small(file, data)
        if self._platform.is_dir(self._folder):
            self._settle()
        self._outcome.bytes_fetched = self._places.bytes_fetched - before
        return self._outcome

    # --- small files ---

    def _manifest(self) -> Manifest | None:
        def parsed(data: bytes) -> Manifest:
            return manifest_of(data, self._commit, f"{self._folder}/{fmt.MANIFEST}")

        return self._small_file(fmt.MANIFEST, -1, parsed)

    def _table(self, entry: PartEntry, specs: dict[str, TensorSpec]) -> PartTable | None:
        file = fmt.table_name(entry.writer)

        def parsed(data: bytes) -> PartTable:
            return table_of(data, entry, specs, f"{self._folder}/{file}")

        return self._small_file(file, entry.table_bytes, parsed)

    def _small_file(self, file: str, size: int, parsed: Callable[[bytes], T]) -> T | None:
        """What the file says: the one here, or that of a place, which is then to be written. None: nobody has it."""
        try:
            return parsed(self._platform.read(f"{self._folder}/{file}", 0, TABLE_BYTES_MAX))
        except CheckpointDamaged as error:
            bad = Damage(file, ("*",), error.what)
        except OSError as error:
            bad = Damage(file, ("*",), _refusal(error))
        self._outcome.damage.append(bad)
        data = self._places.fetch(f"{self._name}/{file}", 0, size, partial(_parses, parsed))
        if data is None:
            self._outcome.left.append(bad)
            return None
        self._small.append((file, data))
        return parsed(data)

    def _write_small(self, file: str, data: bytes) -> None:
        """A manifest makes a checkpoint: it is not written beside what is not whole."""
        if file == fmt.MANIFEST and self._outcome.left:
            self._outcome.left.append(Damage(file, ("*",), "it was fetched, and waits for the others to be mended"))
            return
        temp = self._temp(file)
        try:
            self._platform.write_new(temp, data)
            self._put(temp, file)
        finally:
            self._discard(temp)

    # --- images ---

    def _image(self, table: PartTable) -> None:
        bad, what = self._judged(table)
        if not what:
            return
        blocks = bad if len(bad) < len(table.crc32c) else [None]
        names = tuple(dict.fromkeys(name for index in blocks for name in touched(table, index)))
        self._outcome.damage.append(Damage(table.file, names, what))
        if not self._mended(table, bad):
            self._outcome.left.append(Damage(table.file, names, what))

    def _judged(self, table: PartTable) -> tuple[list[int], str]:
        """Blocks that must be fetched, and what is wrong in words, "" where nothing is."""
        path = f"{self._folder}/{table.file}"
        try:
            size = self._platform.size(path)
        except OSError as error:
            self._tell("checking", table.bytes)
            return list(range(len(table.crc32c))), _refusal(error)
        digest, bad = hashlib.sha256(), []
        with self._platform.crew(READERS) as crew:
            loads = (partial(self._here, table, index) for index in range(len(table.crc32c)))
            for index, block in enumerate(_in_order(crew, loads)):
                digest.update(block or b"")
                bad += [] if block is not None else [index]
                self._tell("checking", _block_size(table, index))
        if bad:
            start = bad[0] * table.block_bytes
            first = f"bytes {start}..{start + _block_size(table, bad[0])}"
            return bad, f"{len(bad)} of {len(table.crc32c)} blocks cannot be used, the first is {first}"
        if size != table.bytes:
            return [], f"{size} bytes long, not {table.bytes}"
        if digest.hexdigest() != table.sha256:
            return list(range(len(table.crc32c))), "SHA-256 differs although every block's crc32c agrees"
        return [], ""

    def _mended(self, table: PartTable, bad: Sequence[int]) -> bool:
        """Whether a whole image has the name now. Where the blocks that are fetched do not make it whole, one of the
        others is not what its crc32c says, and all are fetched."""
        temp = self._temp(table.file)
        for chosen in dict.fromkeys((frozenset(bad), frozenset(range(len(table.crc32c))))):
            try:
                if self._poured(table, chosen, temp) == table.sha256:
                    self._put(temp, table.file)
                    return True
            except _Missing:
                return False
            finally:
                self._discard(temp)
        return False

    def _poured(self, table: PartTable, fetched: frozenset[int], temp: str) -> str:
        """Write the image to `temp`, durable; its SHA-256. Raises _Missing, OSError."""
        self._total["mending"] += table.bytes
        with self._platform.crew(READERS) as crew:
            loads = (partial(self._block, table, i, i in fetched) for i in range(len(table.crc32c)))
            blocks, rest = _in_order(crew, loads), memoryview(b"")

            def read(offset: int, chunk: memoryview) -> None:
                nonlocal rest
                at = 0
                while at < len(chunk):
                    rest = rest or memoryview(next(blocks))
                    n = min(len(rest), len(chunk) - at)
                    chunk[at : at + n], rest, at = rest[:n], rest[n:], at + n
                self._tell("mending", len(chunk))

            return pour(self._platform, read, temp, table.bytes, lambda: None).sha256

    def _block(self, table: PartTable, index: int, fetched: bool) -> bytes:
        """One good block, from here where it need not be fetched. Raises _Missing."""
        block = None if fetched else self._here(table, index)
        if block is None:
            start, size = index * table.block_bytes, _block_size(table, index)
            block = self._places.fetch(f"{self._name}/{table.file}", start, size, partial(_fits, table, index))
        if block is None:
            raise _Missing
        return block

    def _here(self, table: PartTable, index: int) -> bytes | None:
        """None where it is not what was published, or the disk refuses to read it."""
        start, size = index * table.block_bytes, _block_size(table, index)
        try:
            block = self._platform.read(f"{self._folder}/{table.file}", start, size)
        except OSError:
            return None
        return block if _fits(table, index, block) else None

    # --- names ---

    def _temp(self, file: str) -> str:
        """Where a file is mended, in a folder that is there; what a killed repair left under that name goes."""
        self._platform.mkdir(self._folder)
        temp = f"{self._folder}/{TEMP}repair-{file}"
        self._discard(temp)
        return temp

    def _put(self, temp: str, file: str) -> None:
        self._platform.replace(temp, f"{self._folder}/{file}")
        self._settle()

    def _settle(self) -> None:
        """Names that are found or given here outlive a power cut: a repair before this one may have been killed."""
        folder = self._folder
        for _ in range(3):
            self._platform.fsync_dir(folder)
            folder = folder.rpartition("/")[0]

    def _discard(self, temp: str) -> None:
        """Nothing where it has taken its name."""
        with suppress(OSError):
            self._platform.unlink(temp)

    def _tell(self, stage: str, n_bytes: int) -> None:
        self._done[stage] += n_bytes
        self._told(f"{stage} step {self._commit.step}", self._done[stage], self._total[stage])


def _in_order(crew: Crew, loads: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each of them returns, in their order, while the next few are under way."""
    coming: deque[Callable[[], T]] = deque()
    for load in loads:
        coming.append(_started(crew, load))
        if len(coming) > AHEAD:
            yield coming.popleft()()
    while coming:
        yield coming.popleft()()


def _started(crew: Crew, load: Callable[[], T]) -> Callable[[], T]:
    loaded: list[T] = []
    wait = crew.start(lambda: loaded.append(load()))

    def take() -> T:
        wait()
        return loaded[0]

    return take


def _block_size(table: PartTable, index: int) -> int:
    return min(table.block_bytes, table.bytes - index * table.block_bytes)


def _fits(table: PartTable, index: int, block: bytes) -> bool:
    return len(block) == _block_size(table, index) and fmt.crc32c(block) == table.crc32c[index]


def _parses(parsed: Callable[[bytes], object], data: bytes) -> bool:
    try:
        parsed(data)
    except (CheckpointDamaged, FormatUnknown):
        return False
    return True


def _refusal(error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "it is not there"
    return f"the disk refuses to read it: {error.strerror or error}"
