"""A real file system that is really full: one warning with place and remedy, and the next save works."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.publish import SLACK_BYTES, Gate, Save, carry
from packtrain.checkpoint.reader import verify_commit
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.journal import Tail
from packtrain.core.records import ErrorSeen
from packtrain.core.units import NS
from tests.checkpoint.test_carrier import LONG_S, Rig, one
from tests.checkpoint.worlds import RUN, WRITER, make_run, part_of, tensor_of

SIZE_BYTES = 8 << 20
STATE_BYTES = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[str]:
    """A tmpfs of 8 MiB of its own."""
    with mounted(str(tmp_path / "disk")) as path:
        yield path


@contextmanager
def mounted(path: str) -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    libc = ctypes.CDLL(None, use_errno=True)
    os.makedirs(path)
    if libc.mount(b"none", path.encode(), b"tmpfs", 0, f"size={SIZE_BYTES}".encode()) != 0:
        pytest.skip(f"mounting a small tmpfs is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        yield path
    finally:
        assert libc.umount2(path.encode(), 0) == 0, os.strerror(ctypes.get_errno())


@pytest.fixture
def rig(small_disk: str, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(f"{small_disk}/run")
    yield rig
    rig.close()


def fill(path: str, leave_bytes: int) -> None:
    """Leave so many bytes free."""
    stat = os.statvfs(os.path.dirname(path))
    with open(path, "wb") as file:
        file.write(bytes(max(0, stat.f_bavail * stat.f_frsize - leave_bytes)))


@pytest.mark.root
@pytest.mark.parametrize("free", [0, STATE_BYTES // 2, STATE_BYTES + SLACK_BYTES + 16_384])
def test_a_full_disk_is_one_warning_and_the_next_save_works(rig, small_disk, tmp_path, free):
    """A save onto a full disk fails at its deadline with what, where and what to do; no partial folder stays, the log
    goes on, and when there is room again the next save is published. Where it just fits, it is published."""
    state = [tensor_of("w", "uint8", (STATE_BYTES,))]
    saver = rig.saver()
    saver._buffers[0]._stem = str(tmp_path / "buffer")
    fill(f"{small_disk}/hog", free)
    saver.save(10, state, {})
    result = one(saver.wait_all(LONG_S))
    if free > STATE_BYTES:
        assert result.error is None
    else:
        assert "full" in result.error["what"] and "free space" in result.error["fix"]
        assert result.error["where"].startswith(small_disk)
        assert os.listdir(f"{rig.folder}/checkpoints") == []
        assert rig.log.head() == 1
    os.unlink(f"{small_disk}/hog")
    saver.save(20, state, {})
    result = one(saver.wait_all(LONG_S))
    assert result.error is None
    commit = rig.log.read(result.commit)
    assert commit.step == 20 and verify_commit(rig.platform, rig.folder, commit) == []


def test_what_cannot_end_is_not_begun():
    """A save larger than what is free makes no file at all until there is room, so journal and log keep theirs."""
    platform = FakePlatform(FakeDisk(capacity_bytes=8 << 20), "a")
    log = make_run(platform)
    log.begin(0, (WRITER,), "node")
    platform.mkdir("/buffers")
    part = part_of(platform, [tensor_of("w", "uint8", (3 << 20,))], "/buffers/b")
    platform.write_new("/hog", bytes(3 << 20))
    save = Save(1, 1, (part,), {}, platform.boot_ns() + 60 * NS)
    begun = len(platform.disk.trace)
    platform.faults = lambda op, path, n: platform.unlink("/hog") if op == "sleep" and platform.exists("/hog") else None
    commit = carry(platform, log, RUN, save, Gate())
    before_room = platform.disk.trace[begun : platform.disk.trace.index(("a", "unlink", "/hog"))]
    assert {op for _, op, _ in before_room} <= {"free_bytes", "exists", "sleep"}
    assert verify_commit(platform, RUN, commit) == []


@pytest.mark.root
def test_a_disk_that_fills_while_writing(rig, small_disk, tmp_path):
    """Room that was there at first and is taken by somebody else while the image is written: the half try goes, and
    it is retried until there is room; the save succeeds within its deadline."""
    state = [tensor_of("w", "uint8", (3 * STATE_BYTES,))]
    saver = rig.saver()
    saver._buffers[0]._stem = str(tmp_path / "buffer")
    rig.platform.gate.clear()
    saver.save(10, state, {})
    rig.platform.waiting.acquire()
    fill(f"{small_disk}/hog", STATE_BYTES)
    pauses: list[str] = []

    def between_tries() -> None:
        pauses.append(str(os.listdir(f"{rig.folder}/checkpoints")))
        if len(pauses) == 2:
            os.unlink(f"{small_disk}/hog")

    rig.platform.before_sleep = between_tries
    rig.platform.gate.set()
    assert one(saver.wait_all(LONG_S)).error is None
    assert pauses == ["[]", "[]"], "a half try stayed, and with it the disk full"
    assert os.listdir(f"{rig.folder}/checkpoints") == ["step-00000010.a0001.t3"]


@pytest.mark.root
def test_a_full_disk_with_another_beside_it(tmp_path):
    """The disk under checkpoints/ alone is really full: the save is published from the fall-back, read back whole, and
    the journal has the warning; when there is room again the next one lies in the run folder."""
    fall_back = tmp_path / "scratch"
    fall_back.mkdir()
    with mounted(str(tmp_path / "run" / "checkpoints")) as small:
        rig = Rig(str(tmp_path / "run"), config=CheckpointConfig(fallback=(str(fall_back),)))
        try:
            fill(f"{small}/hog", STATE_BYTES // 2)
            saver, state = rig.saver(), [tensor_of("w", "uint8", (STATE_BYTES,))]
            saver.save(10, state, {})
            first = rig.log.read(one(saver.wait_all(LONG_S)).commit)
            os.unlink(f"{small}/hog")
            saver.save(20, state, {})
            second = rig.log.read(one(saver.wait_all(LONG_S)).commit)
        finally:
            rig.close()
        for commit in (first, second):
            assert verify_commit(rig.platform, rig.folder, commit) == []
        assert first.place.startswith(f"{fall_back}/run-") and second.place == ""
        assert os.listdir(small) == [second.folder] and os.listdir(f"{first.place}/checkpoints") == [first.folder]
        records = [entry.record for entry in Tail(rig.platform, f"{rig.folder}/journal").poll()]
        (seen,) = [record for record in records if isinstance(record, ErrorSeen)]
        assert seen.name == "checkpoint.fell_back" and "the disk is full" in seen.what and first.place in seen.where
