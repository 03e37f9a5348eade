"""The journal's reader under damage: every whole record is read, every other byte is reported."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import google_crc32c
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packtrain.core.fake import FakeDisk, FakePlatform, fail
from packtrain.core.journal import (
    DAMAGED,
    FOREIGN,
    MISSING,
    REPEATED,
    TORN_TAIL,
    UNREADABLE,
    Journal,
    Reading,
    Tail,
    read_folder,
)
from packtrain.core.records import AnyRecord, ErrorSeen, PhaseTotals, SampleDone, TrainingDone

FOLDER = "/run/journal"
WRITER = "trainer0-n-00000000-1"
LINE = b'{ "seq":1,"boot":"00000000","ns":1,"record":{"kind":"training_done","v":1,"step":666,"updates_skipped":0}'
FORGED = b'%s,"crc":"%08x"}' % (LINE, google_crc32c.value(LINE))
"""A line that checks: what log text from outside might contain."""

RECORDS: list[AnyRecord] = [
    TrainingDone(step=1, updates_skipped=0),
    SampleDone(step=2, prompt='{ "seq":', text="\n" + FORGED.decode() + "\n"),
    PhaseTotals(attempt=1, rank=0, ns={"seq": 1, "crc": 7, FORGED.decode(): 2, '{ "seq":': 3}),
    ErrorSeen(severity="warning", name="x", what="\u2028\\\\\\" + FORGED.decode().replace('"', '\\"')),
    TrainingDone(step=5, updates_skipped=0),
]
TEXT = st.one_of(st.text(max_size=20), st.sampled_from([FORGED.decode(), '{ "seq":', ',"crc":"00000000"}', "\n", "\\"]))
ANY_RECORDS = st.lists(
    st.one_of(
        st.builds(TrainingDone, step=st.integers(0, 9), updates_skipped=st.just(0)),
        st.builds(SampleDone, step=st.integers(0, 9), prompt=TEXT, text=TEXT),
        st.builds(PhaseTotals, attempt=st.just(1), rank=st.just(0), ns=st.dictionaries(TEXT, st.integers(0, 9))),
    ),
    max_size=6,
)


def written(records: Iterable[AnyRecord], segment_bytes: int = 1 << 20) -> dict[str, bytes]:
    """The files a writer leaves."""
    platform = FakePlatform(FakeDisk(), "n")
    journal = Journal(platform, FOLDER, segment_bytes=segment_bytes)
    for record in records:
        journal.write(record)
    journal.close()
    return {name: platform.read(f"{FOLDER}/{name}") for name in platform.listdir(FOLDER)}


def read(files: dict[str, bytes]) -> Reading:
    platform = FakePlatform(FakeDisk())
    platform.mkdir(FOLDER)
    for name, data in files.items():
        platform.write_new(f"{FOLDER}/{name}", data)
    return read_folder(platform, FOLDER)


@functools.cache
def one_file() -> tuple[str, bytes, list[tuple[int, int]]]:
    """Name and bytes of a file with RECORDS, and where each record lies (its newline not counted)."""
    ((name, data),) = written(RECORDS).items()
    lines = data.split(b"\n")[:-1]
    starts = [sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
    return name, data, [(start, start + len(line)) for start, line in zip(starts, lines)][1:]


def check(data: bytes, whole: list[int]) -> Reading:
    """Exactly the records numbered `whole` (from 0) are read, and every other byte is reported, newlines aside."""
    name, original, spans = one_file()
    found = read({name: data})
    assert [entry.sequence - 1 for entry in found.entries] == whole
    assert [entry.record for entry in found.entries] == [RECORDS[i] for i in whole]
    heading = (0, spans[0][0] - 1)
    told = [spans[i] for i in whole] + [heading] * data.startswith(original[: heading[1]])
    told += [(damage.offset, damage.offset + damage.length) for damage in found.damage]
    end = 0
    for start, stop in sorted(told):
        assert data[end:start].strip(b"\n") == b"", "bytes passed over in silence"
        end = max(end, stop)
    assert data[end:].strip(b"\n") == b""
    return found


def test_the_whole_file_is_read() -> None:
    """Without damage there is nothing to report, whatever the strings and keys look like."""
    assert not check(one_file()[1], [0, 1, 2, 3, 4]).damage


def test_any_truncation() -> None:
    """Cut at any byte: all records before the cut are read; what is left of one is reported as a torn tail."""
    _, data, spans = one_file()
    for cut in range(len(data)):
        whole = [i for i, (_, stop) in enumerate(spans) if stop <= cut]
        found = check(data[:cut], whole)
        clean = cut in (0, spans[0][0], spans[0][0] - 1, *(stop + newline for _, stop in spans for newline in (0, 1)))
        assert [damage.reason for damage in found.damage] == ([] if clean else [TORN_TAIL]), cut
        assert not any(damage.alarming for damage in found.damage)


def test_any_flipped_byte() -> None:
    """Any byte changed to any of several others, newline among them: the other records are read, the place reported."""
    _, data, spans = one_file()
    for at in range(len(data)):
        hit = [i for i, (start, stop) in enumerate(spans) if start <= at < stop]
        others = (0, data[at] ^ 1, data[at] ^ 32, data[at] ^ 128, ord('"'), ord("{"), ord(" "))
        for value in {ord("\n"), others[at % 7], others[(at + 3) % 7]} - {data[at]}:
            damaged = data[:at] + bytes([value]) + data[at + 1 :]
            found = check(damaged, [i for i in range(5) if i not in hit])
            # A record's first byte turned into a newline is an empty line; what follows it is the damage.
            assert any(d.offset - 1 <= at <= d.offset + d.length for d in found.damage), (at, value)
            assert {damage.reason for damage in found.damage} == {DAMAGED} or at == len(data) - 1


FRAGMENTS = [b"", b"\n", bytes(40), b'{ "seq":', b',"crc":"00000000"}', b'{ "seq":9\n', FORGED[:50]]
EDITS = st.lists(
    st.tuples(st.integers(0, 2500), st.integers(0, 60), st.one_of(st.binary(max_size=60), st.sampled_from(FRAGMENTS))),
    min_size=1, max_size=4,
)


@settings(max_examples=300)
@given(EDITS)
@example([(0, 60, b""), (200, 0, b'{ "seq":')])
def test_any_edits(edits: list[tuple[int, int, bytes]]) -> None:
    """Ranges overwritten, cut out or put in: a record no edit touches is read, what is read is what was written."""
    name, data, spans = one_file()
    whole, limit = set(range(5)), len(data)
    for start, length, new in sorted(edits, key=lambda edit: -edit[0]):
        start = min(start, limit)
        stop = min(start + length, limit)
        data, limit = data[:start] + new + data[stop:], start
        whole -= {i for i, span in enumerate(spans) if start < span[1] and span[0] < stop}
    found = read({name: data})
    got = {entry.sequence - 1 for entry in found.entries}
    assert whole <= got
    assert all(entry.record == RECORDS[entry.sequence - 1] for entry in found.entries)
    assert len(got) == 5 or found.damage


@given(st.lists(ANY_RECORDS, min_size=1, max_size=4), st.sampled_from([200, 600, 1 << 20]))
def test_any_order_of_restarts_and_segments(lives: list[list[AnyRecord]], segment_bytes: int) -> None:
    """Several lives of several segments: all records are read, each writer's in its order, nothing is reported."""
    platform = FakePlatform(FakeDisk(), "n")
    for life in lives:
        journal = Journal(platform, FOLDER, segment_bytes=segment_bytes)
        for record in life:
            journal.write(record)
        journal.close()
    found = read_folder(platform, FOLDER)
    assert not found.damage
    for n, life in enumerate(lives, 1):
        assert [entry.record for entry in found.entries if entry.writer.endswith(f"-{n}")] == life
    assert len(found.entries) == sum(map(len, lives))


@given(ANY_RECORDS.filter(lambda records: len(records) > 1), st.data())
def test_a_missing_segment_is_reported(records: list[AnyRecord], data: st.DataObject) -> None:
    """A whole segment gone, not the last: the records of the others are read and the hole in the sequence is named."""
    files = written(records, segment_bytes=1)
    lost = data.draw(st.integers(1, len(records) - 1))
    gone = sorted(files)[lost]  # the first segment has its heading only
    found = read({name: content for name, content in files.items() if name != gone})
    assert [entry.sequence for entry in found.entries] == [n for n in range(1, len(records) + 1) if n != lost]
    assert [(damage.reason, damage.detail) for damage in found.damage] == [(MISSING, f"records {lost} to {lost}")]


def test_lines_cut_out_are_reported() -> None:
    """A line removed without a trace shows as a hole; one put in twice is told once and reported."""
    name, data, _ = one_file()
    lines = data.splitlines(keepends=True)
    found = read({name: b"".join(lines[:2] + lines[4:])})
    assert [(damage.reason, damage.detail) for damage in found.damage] == [(MISSING, "records 2 to 3")]
    found = read({name: b"".join([*lines, lines[2]])})
    assert len(found.entries) == 5 and [damage.reason for damage in found.damage] == []
    found = read({name: b"".join([*lines[1:], lines[2]])})
    assert len(found.entries) == 5
    assert [(damage.reason, damage.detail) for damage in found.damage] == [(REPEATED, "record 2")]


def test_a_late_line_is_told_once() -> None:
    """A record that comes out of order is told; when it comes again it is not."""
    name, data, _ = one_file()
    heading, one, two, *rest = data.splitlines(keepends=True)
    found = read({name: b"".join([heading, one, *rest, two, two])})
    assert sorted(entry.sequence for entry in found.entries) == [1, 2, 3, 4, 5]
    assert [damage.reason for damage in found.damage] == [MISSING]


def test_a_damaged_last_line_is_no_torn_tail() -> None:
    """A last line that is complete but does not check was not torn: somebody changed it."""
    name, data, spans = one_file()
    at = spans[4][0] + 20
    found = read({name: data[:at] + b"?" + data[at + 1 : -1]})
    assert len(found.entries) == 4 and [damage.reason for damage in found.damage] == [DAMAGED]


def test_objects_inside_a_record_never_pass_for_lines() -> None:
    """Even cut free by newlines on both sides an object inside a record is not told: it lacks the blank."""
    name, data, _ = one_file()
    inner = LINE.replace(b"{ ", b"{")
    inner += b',"crc":"%08x"}' % google_crc32c.value(inner)
    for line in (b'{ "seq":6,"x":' + inner + b"}\n", b'{ "seq":6,"x":\n' + inner + b"\n}\n"):
        found = read({name: data + line})
        assert len(found.entries) == 5
        assert sum(damage.length for damage in found.damage) == len(line.replace(b"\n", b""))


def test_a_damaged_newline_costs_nothing_but_itself() -> None:
    """Where the newline between two records is another byte both are read and that byte is reported."""
    name, data, spans = one_file()
    at = spans[1][1]
    found = read({name: data[:at] + b"{" + data[at + 1 :]})
    assert len(found.entries) == 5
    assert [(damage.offset, damage.length, damage.reason) for damage in found.damage] == [(at, 1, DAMAGED)]


def test_what_a_power_cut_leaves_is_a_torn_tail() -> None:
    """NULs after the last whole line, or after a part of one, are what file systems leave and no alarm."""
    name, data, spans = one_file()
    for tail in (bytes(5), data[: spans[0][0] - 20] + bytes(4096), b"{ " + bytes(3)):
        found = read({name: data + tail})
        assert len(found.entries) == 5 and [damage.reason for damage in found.damage] == [TORN_TAIL]


def test_other_files_and_sick_ones_are_reported() -> None:
    """A file that is no journal, and one that cannot be read, are named; the rest is read; a tail tries again."""
    (name, data, _), broken = one_file(), "agent0-n-00000000-1.0001.jsonl"
    sick = [True]
    platform = FakePlatform(
        FakeDisk(), faults=lambda op, path, n: fail() if op == "read" and path.endswith(broken) and sick[0] else None
    )
    platform.mkdir(f"{FOLDER}/folder")
    for file in (name, broken, "notes.txt"):
        platform.write_new(f"{FOLDER}/{file}", data)
    tail = Tail(platform, FOLDER)
    assert [len(tail.poll()) for _ in range(3)] == [5, 0, 0]
    assert [(damage.file, damage.reason) for damage in tail.damage] == [
        ("folder", FOREIGN), ("notes.txt", FOREIGN), (broken, UNREADABLE),
    ]
    assert tail.damage[-1].detail == "EIO: Input/output error"
    sick.clear()
    sick.append(False)
    assert len(tail.poll()) == 5


def test_no_folder_is_an_empty_journal() -> None:
    """A run that has not begun has no records; a folder that cannot be listed is an error."""
    assert read_folder(FakePlatform(FakeDisk()), FOLDER) == Reading([], [])
