"""Homes in which threads hang, and carriers that do: what is tried, what is left alone; no save is published twice."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import threading
from collections.abc import Iterator

import pytest

from packtrain.checkpoint.carrier import open_carrier
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.homes import HUNG_MAX, Hangs, Homes
from packtrain.checkpoint.publish import Gate, carry
from packtrain.checkpoint.where import fall_back_home
from packtrain.core.errors import CommitStale, SaveFailed
from packtrain.core.fake import FakeDisk, FakePlatform, fail
from packtrain.core.units import NS
from tests.checkpoint.test_carrier import LONG_S, GatedPlatform, Rig, one
from tests.checkpoint.worlds import RUN, WRITER, judge, make_run, save_of, small_state

A, B, C = "/a", "/b", "/c"


@pytest.fixture
def rig(tmp_path: pathlib.Path) -> Iterator[Rig]:
    rig = Rig(str(tmp_path))
    yield rig
    rig.close()


def lost_in(homes: Homes, platform: GatedPlatform, path: str) -> threading.Event:
    """Leave a thread behind in a home; it comes back when the event is set."""
    back = threading.Event()
    with pytest.raises(Hangs):
        homes.within(path, back.wait, platform.boot_ns() - NS, lambda result: None)
    return back


def test_the_order_in_which_homes_are_tried() -> None:
    """Those without a hung thread, in order; where all hang, those below their bound of them: one in quarantine."""
    platform = GatedPlatform()
    homes = Homes(platform, [A, B, C], [C, "/unknown"])
    assert homes.usable() == [A, B] and homes.quarantine == (C,)
    backs = [lost_in(homes, platform, A)]
    assert homes.usable() == [B]
    backs.append(lost_in(homes, platform, B))
    assert homes.usable() == [A, B, C]
    backs.append(lost_in(homes, platform, C))
    assert homes.usable() == [A, B]
    backs += [lost_in(homes, platform, A) for _ in range(HUNG_MAX - 1)]
    assert homes.usable() == [B] and [(hung.path, hung.threads) for hung in homes.hung()] == [(A, 4), (B, 1), (C, 1)]
    for back in backs:
        back.set()
    while homes.hung():
        platform.sleep(0.0)
    assert homes.usable() == [A, B]


def test_what_comes_back_late() -> None:
    """What a thread returns or raises in time is its caller's; what a thread that was left returns is cleaned up before
    its home counts as well again, and what it raises is nobody's."""
    platform, cleaned = GatedPlatform(), []
    homes, end_ns = Homes(platform, [A]), platform.boot_ns() + 60 * NS
    assert homes.within(A, lambda: 5, end_ns, cleaned.append) == 5 and cleaned == []
    with pytest.raises(OSError, match="planted"):
        homes.within(A, lambda: _raise(OSError("planted")), end_ns, cleaned.append)
    for work in (lambda: 7, lambda: _raise(OSError("late"))):
        back = threading.Event()
        with pytest.raises(Hangs):
            homes.within(A, lambda back=back, work=work: (back.wait(), work())[1], 0, cleaned.append)
        back.set()
        while homes.hung():
            platform.sleep(0.0)
    assert cleaned == [7]


def _raise(error: Exception) -> None:
    raise error


def test_a_probe_ends_a_quarantine() -> None:
    """A home that refuses stays in quarantine, one that takes a file is out of it, and nothing stays of the file; a
    home that was never made is probed where it would be."""
    platform = FakePlatform(FakeDisk())
    for folder in (f"{A}/checkpoints", "/scratch"):
        platform.mkdir(folder)
    homes = Homes(platform, [A, "/scratch/run", "/away/run"], [A, "/scratch/run", "/away/run"])
    platform.faults = lambda op, path, n: fail(errno.EIO) if op == "write" else None
    assert not homes.probe(A) and A in homes.quarantine
    platform.faults = None
    assert homes.probe(A) and homes.probe("/scratch/run") and not homes.probe("/away/run")
    assert homes.quarantine == ("/away/run",)
    written = [path for _, op, path in platform.disk.trace if op == "create"]
    assert {path.rpartition("/")[0] for path in written} >= {f"{A}/checkpoints", "/scratch"}
    assert platform.listdir(f"{A}/checkpoints") == platform.listdir("/scratch") == []


def test_a_home_in_quarantine_is_not_touched() -> None:
    """A save goes past a home in quarantine without one operation there, and says so; alone it is tried."""
    platform = FakePlatform(FakeDisk())
    log = make_run(platform)
    for folder in ("/scratch", "/buffers"):
        platform.mkdir(folder)
    home = fall_back_home("/scratch", RUN, log.begin(0, (WRITER,), "a"))
    begun, told = len(platform.disk.trace), []
    homes = Homes(platform, [RUN, home], [RUN])
    commit = carry(platform, log, RUN, save_of(platform, 1, 5), Gate(), homes, told.append)
    touched = [path for _, _, path in platform.disk.trace[begun:] if path.startswith(f"{RUN}/checkpoints")]
    assert commit.place == home and touched == [] and f"{RUN}: it hangs" in told[0].what
    alone = carry(platform, log, RUN, save_of(platform, 1, 6), Gate(), Homes(platform, [RUN], [RUN]))
    assert alone.place == ""
    judge(platform)


def test_a_save_that_hangs_goes_on_in_the_next_home(tmp_path: pathlib.Path) -> None:
    """At half of its time a save that hangs in the run's own disk goes to the next, and later saves go there at once;
    when the disk comes back nothing of it is left there, and saves lie there again."""
    (tmp_path / "scratch").mkdir()
    rig = Rig(f"{tmp_path}/run", config=CheckpointConfig(fallback=(f"{tmp_path}/scratch",)))
    try:
        saver = rig.saver()
        rig.platform.hangs_under = f"{rig.folder}/checkpoints"
        rig.platform.gate.clear()
        saver.save(10, small_state(1, 10), {})
        rig.platform.waiting.acquire()
        rig.skip(LONG_S / 2 + 1)
        first = one(saver.wait_all(LONG_S))
        saver.save(20, small_state(1, 20), {})
        assert (first.error, one(saver.wait_all(LONG_S)).error) == (None, None)
        assert all(commit.place for commit in judge(rig.platform, rig.folder)[1:])
        (hung,) = ask(rig)["hung"]
        assert (hung["path"], hung["threads"]) == (rig.folder, 1)
        rig.platform.gate.set()
        while ask(rig)["hung"]:
            continue
        assert os.listdir(f"{rig.folder}/checkpoints") == []
        saver.save(30, small_state(1, 30), {})
        assert one(saver.wait_all(LONG_S)).error is None
        assert [bool(commit.place) for commit in judge(rig.platform, rig.folder)[1:]] == [True, True, False]
    finally:
        rig.close()


def test_a_new_carrier_keeps_off_what_hangs(tmp_path: pathlib.Path) -> None:
    """A carrier that is told of a home in quarantine starts without touching it, uses the other one, and takes it back
    when its probe is answered."""
    (tmp_path / "scratch").mkdir()
    rig = Rig(f"{tmp_path}/run", config=CheckpointConfig(fallback=(f"{tmp_path}/scratch",)))
    try:
        os.rmdir(f"{rig.folder}/checkpoints")  # a folder made there would be an operation on it
        carrier = open_carrier(
            rig.platform, rig.folder, f"{rig.folder}/c1", rig.begin.number, rig.config, [rig.folder]
        )
        assert not os.path.exists(f"{rig.folder}/checkpoints") and carrier._homes.quarantine == (rig.folder,)
        assert carrier._homes.usable() == list(carrier._homes.paths[1:])
        thread = threading.Thread(target=carrier.serve)
        thread.start()
        rig.closing.insert(0, lambda: (carrier.stop(), thread.join()))
        rig.socket = f"{rig.folder}/c1"
        while ask(rig)["quarantine"]:
            continue
        assert carrier._homes.usable() == list(carrier._homes.paths)
    finally:
        rig.close()


def test_a_save_published_before_is_not_published_twice() -> None:
    """What an earlier carrier of the attempt published without living to say so is the outcome of the next one's try,
    whose own folder goes. A later step of the attempt is in the way: that save failed, and the attempt need not end. A
    newer attempt is: stop."""
    platform = FakePlatform(FakeDisk())
    log = make_run(platform)
    platform.mkdir("/buffers")
    log.begin(0, (WRITER,), "a")
    first = carry(platform, log, RUN, save := save_of(platform, 1, 5), Gate())
    other = FakePlatform(platform.disk)
    again = carry(other, make_run(other), RUN, save, Gate())
    assert again == first and platform.listdir(f"{RUN}/checkpoints") == [first.folder]
    carry(platform, log, RUN, save_of(platform, 1, 6), Gate())
    assert carry(other, make_run(other), RUN, save, Gate()) == first, "published, if not the last"
    with pytest.raises(SaveFailed, match="step 4 was not published: step 6 was"):
        carry(other, make_run(other), RUN, save_of(platform, 1, 4), Gate())
    log.begin(None, (WRITER,), "a")
    with pytest.raises(CommitStale, match="attempt 2 began"):
        carry(other, make_run(other), RUN, save, Gate())


def test_a_save_that_was_overtaken_is_not_written(rig):
    """A step that becomes whole after a later one was published fails at once: the disk is not touched."""
    saver = rig.saver()
    saver.save(20, small_state(1, 20), {})
    assert one(saver.wait_all(LONG_S)).commit
    late = rig.saver()
    rig.platform.hangs_in = "create"
    rig.platform.gate.clear()
    late.save(10, small_state(1, 10), {})
    error = one(late.wait_all(LONG_S)).error
    rig.platform.gate.set()
    assert "step 10 was not published: step 20 was" in error["what"]


@pytest.mark.parametrize("op", ["create", "read", "fsync_dir"])
def test_a_hung_disk_fails_the_save_and_can_publish_nothing_later(rig, op):
    """A disk that hangs past the deadline fails the save; when its thread comes back, the buffer refilled meanwhile,
    nothing of it is published, and a save offered since is whole."""
    saver = rig.saver()
    rig.platform.hangs_in = op
    rig.platform.gate.clear()
    saver.save(10, small_state(1, 10), {})
    rig.platform.waiting.acquire()
    rig.skip(LONG_S + 1)
    result = one(saver.wait_all(LONG_S))
    assert "the disk hangs" in result.error["what"] and result.commit == 0
    patient = rig.saver()
    patient.save(20, small_state(1, 20), {})
    rig.platform.waiting.acquire()
    rig.platform.gate.set()
    assert one(patient.wait_all(LONG_S)).error is None
    assert [commit.step for commit in judge(rig.platform, rig.folder)[1:]] == [20]


def test_a_home_where_too_many_threads_hang(rig):
    """With HUNG_MAX threads lost in the only home, the next save fails at once by that name; the carrier says where
    they hang, and saves go on when they come back."""
    client = rig.client()
    rig.platform.gate.clear()
    for n in range(HUNG_MAX):
        assert client.offer(rig.offer(id=n, step=n + 1)) == "accepted"
        rig.platform.waiting.acquire()
        rig.skip(LONG_S + 1)
        assert client.wait(n, LONG_S)["ok"] is False
    while rig.carrier._hung:
        ask(rig)  # the loop gave a save up before its own thread said so
    (hung,) = (stands := ask(rig))["hung"]
    assert (hung["path"], hung["threads"], stands["saves"], stands["quarantine"]) == (rig.folder, HUNG_MAX, 0, [])
    assert hung["s"] > LONG_S
    assert client.offer(rig.offer(id=50, step=50)) == "accepted"
    assert f"{rig.folder}: it hangs" in client.wait(50, 1.0)["error"]["what"]
    rig.platform.gate.set()
    while ask(rig)["hung"]:
        continue
    assert client.offer(rig.offer(id=60, step=60)) == "accepted" and client.wait(60, LONG_S)["ok"] is True
    assert rig.log.head() == 2


def ask(rig) -> dict:
    """How the carrier stands, by a connection of its own."""
    with contextlib.closing(rig.platform.stream_connect(rig.socket, LONG_S)) as asking:
        asking.sendall(b'{"op":"stand","id":9}\n')
        return json.loads(asking.makefile().readline())


def test_a_lost_carrier_leaves_its_buffer_and_a_new_one_goes_on(rig):
    """A saver that loses its carrier in mid-save says so, offers the same image to the next carrier, unasked, and never
    refills the file the old one may still read. Both carriers may have published it: it is one save."""
    saver = rig.saver()
    rig.platform.gate.clear()
    saver.save(10, small_state(1, 10), {})
    rig.platform.waiting.acquire()
    (before,) = os.listdir(f"{rig.folder}/buffers")
    rig.carrier.stop()
    rig.closing.pop(0)()  # asked twice: it leaves the save
    lost = one(saver.wait_all(LONG_S))
    assert (lost.commit, lost.error["name"]) == (0, "checkpoint.carrier_lost")
    assert saver.save(20, small_state(1, 20), {}) is None and saver.skipped == 1
    rig.platform.gate.set()
    os.unlink(rig.socket)
    rig.start_carrier("c0")
    assert saver.save(30, small_state(1, 30), {}) is not None
    results = {result.step: result.error for result in saver.wait_all(LONG_S)}
    assert results == {10: None, 30: None}
    assert saver.save(40, small_state(1, 40), {}) is not None and one(saver.wait_all(LONG_S)).error is None
    assert before not in os.listdir(f"{rig.folder}/buffers")
    assert [commit.step for commit in judge(rig.platform, rig.folder)[1:]] == [10, 30, 40]


def test_a_carrier_that_hangs_on_is_left_for_another(rig):
    """A saver whose carrier never hangs up, as one in a dead file system, sees that another one listens at its path, is
    told once that the save is lost, and offers it there; what the first one read does not change under it."""
    saver = rig.saver()
    rig.platform.gate.clear()
    saver.save(10, small_state(1, 10), {})
    rig.platform.waiting.acquire()
    image = f"{rig.folder}/buffers/{os.listdir(f'{rig.folder}/buffers')[0]}"
    held = pathlib.Path(image).read_bytes()
    os.unlink(rig.socket)
    rig.start_carrier("c0")
    lost = one(saver.wait_all(LONG_S))
    assert lost.error["name"] == "checkpoint.carrier_lost" and "another one took its place" in lost.error["what"]
    assert saver.poll() == [] and len(rig.carrier._saves) == 1
    assert saver.save(20, small_state(1, 20), {}) is not None and pathlib.Path(image).read_bytes() == held
    rig.platform.gate.set()
    assert {result.step: result.error for result in saver.wait_all(LONG_S)} == {10: None, 20: None}
    assert [commit.step for commit in judge(rig.platform, rig.folder)[1:]] == [10, 20]


def test_a_lost_save_is_not_offered_for_ever(rig):
    """What no carrier took in its time is dropped with its buffer, and so is what a later save has overtaken."""
    saver = rig.saver(deadline_s=7.0)
    rig.platform.gate.clear()
    saver.save(10, small_state(1, 10), {})
    rig.platform.waiting.acquire()
    rig.carrier.stop()
    rig.closing.pop(0)()
    assert one(saver.wait_all(LONG_S)).commit == 0
    rig.platform.sleep(8.0)
    saver.poll()
    assert os.listdir(f"{rig.folder}/buffers") == []
    rig.platform.gate.set()
    os.unlink(rig.socket)
    rig.start_carrier("c0")
    assert saver.save(30, small_state(1, 30), {}) is not None
    assert [result.step for result in saver.wait_all(LONG_S)] == [30]
