"""A published checkpoint in another store: its parts first, then its manifest, then what makes it readable alone.

The names are those of the run folder, so a folder that holds copies is read like a run's. In this order:
1. the first record of the log, which leads to no checkpoint: from here on the place belongs to this run;
2. the parts, and the manifest as the first thing that makes them a checkpoint;
3. the spec, the copy's own record under COPIED, and the log up to it, record after record.
So a copy that was cut short has no manifest, or is whole and not yet named; called again, it goes on. Every byte is
verified there. Which copy counts is not decided here.

The place may be promoted while a copy is under way, and its log then goes on otherwise. So a record that is whole is
never replaced, whatever was seen before: new ones are created exclusively, and only what is no record is mended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import DIGITS, RECORD_BYTES_MAX, Commit, CommitLog, parse_record
from packtrain.checkpoint.reader import COPIED, open_checkpoint
from packtrain.checkpoint.where import home_of
from packtrain.core.errors import CheckpointDamaged, NameAbsent, NameTaken
from packtrain.core.platform import Platform
from packtrain.core.stores import Folder, Store
from packtrain.core.transfer import Item, Progress, Rate, Tally, TransferConfig, copy, unlimited
from packtrain.core.units import NS


def send(
    platform: Platform, run_folder: str, commit: Commit, target: Store, config: TransferConfig | None = None, *,
    rate: Rate = unlimited, stop: threading.Event | None = None, progress: Callable[[Progress], None] | None = None,
) -> Tally:
    """Copy what `commit` published into `target`. Called again, it keeps what is good there and mends what is not.

    Raises NameTaken where the place has another run's log, or another checkpoint under that name, CheckpointDamaged and
    TransferDamaged where this one is not whole, and whatever `transfer.copy` and the stores raise.
    """
    source, home = Folder(platform, run_folder), Folder(platform, home_of(platform, run_folder, commit))
    parts = part_items(platform, run_folder, commit)
    manifest = _small(home, f"checkpoints/{commit.folder}/{fmt.MANIFEST}", commit.digest)
    records = log_items(source, commit)
    work = _Sending(platform, source, target, config or TransferConfig(), rate, stop)
    _refuse_another(target, manifest.item.target, commit)
    _same_log(source, target, records)
    work.place_record(records[0])
    work.source = home
    # What lies there under these names is this checkpoint's, or was never part of a whole one: it may be replaced.
    work.bring(parts, progress)
    _refuse_another(target, manifest.item.target, commit)
    work.place(manifest, lambda: _refuse_another(target, manifest.item.target, commit))
    work.source = source
    known = _same_log(source, target, records)
    work.bring([Item(name, name) for name, _ in source.list_all("spec") if name.endswith(".toml")])
    work.place_record(records[-1].under(COPIED))
    work.keep(records[1:known])
    for record in records[max(1, known) :]:
        work.place_record(record)
    return work.tally


_COUNTS = (
    "bytes_total", "bytes_sent", "bytes_kept", "bytes_checked", "chunks_read_again", "chunks_sent_again", "items_kept",
)


class _Small(NamedTuple):
    """A small file of the run folder, read and known to be right."""

    item: Item
    data: bytes

    def under(self, folder: str) -> _Small:
        """The same content in another folder of the target."""
        return self._replace(item=self.item._replace(target=f"{folder}/{self.item.target.rpartition('/')[2]}"))


class _Sending:
    """Copies of one call: they share its deadline and are counted together."""

    def __init__(
        self, platform: Platform, source: Store, target: Store, config: TransferConfig, rate: Rate,
        stop: threading.Event | None,
    ) -> None:
        self.tally = Tally()
        self.source = source
        """What lies in the run folder, or where the save fell back to."""
        self._platform, self._target = platform, target
        self._config, self._rate, self._stop = config, rate, stop
        self._began_ns = platform.boot_ns()

    def bring(self, items: Sequence[Item], progress: Callable[[Progress], None] | None = None) -> None:
        """What is there under these names is replaced where it is not the same."""
        self._add(self._copy(items, True, progress))

    def keep(self, records: Sequence[_Small]) -> None:
        """Records that are there, read back; one that is damaged is mended."""
        try:
            self._add(self._copy([record.item for record in records], replace=False))
        except NameTaken:
            for record in records:
                self.place_record(record)

    def place_record(self, record: _Small) -> None:
        """Raises NameTaken where another whole record has its name."""
        self.place(record, lambda: _require_same(self._target, record.item.target, record.data))

    def place(self, small: _Small, require_own: Callable[[], object]) -> None:
        """Create it there exclusively; what has its name is replaced if it is not the same, and `require_own` lets it.
        """
        if self._target.exists(small.item.target):
            require_own()
            self.bring([small.item])
            return
        created = self._created(small)
        done = self._copy([small.item], replace=created)
        if created:
            done.add(bytes_sent=done.bytes_kept, bytes_kept=-done.bytes_kept, items_kept=-done.items_kept)
        self._add(done)

    def _created(self, small: _Small) -> bool:
        """False: another came first."""
        try:
            self._target.create(small.item.target, small.data)
        except NameTaken:
            return False
        return True

    def _copy(
        self, items: Sequence[Item], replace: bool, progress: Callable[[Progress], None] | None = None
    ) -> Tally:
        passed_s = (self._platform.boot_ns() - self._began_ns) / NS
        config = msgspec.structs.replace(self._config, deadline_s=max(0.0, self._config.deadline_s - passed_s))
        return copy(
            self._platform, self.source, self._target, items, config, rate=self._rate, stop=self._stop,
            progress=progress, replace=replace,
        )

    def _add(self, done: Tally) -> None:
        self.tally.add(**{field: getattr(done, field) for field in _COUNTS})


def part_items(platform: Platform, run_folder: str, commit: Commit) -> list[Item]:
    """All files but the manifest, each with its checksums; the tables were checked against the manifest's digest."""
    checkpoint = open_checkpoint(platform, run_folder, commit)
    source, folder = Folder(platform, home_of(platform, run_folder, commit)), f"checkpoints/{commit.folder}"
    items = []
    for entry, table in zip(checkpoint.manifest.parts, checkpoint.tables, strict=True):
        image = f"{folder}/{table.file}"
        items.append(Item(image, image, table.bytes, 0, tuple(table.crc32c), table.block_bytes))
        items.append(_small(source, f"{folder}/{fmt.table_name(entry.writer)}", entry.table_sha256).item)
    return items


def stored_items(store: Store, commit: Commit) -> list[Item]:
    """All files of a copy in `store`, the manifest last, each with its checksums. Raises NameAbsent where it is not
    there, CheckpointDamaged where manifest or tables are not those that `commit` published, FormatUnknown."""
    folder, found = f"checkpoints/{commit.folder}", list[Item]()
    manifest = _small(store, f"{folder}/{fmt.MANIFEST}", commit.digest)
    said = fmt.decode(manifest.data, fmt.Manifest, f"{store.url} {manifest.item.source}")
    for entry in said.parts:
        table = _small(store, f"{folder}/{fmt.table_name(entry.writer)}", entry.table_sha256)
        part = fmt.decode(table.data, fmt.PartTable, f"{store.url} {table.item.source}")
        image = f"{folder}/{fmt.image_name(entry.writer)}"
        found += [Item(image, image, part.bytes, 0, tuple(part.crc32c), part.block_bytes), table.item]
    return [*found, manifest.item]


def log_items(source: Store, commit: Commit) -> list[_Small]:
    """The records of the log up to that of `commit`, number 1 first. Raises CheckpointDamaged where one is none."""
    records = [_small(source, f"commits/{number:0{DIGITS}d}") for number in range(1, commit.number + 1)]
    for number, (item, data) in enumerate(records, 1):
        found = parse_record(data)
        if found is None or found.number != number or (number == commit.number and found != commit):
            raise _changed(source, item.source)
    return records


def _small(source: Store, name: str, sha256: str = "") -> _Small:
    """A small file, with the checksums of its bytes. Raises CheckpointDamaged where its SHA-256 is known and differs.
    """
    data = source.read(name, 0, source.size(name))
    if sha256 and fmt.sha256(data) != sha256:
        raise _changed(source, name)
    blocks = range(0, len(data), fmt.BLOCK_BYTES)
    sums = tuple(fmt.crc32c(data[at : at + fmt.BLOCK_BYTES]) for at in blocks)
    return _Small(Item(name, name, len(data), 0, sums, fmt.BLOCK_BYTES), data)


def _changed(source: Store, name: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{name} is not what was published", where=source.url, fix=fmt.DAMAGED_FIX)


def _same_log(source: Store, target: Store, records: Sequence[_Small]) -> int:
    """How many of the records the place has without a hole. Raises NameTaken where its log is another run's, or went on
    otherwise.

    A record belongs to one history alone (its nonce is random), so the last one that both have speaks for all before.
    Behind a hole each speaks for itself.
    """
    there = {name for name, _ in target.list_all("commits") if _is_record(name)}
    known = next((n for n, record in enumerate(records) if record.item.target not in there), len(records))
    for item, data in reversed(records[:known]):
        if _require_same(target, item.target, data):
            break
    if known < len(records):
        for name in sorted(there - {record.item.target for record in records[:known]}):
            _require_same(target, name, source.read(name, 0, RECORD_BYTES_MAX) if source.exists(name) else b"")
    return known


def goes_on_to(platform: Platform, run_folder: str, place: Store) -> tuple[int, int] | None:
    """(last record here, last record there) where a place of copies has records that the run's own log lost; else None.

    The place is looked at first: whatever was copied there has been in the log here by then.
    """
    names = [name for name, _ in place.list_all(COPIED)]
    copied = max((int(name.rpartition("/")[2]) for name in names if name[-DIGITS:].isdecimal()), default=0)
    head = CommitLog(platform, f"{run_folder}/commits").head()
    last = f"commits/{head:0{DIGITS}d}"
    if not 0 < head < copied or not place.exists(last):
        return None
    same = place.read(last, 0, RECORD_BYTES_MAX) == Folder(platform, run_folder).read(last, 0, RECORD_BYTES_MAX)
    return (head, copied) if same else None


def _is_record(name: str) -> bool:
    folder, _, number = name.rpartition("/")
    return folder == "commits" and len(number) == DIGITS and number.isdecimal()


def _require_same(target: Store, name: str, data: bytes) -> bool:
    """Whether the record there is this one; False: it is damaged, and may be mended. Raises NameTaken for another."""
    there = target.read(name, 0, RECORD_BYTES_MAX)
    if there != data and parse_record(there) is not None:
        raise NameTaken(
            "another run has its log there, or this run's was gone on with there", where=f"{target.url} {name}",
            fix="copy to another place: two runs must not share one",
        )
    return there == data


def _refuse_another(target: Store, manifest: str, commit: Commit) -> None:
    """Where a manifest is there already it is this checkpoint's, or damaged beyond reading as any."""
    try:
        there = target.read(manifest, 0, target.size(manifest))
    except NameAbsent:
        return
    if fmt.sha256(there) == commit.digest or not _is_manifest(there):
        return
    raise NameTaken(
        "another checkpoint is published there under the same name", where=f"{target.url} {manifest}",
        fix="copy to another place: two runs must not share one",
    )


def _is_manifest(data: bytes) -> bool:
    try:
        fmt.decode(data, fmt.Manifest, fmt.MANIFEST)
    except CheckpointDamaged:
        return False
    return True
