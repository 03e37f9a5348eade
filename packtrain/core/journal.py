"""The journal: append-only files of typed records, one file per writer incarnation (DESIGN.md section 3, "Journal").

`<role><rank>-<node>-<boot>-<n>.<segment>.jsonl`; each line is

    { "seq":7,"boot":"1f0c2d3e","ns":123,"record":{"kind":...},"crc":"0a1b2c3d"}

where crc is the crc32c of every byte before `,"crc":`. The blank after the brace is what marks the start of a line: the
encoder never writes one inside a record and escapes quotes inside strings, so no content can pass for a line.

The writer never raises for a sick disk: it keeps what it can hold, counts the rest, and says so in the journal when the
disk is back. The reader skips nothing in silence: bytes are a record or they are `Damage`. Times are nanoseconds since
boot; `wall_s` is a date for people. Merging is for reports; nothing is *decided* from a merge.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import msgspec

from packtrain.core.platform import File, Platform
from packtrain.core.records import AnyRecord, MemorySaved, Record, RecordsLost, SegmentBegan, StepDone
from packtrain.core.units import MIB, NS

SEGMENT_BYTES = 16 * MIB
HELD_BYTES_MAX = 1 * MIB
"""What a writer keeps in memory while its disk is away; records beyond it are lost and counted."""
METRICS_NS = NS
"""A metrics record is flushed by the first write that comes this long after the last flush."""
RETRY_NS = NS
"""While the disk is away only a durable record, `flush` or this much time makes the writer try again."""
METRICS = (StepDone, MemorySaved)
CLAIMS_MAX = 1000
"""Incarnation numbers tried in a row before the folder is taken for broken."""

TORN_TAIL = "torn_tail"
DAMAGED = "damaged"
MISSING = "missing"
REPEATED = "repeated"
UNREADABLE = "unreadable"
FOREIGN = "foreign"

_START = b'{ "seq":'
_END = re.compile(rb',"crc":"([0-9a-f]{8})"\}')
_NAME = re.compile(r"(?P<writer>[a-z_]+\d+-[^-/]+-[0-9a-f]+-(?P<n>\d+))\.(?P<segment>\d+)\.jsonl")

_decode_record = msgspec.json.Decoder(AnyRecord, strict=False).decode


class _Line(msgspec.Struct, frozen=True):
    seq: int
    boot: str
    ns: int
    record: msgspec.Raw


_decode_line = msgspec.json.Decoder(_Line).decode


@dataclass(frozen=True, slots=True)
class Unknown:
    """A whole record this version cannot type: a kind, or a field's value, from a newer one."""

    kind: str
    body: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One record as read. `ns`: nanoseconds since boot `boot`; `wall_s`: a date for people, None when unknown."""

    record: AnyRecord | Unknown
    writer: str
    boot: str
    ns: int
    sequence: int
    wall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `[offset, offset + length)` of `file` that gave no record. `reason`: one of the constants above."""

    file: str
    offset: int
    length: int
    reason: str
    detail: str = ""

    @property
    def alarming(self) -> bool:
        """A torn tail is what a killed writer leaves; anything else means the disk or a program did harm."""
        return self.reason != TORN_TAIL


@dataclass(frozen=True, slots=True)
class Reading:
    """Entries in the order a report tells them (each writer's own order kept), and all that was not a record."""

    entries: list[Entry]
    damage: list[Damage]


def writer_of(file: str) -> str:
    """The writer incarnation that a segment is of, `<role><rank>-<node>-<boot>-<n>`; empty: it is no segment."""
    match = _NAME.fullmatch(file)
    return match["writer"] if match else ""


def short_boot(boot_id: str) -> str:
    """First 8 hex digits of a boot id: enough to tell the boots of one node apart."""
    return boot_id.replace("-", "")[:8]


# --- writing -----------------------------------------------------------------------------------------


class Journal:
    """One writer incarnation. Used from one thread; never raises OSError (see `trouble` and `lost`).

    Durable records are on disk (fsync) when `write` returns True; others reach the kernel at once, metrics (`METRICS`)
    with the next flush, at most about `METRICS_NS` late while records keep coming.
    """

    def __init__(
        self, platform: Platform, folder: str, role: str = "trainer", rank: int = 0, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.writer = ""
        """Name of this incarnation; empty until the disk first let it make a file."""
        self.lost = 0
        """Records that never reached the disk, over this writer's life."""
        self.trouble: OSError | None = None
        """Why the disk refuses now; None when all is well."""
        self._platform, self._folder, self._segment_bytes = platform, folder, segment_bytes
        self._boot = short_boot(platform.boot_id())
        self._stem = f"{role}{rank}-{platform.node()}-{self._boot}"
        self._file: File | None = None
        self._segment = self._written = self._sequence = self._held_bytes = self._unsaid = 0
        self._held_first = 1
        """Sequence number of the first line held."""
        self._named_on_disk = False
        self._held: list[bytes] = []
        self._flushed_ns = platform.boot_ns()
        self.flush()

    def write(self, record: Record, durable: bool = False, ns: int = 0) -> bool:
        """Append `record`; True when it is where its class promises, False when the disk is away: held or lost. `ns`:
        when it happened, nanoseconds since boot; 0: now."""
        now = self._platform.boot_ns()
        patience_ns = RETRY_NS if self.trouble else METRICS_NS if isinstance(record, METRICS) else 0
        due = durable or now - self._flushed_ns >= patience_ns
        if due and self._full():
            due = self._try_put()
        held = self._hold(record, ns or now)
        return self._try_put(durable) and held if due else self.trouble is None

    def flush(self) -> bool:
        """Hand everything held to the kernel; False when the disk is away."""
        return self._try_put()

    def close(self) -> None:
        """Flush, fsync and end this incarnation; what cannot be written now is counted in `lost`."""
        if self._try_put(durable=bool(self._held)) and self._file is not None:
            try:
                self._seal()
            except OSError as error:
                self.trouble = error
        self.lost += len(self._held)
        self._held.clear()

    def _full(self) -> bool:
        return self.trouble is not None and self._held_bytes > HELD_BYTES_MAX

    def _hold(self, record: Record, now: int) -> bool:
        self._sequence += 1
        if self._full():
            self.lost += 1
            self._unsaid += 1
            return False
        self._append(record, now)
        return True

    def _append(self, record: Record, now: int) -> None:
        if not self._held:
            self._held_first = self._sequence
        line = _line(self._sequence, self._boot, now, record)
        self._held.append(line)
        self._held_bytes += len(line)

    def _try_put(self, durable: bool = False) -> bool:
        self._flushed_ns = self._platform.boot_ns()
        try:
            self._put(durable)
        except OSError as error:
            self.trouble = error
            self._leave_if_torn()
            return False
        self.trouble = None
        return True

    def _put(self, durable: bool) -> None:
        if self._file is not None and self._written and self._written + self._held_bytes > self._segment_bytes:
            self._seal()
        file = self._file or self._begin_segment()
        data = b"".join(self._held) + self._confession()
        if self._written == 0:
            data = self._heading() + data
        if data:
            file.write(data)
        if durable:
            self._sync(file)
        self._written += len(data)
        self._sequence += 1 if self._unsaid else 0
        self._unsaid = self._held_bytes = 0
        self._held.clear()

    def _confession(self) -> bytes:
        """The line that tells how many records before it are lost; it takes its number only once it is written."""
        if not self._unsaid:
            return b""
        lost = RecordsLost(count=self._unsaid, error=str(self.trouble))
        return _line(self._sequence + 1, self._boot, self._platform.boot_ns(), lost)

    def _heading(self) -> bytes:
        now = self._platform.boot_ns()
        began = SegmentBegan(
            first=self._held_first if self._held else self._sequence + 1,
            boot_id=self._platform.boot_id(),
            wall_less_boot_ns=int(self._platform.wall_s() * NS) - now,
        )
        return _line(0, self._boot, now, began)

    def _begin_segment(self) -> File:
        if not self.writer:
            return self._claim()
        self._segment += 1
        return self._adopt(self._platform.create(self._path(self.writer, self._segment)))

    def _claim(self) -> File:
        """Take the next free incarnation number; the exclusive create decides, the listing only saves attempts."""
        self._platform.mkdir(self._folder)
        taken = max((_incarnation(name, self._stem) for name in self._platform.listdir(self._folder)), default=0)
        for n in range(taken + 1, taken + 1 + CLAIMS_MAX):
            writer = f"{self._stem}-{n}"
            try:
                file = self._platform.create(self._path(writer, 1))
            except FileExistsError:
                continue
            self.writer, self._segment = writer, 1
            return self._adopt(file)
        raise OSError(errno.EEXIST, "no free incarnation number", self._folder)

    def _adopt(self, file: File) -> File:
        self._file, self._written, self._named_on_disk = file, 0, False
        return file

    def _path(self, writer: str, segment: int) -> str:
        return os.path.join(self._folder, f"{writer}.{segment:04d}.jsonl")

    def _sync(self, file: File) -> None:
        file.fsync()
        if not self._named_on_disk:
            self._platform.fsync_dir(self._folder)
            self._platform.fsync_dir(os.path.dirname(self._folder) or ".")
            self._named_on_disk = True

    def _seal(self) -> None:
        file, self._file = self._file, None
        assert file is not None
        try:
            self._sync(file)
        finally:
            file.close()

    def _leave_if_torn(self) -> None:
        """After a failed write go on in the same file only where nothing of it arrived; else begin a segment later."""
        if self._file is None:
            return
        try:
            torn = self._platform.size(self._path(self.writer, self._segment)) != self._written
        except OSError:
            torn = True
        if torn:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                self.trouble = error


def _line(sequence: int, boot: str, ns: int, record: Record) -> bytes:
    head = b'{ "seq":%d,"boot":"%s","ns":%d,"record":%s' % (sequence, boot.encode(), ns, _encode(record))
    return b'%s,"crc":"%08x"}\n' % (head, google_crc32c.value(head))


def _encode(record: Record) -> bytes:
    """JSON of a record; NaN and infinity become strings (JSON has none), undecodable text becomes readable."""
    try:
        encoded = msgspec.json.encode(record)
    except UnicodeEncodeError:
        encoded = b"null"
    return msgspec.json.encode(_plain(msgspec.to_builtins(record))) if b"null" in encoded else encoded


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _incarnation(name: str, stem: str) -> int:
    """`n` of a segment of one of `stem`'s incarnations, 0 for any other name."""
    match = _NAME.fullmatch(name)
    return int(match["n"]) if match and match["writer"] == f"{stem}-{match['n']}" else 0


# --- reading -----------------------------------------------------------------------------------------


def read_folder(platform: Platform, folder: str) -> Reading:
    """Everything in a journal folder; a folder that is not there reads as empty.

    Raises OSError only when the folder itself cannot be listed; a file that cannot be read is `Damage`.
    """
    tail = Tail(platform, folder)
    entries = tail.poll(final=True)
    return Reading(entries, tail.damage)


def newest_records(platform: Platform, folder: str, stem: str, bytes_max: int) -> list[tuple[int, AnyRecord | Unknown]]:
    """(ns, record) from the end of a writer's newest incarnation, `bytes_max` at most; `stem`: `<role><rank>-<node>`.

    For who asks why it ended: what is damaged is passed over. Raises OSError.
    """
    found = [m for m in map(_NAME.fullmatch, platform.listdir(folder)) if m and m["writer"].startswith(f"{stem}-")]
    if not found:
        return []
    path = f"{folder}/{max(found, key=lambda m: (int(m['n']), int(m['segment'])))[0]}"
    data = platform.read(path, max(0, platform.size(path) - bytes_max))
    return [(item.line.ns, _typed(item.line.record)) for item in _scan(data) if isinstance(item, _Whole)]


class Tail:
    """Follows a journal folder; `damage` grows as it is found. A poll costs a listing and a stat a writer.

    `begins`: how the names of its writers begin; others are not looked at.
    """

    def __init__(self, platform: Platform, folder: str, begins: str = "") -> None:
        self.damage: list[Damage] = []
        self._platform, self._folder, self._begins = platform, folder, begins
        self._streams: dict[str, _Stream] = {}
        self._offsets: dict[str, int] = {}
        self._finished: set[str] = set()
        self._unreadable: dict[str, str] = {}
        self._wall_less_boot_ns: dict[str, int] = {}

    def poll(self, final: bool = False) -> list[Entry]:
        """Entries of lines completed since the last call, each once; `final`: judge an unfinished last line too.

        Raises OSError when the folder cannot be listed (absent is not an error).
        """
        try:
            names = self._platform.listdir(self._folder)
        except FileNotFoundError:
            return []
        segments, fresh = self._segments([name for name in names if name.startswith(self._begins)]), list[_Found]()
        for i, (writer, segment, name) in enumerate(segments):
            if name not in self._finished:
                sealed = i + 1 < len(segments) and segments[i + 1][0] == writer
                fresh += self._read(writer, segment, name, sealed, final)
        return _merged(fresh, self._wall_less_boot_ns)

    def _segments(self, names: list[str]) -> list[tuple[str, int, str]]:
        found = []
        for name in names:
            match = _NAME.fullmatch(name)
            if match:
                found.append((match["writer"], int(match["segment"]), name))
            elif name not in self._finished:
                self._finished.add(name)
                self.damage.append(Damage(name, 0, 0, FOREIGN, "not the name of a journal file"))
        return sorted(found)

    def _read(self, writer: str, segment: int, name: str, sealed: bool, final: bool) -> list[_Found]:
        path, offset = os.path.join(self._folder, name), self._offsets.get(name, 0)
        try:
            data = self._platform.read(path, offset) if self._platform.size(path) > offset else b""
        except OSError as error:
            self._report_unreadable(name, offset, f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}")
            return []
        whole = data if sealed or final else data[: data.rfind(b"\n") + 1]
        self._offsets[name] = offset + len(whole)
        if sealed:
            self._finished.add(name)
        stream = self._streams.setdefault(writer, _Stream(writer))
        return list(stream.take(name, offset, whole, self.damage, self._wall_less_boot_ns))

    def forget(self, writer: str) -> None:
        """The next poll gives all of its entries again, and tells of its damage as it is then."""
        self._streams.pop(writer, None)
        self.damage[:] = [one for one in self.damage if writer_of(one.file) != writer]
        for name in [name for name in self._offsets | self._unreadable if writer_of(name) == writer]:
            self._offsets.pop(name, None)
            self._unreadable.pop(name, None)
            self._finished.discard(name)

    def _report_unreadable(self, name: str, offset: int, detail: str) -> None:
        """Once for each cause; the next poll tries the file again."""
        if self._unreadable.get(name) != detail:
            self._unreadable[name] = detail
            self.damage.append(Damage(name, offset, 0, UNREADABLE, detail))


@dataclass(frozen=True, slots=True)
class _Found:
    writer: str
    line: _Line
    record: AnyRecord | Unknown
    wall_less_boot_ns: int | None
    """As the heading of its own segment has it; None when that heading is damaged."""


@dataclass(slots=True)
class _Stream:
    """What is known of one writer's sequence: drops what was written twice on purpose, reports what is missing."""

    writer: str
    last: int = 0
    rewritten_from: int | None = None
    hole: bool = False
    """Damage was reported since the last record: it accounts for a jump in the sequence."""
    missing: list[range] = field(default_factory=list)
    """Numbers below `last` not seen yet: a segment may arrive late."""
    wall_less_boot_ns: int | None = None

    def take(
        self, name: str, offset: int, data: bytes, damage: list[Damage], clocks: dict[str, int]
    ) -> Iterator[_Found]:
        """The new records of `data`, which lies at `offset` of file `name`; adds to `damage` and to `clocks`."""
        for item in _scan(data):
            start, length = offset + item.start, item.stop - item.start
            if isinstance(item, _Gap):
                self.hole = True
                damage.append(Damage(name, start, length, item.reason))
                continue
            record = _typed(item.line.record)
            if isinstance(record, SegmentBegan):
                self.rewritten_from = record.first
                self.wall_less_boot_ns = clocks[item.line.boot] = record.wall_less_boot_ns
            elif self._is_new(item.line.seq):
                self._advance(name, start, item.line.seq, record, damage)
                yield _Found(self.writer, item.line, record, self.wall_less_boot_ns)
            elif self.rewritten_from is None or item.line.seq < self.rewritten_from:
                damage.append(Damage(name, start, length, REPEATED, f"record {item.line.seq}"))

    def _is_new(self, seq: int) -> bool:
        return seq > self.last or any(seq in span for span in self.missing)

    def _advance(self, name: str, start: int, seq: int, record: object, damage: list[Damage]) -> None:
        """Note `seq` as seen; report numbers jumped over that neither damage nor a `RecordsLost` accounts for."""
        if seq < self.last:
            self.missing = [part for span in self.missing for part in _without(span, seq)]
            return
        jumped = range(self.last + 1, seq)
        if jumped:
            self.missing.append(jumped)
            said = record.count if isinstance(record, RecordsLost) else 0
            if len(jumped) > said and not self.hole:
                damage.append(Damage(name, start, 0, MISSING, f"records {jumped[0]} to {jumped[-1]}"))
        self.last, self.hole = seq, False


def _without(span: range, seq: int) -> list[range]:
    parts = (range(span.start, seq), range(seq + 1, span.stop)) if seq in span else (span,)
    return [part for part in parts if part]


@dataclass(frozen=True, slots=True)
class _Gap:
    """Bytes [start, stop) that are no record."""

    start: int
    stop: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Whole:
    start: int
    stop: int
    line: _Line


def _scan(data: bytes) -> Iterator[_Whole | _Gap]:
    """Split `data` into whole lines and gaps, in order, covering every byte that is not the newline after a line."""
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        stop = len(data) if end < 0 else end
        whole = _check(data, at, stop)
        if whole is not None:
            yield whole
        else:
            yield from _salvage(data, at, stop, unfinished=end < 0)
        at = stop + 1


def _salvage(data: bytes, at: int, stop: int, unfinished: bool) -> Iterator[_Whole | _Gap]:
    """Whole records inside a damaged line; the bytes between them are gaps."""
    start = data.find(_START, at, stop)
    while start >= 0:
        after = data.find(_START, start + 1, stop)
        whole = _first_whole(data, start, stop if after < 0 else after)
        if whole is not None:
            if whole.start > at:
                yield _Gap(at, whole.start, DAMAGED)
            yield whole
            at = whole.stop
        start = after
    if at < stop:
        yield _Gap(at, stop, TORN_TAIL if unfinished and _torn(data[at:stop]) else DAMAGED)


def _torn(rest: bytes) -> bool:
    """Whether `rest` is what a cut leaves of one line: one start, no end (a power cut may leave NULs after it)."""
    rest = rest.rstrip(b"\0")
    return _START.startswith(rest[: len(_START)]) and rest.count(_START) <= 1 and not _END.search(rest)


def _first_whole(data: bytes, start: int, stop: int) -> _Whole | None:
    for match in _END.finditer(data, start, stop):
        whole = _check(data, start, match.end())
        if whole is not None:
            return whole
    return None


def _check(data: bytes, start: int, stop: int) -> _Whole | None:
    """The line that is exactly data[start:stop], when its crc says so."""
    match = _END.fullmatch(data, stop - 18, stop) if stop - start >= 18 else None
    if match is None or not data.startswith(_START, start):
        return None
    if google_crc32c.value(data[start : match.start()]) != int(match[1], 16):
        return None
    try:
        return _Whole(start, stop, _decode_line(data[start:stop]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _typed(raw: msgspec.Raw) -> AnyRecord | Unknown:
    try:
        record: AnyRecord = _decode_record(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _unknown(raw, str(error))
    return record


def _unknown(raw: msgspec.Raw, reason: str) -> Unknown:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        body = bytes(raw)
    kind = body.get("kind", "") if isinstance(body, dict) else ""
    return Unknown(str(kind), body, reason)


def _merged(found: list[_Found], clocks: dict[str, int]) -> list[Entry]:
    """By wall time, but never against a writer's own order; a boot with no known date keeps its place in the files."""
    keyed: list[tuple[float, Entry]] = []
    latest: dict[str, float] = {}
    for item in found:
        line, offset = item.line, item.wall_less_boot_ns
        offset = clocks.get(line.boot) if offset is None else offset
        wall_s = None if offset is None else (line.ns + offset) / NS
        key = max(latest.get(item.writer, -math.inf), -math.inf if wall_s is None else wall_s)
        latest[item.writer] = key
        keyed.append((key, Entry(item.record, item.writer, line.boot, line.ns, line.seq, wall_s)))
    keyed.sort(key=lambda pair: pair[0])
    return [entry for _, entry in keyed]
