"""What a process suffers on purpose: the order file under damage, each fault in a real process, a disk that is ill."""

from __future__ import annotations

import errno
import os
import pathlib
import select
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.breaking import NAN, NO_FAULT, SLOW, Fault, Faults, OrderFile, fault_bytes, parse_fault
from packtrain.core.platform import LocalPlatform
from packtrain.core.sick import SickPlatform
from packtrain.core.units import NS
from tests.house.tree import ROOT

INT64 = st.integers(0, (1 << 63) - 1)
FAULTS = st.builds(Fault, INT64, st.text(max_size=20), INT64, st.floats(0, 100))
FOREVER_NS = 1 << 62


def give(path: pathlib.Path, fault: Fault) -> None:
    """Replace the order file atomically, as the agent does."""
    LocalPlatform().write_replacing(str(path), fault_bytes(fault), durable=False)


# --- the file ------------------------------------------------------------------------------------------


@given(FAULTS)
def test_an_order_survives_the_file(fault: Fault) -> None:
    """What the agent writes is what the process reads."""
    assert parse_fault(fault_bytes(fault)) == fault


@given(FAULTS, st.data())
def test_a_damaged_order_breaks_nothing_else(fault: Fault, data: st.DataObject) -> None:
    """After a flipped bit or a cut the file reads as the same order or as nothing."""
    whole = bytearray(fault_bytes(fault))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert parse_fault(bytes(whole)) in (None, fault)
    assert parse_fault(fault_bytes(fault)[: data.draw(st.integers(0, len(whole)))]) in (None, fault)


def test_only_a_later_order_counts(tmp_path: pathlib.Path) -> None:
    """What is absent, damaged or older changes nothing, and no path is no order."""
    path = tmp_path / "faults"
    file = OrderFile(str(path))
    assert file.now() == OrderFile("").now() == NO_FAULT
    give(path, Fault(2, NAN))
    assert file.now() == Fault(2, NAN)
    give(path, Fault(1, SLOW))
    assert file.now() == Fault(2, NAN)
    path.write_bytes(b"rubbish")
    assert file.now() == Fault(2, NAN)
    path.unlink()
    assert file.now() == Fault(2, NAN)


# --- a process -----------------------------------------------------------------------------------------


class Clock:
    """Each step takes a second; what is slept is counted."""

    def __init__(self) -> None:
        self.ns, self.slept = 0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.ns += round(seconds * NS)


def test_slow_is_slow_by_its_factor_until_it_is_over(tmp_path: pathlib.Path) -> None:
    """A step of a second takes 1/0.7 s, for as long as was said, and a second again."""
    clock = Clock()
    faults = Faults(str(tmp_path / "faults"), clock=lambda: clock.ns, sleep=clock.sleep)
    give(tmp_path / "faults", Fault(1, SLOW, 4 * NS, 1 / 0.7))
    for _ in range(6):
        clock.ns += NS
        assert faults.step() == ""
    assert clock.slept == [0.428571] * 3


def test_nan_is_told_once(tmp_path: pathlib.Path) -> None:
    """Only the program itself can do it; the next order is another one."""
    faults = Faults(str(tmp_path / "faults"))
    give(tmp_path / "faults", Fault(3, NAN))
    assert [faults.step() for _ in range(3)] == [NAN, "", ""]
    give(tmp_path / "faults", Fault(4, NAN))
    assert [faults.step() for _ in range(2)] == [NAN, ""]


SUFFER = """
import sys, threading
sys.path.insert(0, {root!r})
from packtrain.core.breaking import Faults
def breathe():
    while not stop.wait(0.01):
        print("alive", flush=True)
stop = threading.Event()
threading.Thread(target=breathe, daemon=True).start()
print("begins", flush=True)
Faults({path!r}).step()
stop.set()
print("goes on", flush=True)
"""


def suffering(tmp_path: pathlib.Path, fault: str) -> subprocess.Popen[str]:
    """A process that is ordered this before its first step."""
    give(tmp_path / "faults", Fault(1, fault))
    code = SUFFER.format(root=str(ROOT), path=str(tmp_path / "faults"))
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("oom", 1, "MemoryError"), ("exit-1", 1, "exit-1"), ("exit-75", 75, "exit-75"), ("exit-78", 78, "exit-78"),
        ("a later version's", 0, ""),
    ],
)
def test_a_process_ends_as_it_is_ordered_to(tmp_path: pathlib.Path, fault: str, code: int, said: str) -> None:
    """With the code, and its last words say that it was on purpose; what it does not know it passes over."""
    with suffering(tmp_path, fault) as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == code and said in errors
    assert ("goes on" in out) == (code == 0) and ("on purpose" in errors) == (code != 0)


def test_a_hang_holds_the_interpreter_lock(tmp_path: pathlib.Path) -> None:
    """No other thread of the process says a word any more, and only SIGKILL ends it."""
    with suffering(tmp_path, "hang") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begins\n" or process.stdout.readline()
        assert "hang" in process.stderr.readline()
        os.set_blocking(process.stdout.fileno(), False)
        platform, heard = LocalPlatform(), []
        for _ in range(10):
            heard.append(os.read(process.stdout.fileno(), 1 << 16) if _readable(process) else b"")
            platform.sleep(0.05)
        assert not any(heard[2:]), heard
        process.kill()
        assert process.wait(10) == -9


def _readable(process: subprocess.Popen[str]) -> bool:
    return bool(select.select([process.stdout], [], [], 0)[0])


# --- a disk --------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[SickPlatform, str], object]] = {
    "create": lambda disk, at: disk.create(f"{at}/new").close(),
    "reopen": lambda disk, at: disk.reopen(f"{at}/old").close(),
    "image": lambda disk, at: disk.create_image(f"{at}/image", 10).close(),
    "mkdir": lambda disk, at: disk.mkdir(f"{at}/folder"),
    "mkdir_new": lambda disk, at: disk.mkdir_new(f"{at}/another"),
    "link": lambda disk, at: disk.link(f"{at}/old", f"{at}/linked"),
    "replace": lambda disk, at: disk.replace(f"{at}/old", f"{at}/moved"),
    "fsync_dir": lambda disk, at: disk.fsync_dir(f"{at}/sub"),
}
FREES: dict[str, Callable[[SickPlatform, str], object]] = {
    "unlink": lambda disk, at: disk.unlink(f"{at}/gone"),
    "rmdir": lambda disk, at: disk.rmdir(f"{at}/empty"),
}


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> SickPlatform:
    for name in ("run", "run/sub", "other", "other/sub"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "empty").mkdir()
        (tmp_path / name / "gone").write_bytes(b"")
        (tmp_path / name / "old").write_bytes(b"old")
    return SickPlatform(str(tmp_path / "run"), str(tmp_path / "faults"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("fault", "code"), [("disk-full", errno.ENOSPC), ("disk-read-only", errno.EROFS)])
def test_a_disk_that_refuses(
    tmp_path: pathlib.Path, disk: SickPlatform, change: str, fault: str, code: int
) -> None:
    """Every change is refused as the kernel does it; what lies elsewhere is not, nor a read, nor what comes later."""
    give(tmp_path / "faults", Fault(1, fault, FOREVER_NS))
    with pytest.raises(OSError) as refused:
        CHANGES[change](disk, str(tmp_path / "run"))
    assert refused.value.errno == code
    CHANGES[change](disk, str(tmp_path / "other"))
    assert disk.read(str(tmp_path / "run" / "old")) == b"old"
    assert (disk.free_bytes(str(tmp_path / "run" / "sub")) == 0) == (fault == "disk-full")
    give(tmp_path / "faults", Fault(2, fault, 1))
    CHANGES[change](disk, str(tmp_path / "run"))


@pytest.mark.parametrize("change", FREES)
def test_what_frees_room_is_done_on_a_full_disk(tmp_path: pathlib.Path, disk: SickPlatform, change: str) -> None:
    """As the kernel does it; where nothing may be changed it is refused."""
    give(tmp_path / "faults", Fault(1, "disk-read-only", FOREVER_NS))
    with pytest.raises(OSError) as refused:
        FREES[change](disk, str(tmp_path / "run"))
    assert refused.value.errno == errno.EROFS
    give(tmp_path / "faults", Fault(2, "disk-full", FOREVER_NS))
    before = disk.listdir(str(tmp_path / "run"))
    FREES[change](disk, str(tmp_path / "run"))
    assert len(disk.listdir(str(tmp_path / "run"))) == len(before) - 1


def test_files_that_are_open_fail_too(tmp_path: pathlib.Path, disk: SickPlatform) -> None:
    """Each further write and fsync of a file and of an image that were opened while all was well."""
    file, image = disk.create(f"{tmp_path}/run/file"), disk.create_image(f"{tmp_path}/run/image", 4)
    file.write(b"a")
    image.write_at(0, b"a")
    give(tmp_path / "faults", Fault(1, "disk-full", FOREVER_NS))
    for call in (lambda: file.write(b"b"), lambda: file.write_at(0, b"b"), file.fsync,
                 lambda: image.write_at(1, b"b"), image.fsync):
        with pytest.raises(OSError, match="No space"):
            call()
    file.close()
    image.close()


class Impatient(SickPlatform):
    """Mends the disk at the third look."""

    looks = 0

    def sleep(self, seconds: float) -> None:
        self.looks += 1
        if self.looks == 3:
            give(pathlib.Path(self._path), Fault(2, "disk-stall", 1))


def test_a_disk_that_hangs_holds_whoever_changes_something(tmp_path: pathlib.Path, disk: SickPlatform) -> None:
    """Until it is well again; then the change is made."""
    stalled = Impatient(str(tmp_path / "run"), str(tmp_path / "faults"))
    give(tmp_path / "faults", Fault(1, "disk-stall", FOREVER_NS))
    stalled.mkdir(str(tmp_path / "run" / "late"))
    assert stalled.looks == 3 and (tmp_path / "run" / "late").is_dir()
