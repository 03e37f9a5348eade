"""The journal's writer: what is promised when, and that no state of the disk stops the one who writes."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from contextlib import suppress

import google_crc32c
import pytest

from packtrain.core.fake import (
    Baton,
    Choices,
    FakeCrash,
    FakeDisk,
    FakePlatform,
    Fault,
    chosen_faults,
    crash,
    explore,
    fail,
    lost_reply,
    power_cut,
    sample,
    stale,
    tear,
)
from packtrain.core.journal import MISSING, TORN_TAIL, Entry, Journal, Reading, Tail, Unknown, read_folder
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import ErrorSeen, PhaseTotals, RecordsLost, SampleDone, StepDone, TrainingDone

FOLDER = "/run/journal"
ROOT = pathlib.Path(__file__).parents[2]


def step(n: int, loss: float = 2.5) -> StepDone:
    return StepDone(
        step=n, loss=loss, bits_per_byte=1.0, grad_norm=0.5, learning_rate=1e-3, tokens=64, seconds=0.1, mfu=0.5
    )


def note(n: int) -> TrainingDone:
    return TrainingDone(step=n, updates_skipped=0)


def world(**kwargs: int) -> FakeDisk:
    disk = FakeDisk(**kwargs)
    FakePlatform(disk, "setup").mkdir("/run")
    disk.sync_all()
    return disk


def reading(disk: FakeDisk) -> Reading:
    return read_folder(FakePlatform(disk, "reader"), FOLDER)


def steps(entries: list[Entry]) -> list[int]:
    """The numbers written by `note` and `step`."""
    return [entry.record.step for entry in entries if isinstance(entry.record, TrainingDone | StepDone)]


def test_the_bytes_of_a_line() -> None:
    """The file's name and its lines have the documented form, and any JSON reader can use them."""
    platform = FakePlatform(world(), "node7")
    journal = Journal(platform, FOLDER, "trainer", 3)
    journal.write(note(5))
    boot = platform.boot_id().replace("-", "")[:8]
    (name,) = platform.listdir(FOLDER)
    assert name == f"trainer3-node7-{boot}-1.0001.jsonl" and journal.writer == name.split(".")[0]
    heading, line = platform.read(f"{FOLDER}/{name}").splitlines()
    body, crc = line.split(b',"crc":')
    assert json.loads(line)["record"] == {
        "kind": "training_done", "v": 1, "step": 5, "updates_skipped": 0, "attempt": 0,
    }
    assert body.startswith(b'{ "seq":1,"boot":"' + boot.encode() + b'","ns":')
    assert crc == b'"%08x"}' % google_crc32c.value(body)
    assert json.loads(heading)["record"]["kind"] == "segment_began" and json.loads(heading)["seq"] == 0


def test_what_is_written_is_read() -> None:
    """Every kind of value comes back, with writer, boot, time and number; times become dates."""
    disk = world()
    platform = FakePlatform(disk, "n")
    journal = Journal(platform, FOLDER)
    records = [
        step(1, math.inf), step(2, -math.inf), PhaseTotals(attempt=1, rank=0, ns={"seq": 1, '{ "seq":': 2}),
        SampleDone(step=3, prompt='{ "seq":1,"boot":"', text='x","crc":"00000000"}\n{ "seq":2'),
    ]
    for record in records:
        assert journal.write(record)
    journal.close()
    found = reading(disk)
    assert [entry.record for entry in found.entries] == records and not found.damage
    assert [entry.sequence for entry in found.entries] == [1, 2, 3, 4]
    assert {(entry.writer, entry.boot) for entry in found.entries} == {(journal.writer, platform.boot_id()[:8])}
    assert all(abs((entry.wall_s or 0) - platform.wall_s()) < 1 for entry in found.entries)


def test_values_json_does_not_have() -> None:
    """NaN comes back as NaN; text that is no text (a file name in another encoding) comes back readable."""
    disk = world()
    journal = Journal(FakePlatform(disk), FOLDER)
    journal.write(step(1, math.nan))
    journal.write(ErrorSeen(severity="warning", name="data.x", what="null", where="/data/\udce9t\xe9"))
    journal.close()
    first, second = (entry.record for entry in reading(disk).entries)
    assert isinstance(first, StepDone) and math.isnan(first.loss) and first.bits_per_byte == 1.0
    assert isinstance(second, ErrorSeen) and second.where == "/data/\\udce9t\xe9"


def test_classes() -> None:
    """A normal record is with the kernel when `write` returns, a metric within a second of writing or at `flush`."""
    disk = world()
    platform = FakePlatform(disk)
    journal = Journal(platform, FOLDER)
    journal.write(note(1))
    assert steps(reading(disk).entries) == [1]
    journal.write(step(2))
    assert steps(reading(disk).entries) == [1]
    platform.sleep(1)
    journal.write(step(3))
    assert steps(reading(disk).entries) == [1, 2, 3]
    journal.write(step(4))
    assert journal.flush()
    assert steps(reading(disk).entries) == [1, 2, 3, 4]
    platform.sleep(10)
    journal.write(step(5))
    assert steps(reading(disk).entries) == [1, 2, 3, 4, 5], "slow steps are not held back"


def test_durable_survives_every_power_cut() -> None:
    """When a durable write has returned True, that record and all before it are there after any cut."""
    for segment_bytes in (1 << 20, 400):
        for choices in explore(limit=400):
            disk = world()
            platform = FakePlatform(disk)
            journal = Journal(platform, FOLDER, segment_bytes=segment_bytes)
            for n in range(3):
                journal.write(step(n))
                journal.write(note(n))
            assert journal.write(note(100), durable=True)
            journal.write(note(101))
            found = read_folder(platform.crash(choices), FOLDER)
            assert steps(found.entries)[:7] == [0, 0, 1, 1, 2, 2, 100], choices
            assert not any(damage.alarming for damage in found.damage if damage.length == 0), choices


def test_each_incarnation_has_its_own_file() -> None:
    """A writer never goes on in another's file, whatever the listing shows, and nothing of the former is touched."""
    disk = world()
    for n in range(3):
        platform = FakePlatform(disk, "n", faults=lambda op, path, n: stale(8) if op == "listdir" else None)
        journal = Journal(platform, FOLDER)
        journal.write(note(n))
        platform.kill()
        assert journal.writer.endswith(f"-{n + 1}")
    found = reading(disk)
    assert steps(found.entries) == [0, 1, 2] and not found.damage
    assert len({entry.writer for entry in found.entries}) == 3


def test_two_writers_at_once_never_share_a_file() -> None:
    """In every interleaving of two starts, with a crash anywhere, each record is read and none is damaged."""
    for choices in explore():
        disk = world()
        baton = Baton(choices, disk.clock, 2, shared=lambda op, path: op in ("listdir", "create"))
        faults = chosen_faults(choices, lambda op, path: [crash()] if op in ("create", "write") else [])
        done: list[int] = []

        def live(platform: FakePlatform, n: int, done: list[int] = done) -> None:
            journal = Journal(platform, FOLDER)
            for record in (2 * n, 2 * n + 1):
                if journal.write(note(record)):
                    done.append(record)

        writers = [FakePlatform(disk, "same", baton, faults) for _ in "ab"]
        baton.run(*[lambda w=w, n=n: live(w, n) for n, w in enumerate(writers)])
        found = reading(disk)
        assert sorted(steps(found.entries)) == sorted(done) and not found.damage, choices


def test_rotation() -> None:
    """A segment is closed before it grows past its bound; the sequence runs on and everything is read in order."""
    disk = world()
    platform = FakePlatform(disk)
    journal = Journal(platform, FOLDER)
    text = "x" * (1 << 20)
    for n in range(40):
        journal.write(SampleDone(step=n, prompt="", text=text))
    journal.close()
    names = platform.listdir(FOLDER)
    assert [name[-11:] for name in names] == [".0001.jsonl", ".0002.jsonl", ".0003.jsonl"]
    assert all(platform.size(f"{FOLDER}/{name}") <= 16 << 20 for name in names)
    found = reading(disk)
    assert [entry.sequence for entry in found.entries] == list(range(1, 41)) and not found.damage


# --- a sick disk --------------------------------------------------------------------------------------


def test_a_full_disk_loses_only_what_memory_cannot_hold_and_says_so() -> None:
    """While the disk is full the writer goes on; afterwards it tells what is lost, and nothing else is."""
    disk = world(capacity_bytes=5000)
    platform = FakePlatform(disk)
    journal = Journal(platform, FOLDER)
    text = "x" * 1000
    results = []
    for n in range(1500):
        results.append(journal.write(SampleDone(step=n, prompt="", text=text)))
        platform.sleep(0.01)
    assert journal.trouble is not None and journal.trouble.strerror == "No space left on device"
    assert results[0] and not any(results[10:]) and journal.lost > 300
    disk.capacity_bytes = 1 << 30
    assert journal.write(note(1500), durable=True)
    assert journal.trouble is None
    journal.close()
    found = reading(disk)
    samples = [entry.record.step for entry in found.entries if isinstance(entry.record, SampleDone)]
    assert samples == list(range(1500 - journal.lost))
    lost = [entry.record for entry in found.entries if isinstance(entry.record, RecordsLost)]
    assert [record.count for record in lost] == [journal.lost] and "No space" in lost[0].error
    assert steps(found.entries) == [1500]
    assert {damage.reason for damage in found.damage} <= {TORN_TAIL}
    assert 2 <= len(platform.listdir(FOLDER)) <= 4, "retries do not litter"


def test_a_full_disk_is_not_asked_at_every_step() -> None:
    """While the disk is away a writer tries again once a second, not at each record, and notices when it is back."""
    disk = world(capacity_bytes=300)
    platform = FakePlatform(disk)
    journal = Journal(platform, FOLDER)
    for n in range(100):
        journal.write(note(n))
        platform.sleep(0.1)
    assert sum(op == "write" for _, op, _ in disk.trace) < 15
    disk.capacity_bytes = 1 << 30
    platform.sleep(1)
    assert journal.write(note(100)) and journal.lost == 0
    assert steps(reading(disk).entries) == list(range(101))


def test_a_journal_that_never_finds_a_disk() -> None:
    """A folder that cannot be made stops nothing: the writer holds, counts, and shows the trouble."""
    platform = FakePlatform(world(), faults=lambda op, path, n: fail(30) if op == "mkdir" else None)
    journal = Journal(platform, FOLDER)
    assert not journal.write(note(1), durable=True)
    journal.close()
    assert (journal.writer, journal.lost) == ("", 1) and journal.trouble is not None and journal.trouble.errno == 30


MENU = [fail(28), lost_reply(), tear(0.5), tear(1.0), tear(0.0)]


def live_through(choices: Choices, menu: list[Fault], faults_max: int, segment_bytes: int) -> tuple[FakeDisk, Journal]:
    disk = world()
    faults = chosen_faults(choices, lambda op, path: menu, faults_max)
    platform = FakePlatform(disk, faults=faults)
    journal = Journal(platform, FOLDER, segment_bytes=segment_bytes)
    for n in range(6):
        journal.write(note(n), durable=n % 3 == 2)
    journal.close()
    return disk, journal


def check_whole(disk: FakeDisk, journal: Journal, choices: Choices) -> None:
    found = reading(disk)
    got = steps(found.entries)
    told = sum(entry.record.count for entry in found.entries if isinstance(entry.record, RecordsLost))
    assert got == sorted(set(got)), choices
    assert len(got) + journal.lost >= 6 and told <= journal.lost, choices
    assert all(damage.reason == TORN_TAIL for damage in found.damage), (choices, found.damage)


def test_any_failing_operation_is_lived_through() -> None:
    """Whichever single operation fails, tears or loses its reply, nothing is raised and every record is read once."""
    for segment_bytes in (1 << 20, 300):
        for choices in explore():
            disk, journal = live_through(choices, MENU, 1, segment_bytes)
            check_whole(disk, journal, choices)
            assert journal.lost == 0, choices


@pytest.mark.parametrize("seed", range(4))
def test_many_failures_are_lived_through(seed: int) -> None:
    """Under many faults at once nothing is raised, and a record that is not read is counted as lost."""
    for choices in sample(100, seed, rate=0.3):
        disk, journal = live_through(choices, MENU, 1000, 300)
        check_whole(disk, journal, choices)


def test_death_at_any_operation_loses_no_acknowledged_record() -> None:
    """Killed anywhere, what `write` acknowledged is read; after a power cut, what was acknowledged as durable."""
    for death in (crash(), power_cut(), tear(0.5, "crash"), tear(0.5, "power_cut")):
        for at in range(1, 60):
            disk = world()
            platform = FakePlatform(disk, faults=lambda op, path, n, at=at, death=death: death if n == at else None)
            done, durable = [], []
            with suppress(FakeCrash):
                journal = Journal(platform, FOLDER, segment_bytes=400)
                for n in range(8):
                    if journal.write(note(n), durable=n % 3 == 2):
                        done.append(n)
                        durable = list(done) if n % 3 == 2 else durable
                assert platform.ops < at
            after = platform.crash(Choices(seed=at)) if disk.dark else FakePlatform(disk, "reader")
            found = read_folder(after, FOLDER)
            expected = durable if "power_cut" in (death.kind, death.then) else done
            assert steps(found.entries)[: len(expected)] == expected, (death, at)


def test_a_real_kill(tmp_path: pathlib.Path) -> None:
    """A real writer killed with -9 in mid-flow leaves whole lines and at most a torn tail."""
    program = (
        "import sys\nfrom packtrain.core.journal import Journal\nfrom packtrain.core.platform import LocalPlatform\n"
        "from packtrain.core.records import TrainingDone\n"
        "journal = Journal(LocalPlatform(), sys.argv[1], segment_bytes=20_000)\n"
        "for n in range(1 << 30):\n    journal.write(TrainingDone(step=n, updates_skipped=0))\n"
        "    if n == 2000: print('on', flush=True)\n"
    )
    folder = str(tmp_path / "journal")
    writer = subprocess.Popen([sys.executable, "-c", program, folder], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert writer.stdout is not None and writer.stdout.readline() == "on\n"
    writer.kill()
    writer.communicate()
    found = read_folder(LocalPlatform(), folder)
    assert steps(found.entries) == list(range(len(found.entries))) and len(found.entries) > 2000
    assert not any(damage.alarming for damage in found.damage)


# --- following and telling ------------------------------------------------------------------------------


def test_a_tail_tells_each_record_once() -> None:
    """Polls between writes, rotations and restarts give each entry exactly once, in each writer's order."""
    for choices in sample(60, seed="tail"):
        disk = world()
        tail = Tail(FakePlatform(disk, "reader"), FOLDER)
        assert tail.poll() == []
        told: list[Entry] = []
        n = 0
        for _ in range(3):
            journal = Journal(FakePlatform(disk, "n"), FOLDER, segment_bytes=500)
            for _ in range(8):
                journal.write(note(n) if choices.pick(2) else step(n))
                n += 1
                if choices.pick(3) == 0:
                    told += tail.poll()
            journal.close() if choices.pick(2) else journal.flush()
        told += tail.poll()
        assert steps(told) == list(range(n)) and not tail.damage, choices
        assert tail.poll() == []
        assert told == reading(disk).entries


def test_a_tail_waits_for_the_end_of_a_line() -> None:
    """A line half written is neither told nor reported; when it is complete it is told."""
    disk = world()
    platform = FakePlatform(disk)
    journal = Journal(platform, FOLDER)
    journal.write(note(1))
    whole = platform.read(f"{FOLDER}/{journal.writer}.0001.jsonl")
    for cut in range(len(whole)):
        other = world()
        reader = FakePlatform(other)
        reader.mkdir(FOLDER)
        file = reader.create(f"{FOLDER}/{journal.writer}.0001.jsonl")
        tail = Tail(reader, FOLDER)
        file.write(whole[:cut])
        assert tail.poll() == []
        file.write(whole[cut:])
        assert steps(tail.poll()) == [1] and not tail.damage


def test_a_tail_reports_a_torn_segment_once_it_is_left() -> None:
    """What a failed write tore is reported when the next segment shows that nobody will finish it."""
    disk = world()
    tears = [True]
    platform = FakePlatform(disk, faults=lambda op, path, n: tear() if op == "write" and n > 20 and tears[0] else None)
    journal, tail = Journal(platform, FOLDER), Tail(FakePlatform(disk, "reader"), FOLDER)
    n = 0
    while not journal.trouble:
        journal.write(note(n))
        n += 1
    told = tail.poll()
    assert not tail.damage
    tears[0] = False
    assert journal.write(note(n), durable=True)
    told += tail.poll()
    assert steps(told) == list(range(n + 1)) and [damage.reason for damage in tail.damage] == [TORN_TAIL]


def test_a_segment_that_comes_late_is_told_late() -> None:
    """Where segments arrive in another order (shipping), what is missing is reported, and told when it comes."""
    disk = world()
    journal = Journal(FakePlatform(disk), FOLDER, segment_bytes=400)
    for n in range(9):
        journal.write(note(n))
    journal.close()
    source = FakePlatform(disk)
    names = source.listdir(FOLDER)
    assert len(names) > 3
    other = FakePlatform(world())
    other.mkdir(FOLDER)
    tail = Tail(other, FOLDER)
    told = []
    for name in (names[0], *names[2:], names[1]):
        other.write_new(f"{FOLDER}/{name}", source.read(f"{FOLDER}/{name}"))
        told += steps(tail.poll())
    assert sorted(told) == list(range(9)) and told != sorted(told)
    assert {damage.reason for damage in tail.damage} == {MISSING}
    assert steps(read_folder(other, FOLDER).entries) == list(range(9))


def test_restarts_across_boots_are_told_in_order() -> None:
    """Writers of several roles and boots are merged by date; boot times alone would put the last boot first."""
    disk = world()
    platform = FakePlatform(disk, "n")
    for boot in range(3):
        platform.sleep(1000 - 300 * boot)
        trainer = Journal(platform, FOLDER)
        agent = Journal(platform, FOLDER, "agent")
        for n in range(3):
            (trainer if n % 2 else agent).write(note(10 * boot + n), durable=True)
            platform.sleep(1)
        trainer.close()
        agent.close()
        disk.sync_all()
        platform = platform.crash()
        disk = platform.disk
    found = reading(disk)
    assert steps(found.entries) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert len({entry.boot for entry in found.entries}) == 3


def test_records_of_a_newer_version_are_shown() -> None:
    """A whole record of a kind, or with a value, that this version does not know is told as Unknown, body and all."""
    disk = world()
    platform = FakePlatform(disk)
    platform.mkdir(FOLDER)
    lines = b""
    for seq, record in enumerate(
        [b'{"kind":"teleported","v":1,"to":"mars"}',
         b'{"kind":"training_done","v":2,"step":"many","updates_skipped":0}',
         b'{"kind":"training_done","v":9,"step":7,"updates_skipped":0,"more":{ "seq":1}}', b"[1]"], 1,
    ):
        head = b'{ "seq":%d,"boot":"00000000","ns":1,"extra":0,"record":%s' % (seq, record)
        lines += b'%s,"crc":"%08x"}\n' % (head, google_crc32c.value(head))
    platform.write_new(f"{FOLDER}/trainer0-n-00000000-1.0001.jsonl", lines)
    found = reading(disk)
    kinds = [entry.record.kind if isinstance(entry.record, Unknown) else "known" for entry in found.entries]
    assert kinds == ["teleported", "training_done", "known", ""] and not found.damage
    first = found.entries[0].record
    assert isinstance(first, Unknown) and first.body == {"kind": "teleported", "v": 1, "to": "mars"} and first.reason
