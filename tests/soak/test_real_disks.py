"""Saves onto real file systems that are full, read-only, hung, slow or flapping: each is one failed save, none is lost,
and saves go on when the disk is well again.

The carrier is a process of its own, as in a run; the saver is this one, its buffers on another disk.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
import signal
import sys
from collections.abc import Iterator

import pytest

from packtrain.checkpoint.homes import HUNG_MAX
from packtrain.checkpoint.saver import Saver, SaveResult
from packtrain.core.contract import CarrierClient
from packtrain.core.errors import SaveFailed
from packtrain.core.platform import LocalPlatform, Process
from packtrain.core.records import AttemptBegan, CarrierGivenUp, HomeBack
from tests.checkpoint.worlds import judge, make_run, small_state
from tests.supervise.runs import driven, log, processes, records, restore_point, saved_state

pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.timeout(300)]

DEADLINE_S = 1.5
WAIT_S = 60.0
MS_RDONLY, MS_REMOUNT, MNT_DETACH = 1, 32, 2
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(kind: bytes, path: pathlib.Path, flags: int = 0, data: bytes = b"size=8m") -> None:
    if LIBC.mount(b"none", str(path).encode(), kind, flags, data) != 0:
        pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")


class Rig:
    """A run on a disk, its carrier, and a saver that offers small states."""

    def __init__(self, disk: pathlib.Path, beside: pathlib.Path) -> None:
        self.platform, self.run, self._socket = LocalPlatform(), str(disk / "run"), str(beside / "carrier")
        begin = make_run(self.platform, self.run).begin(0, ("r00000",), "node")
        command = [sys.executable, "-m", "packtrain.checkpoint.carrier", "--run", self.run, "--socket", self._socket]
        log = str(beside / "carrier.log")
        self.carrier = self.platform.spawn([*command, "--begin", str(begin.number)], dict(os.environ), log_path=log)
        self.until(lambda: os.path.exists(self._socket))
        self.client = CarrierClient(self._socket, WAIT_S)
        self.saver = Saver(self.platform, str(beside / "buffers"), self.client, begin.attempt, "r00000", DEADLINE_S)
        self._step = 0

    def until(self, true: object) -> None:
        end_ns = self.platform.boot_ns() + int(WAIT_S * 1e9)
        while not true():  # type: ignore[operator]
            assert self.platform.boot_ns() < end_ns, "it did not come"
            self.platform.sleep(0.02)

    def save(self, deadline_s: float = DEADLINE_S) -> SaveResult | None:
        """The next step's save, and how it ended; None: it was not taken."""
        self._step += 1
        if self.saver.save(self._step, small_state(1, self._step), {}, deadline_s) is None:
            return None
        (result,) = self.saver.wait_all(WAIT_S)
        assert result.step == self._step
        return result

    def published(self) -> list[int]:
        """Steps, once every published checkpoint was read back and is what was saved."""
        return [commit.step for commit in judge(self.platform, self.run) if commit.kind == "save"]

    def must_go_on(self) -> None:
        """The same carrier takes the next save and publishes it."""
        self.until(lambda: (found := self.save(WAIT_S)) is not None and found.error is None)
        assert self.carrier.poll() is None and self.published()[-1] == self._step

    def close(self) -> None:
        self.saver.close()
        self.carrier.send_signal(signal.SIGKILL)
        self.carrier.wait(WAIT_S)


def failed(result: SaveResult | None) -> str:
    assert result is not None and result.error is not None and result.commit == 0
    assert result.error["name"] == SaveFailed.name and result.error["fix"]
    return result.error["what"]


@pytest.fixture
def small(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A tmpfs of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount(b"tmpfs", disk)
    yield disk
    assert LIBC.umount2(str(disk).encode(), MNT_DETACH) == 0


class Sick:
    """A FUSE mount whose state of health a test chooses."""

    def __init__(self, home: pathlib.Path) -> None:
        self.disk, self._illness, behind = home / "disk", home / "illness", home / "behind"
        self.disk.mkdir()
        behind.mkdir()
        self.now("well")
        command = [sys.executable, "-m", "tests.soak.passthrough", str(behind), str(self.disk), str(self._illness)]
        self._platform, self._log = LocalPlatform(), home / "fuse.log"
        self._server: Process = self._platform.spawn(command, dict(os.environ), log_path=str(self._log))
        while not os.path.ismount(self.disk):
            if self._server.poll() is not None:
                pytest.skip(f"FUSE cannot be mounted here: {self._log.read_text()[-300:]}")
            self._platform.sleep(0.02)

    def now(self, illness: str) -> None:
        """The server never sees half of a word."""
        LocalPlatform().write_replacing(str(self._illness), illness.encode())

    def refused(self) -> int:
        """Changes that failed so far."""
        return self._log.read_text().count("refused")

    def close(self) -> None:
        self.now("well")
        LIBC.umount2(str(self.disk).encode(), MNT_DETACH)
        if self._server.wait(10) is None:
            self._server.send_signal(signal.SIGKILL)
            self._server.wait(10)


@pytest.fixture
def sick(tmp_path: pathlib.Path) -> Iterator[Sick]:
    if importlib.util.find_spec("mfusepy") is None or not os.path.exists("/dev/fuse"):
        pytest.skip("needs mfusepy and /dev/fuse")
    made = Sick(tmp_path)
    yield made
    made.close()


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Rig]:
    """On the disk that the test names."""
    disk = request.getfixturevalue("small" if "sick" not in request.fixturenames else "sick")
    made = Rig(getattr(disk, "disk", disk), tmp_path)
    yield made
    made.close()


def test_full(small: pathlib.Path, rig: Rig) -> None:
    """A full disk fails saves at their deadline and says so; with room made they are published again."""
    rig.must_go_on()
    stat = os.statvfs(small)
    (small / "hog").write_bytes(bytes(stat.f_bavail * stat.f_frsize))
    assert "0 B free" in failed(rig.save())
    assert rig.published() == [1]
    (small / "hog").unlink()
    rig.must_go_on()


def test_read_only(small: pathlib.Path, rig: Rig) -> None:
    """Remounted read-only under the run, as kernels do after errors: the save fails by that name, until it is back."""
    rig.must_go_on()
    mount(b"tmpfs", small, MS_REMOUNT | MS_RDONLY)
    assert "Read-only" in failed(rig.save())
    mount(b"tmpfs", small, MS_REMOUNT)
    rig.must_go_on()
    assert rig.published() == [1, 3]


def test_hung(sick: Sick, rig: Rig) -> None:
    """A disk that hangs costs each save its deadline and no more; after HUNG_MAX each fails at once by that name; what
    hung publishes nothing when the disk comes back, and saves go on."""
    rig.must_go_on()
    sick.now("hang")
    for _ in range(HUNG_MAX):
        assert "hangs" in failed(rig.save())
    began_ns = rig.platform.boot_ns()
    assert "it hangs" in failed(rig.save(WAIT_S)) and rig.platform.boot_ns() - began_ns < WAIT_S / 2 * 1e9
    sick.now("well")
    rig.must_go_on()
    assert not set(rig.published()) & set(range(2, 3 + HUNG_MAX))


def test_slow(sick: Sick, rig: Rig) -> None:
    """Slower than the deadline allows a save fails, with time enough it is published."""
    sick.now("slow 0.4")
    what = failed(rig.save())
    assert "too slow" in what or "hangs" in what
    rig.must_go_on()


@pytest.mark.parametrize(("every", "published"), [(3, 0), (20, 4)])
def test_flapping(sick: Sick, rig: Rig, every: int, published: int) -> None:
    """A disk that refuses some changes: where one in a whole save fails, another try in a new folder is published;
    where each try meets some, saves fail by that name; what is published is whole."""
    sick.now(f"flap {every}")
    results = [rig.save(5.0) for _ in range(4)]
    assert len(rig.published()) == published
    for result in results:
        assert result is not None and (result.error is None or "Input/output" in result.error["what"])
    assert sick.refused() >= 2
    sick.now("well")
    rig.must_go_on()


def test_a_whole_run_beside_a_disk_that_hangs(sick: Sick, tmp_path: pathlib.Path) -> None:
    """Under a whole run whose checkpoints lie on a disk that hangs, saves go on at the fall-back, the carrier is given
    up though SIGKILL does not end it, the next one keeps off that disk and takes it back when it answers."""
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    for folder in (run, scratch, sick.disk / "checkpoints"):
        folder.mkdir()
    (run / "checkpoints").symlink_to(sick.disk / "checkpoints")
    toy = {"steps": 100_000, "step_s": 0.02, "save_every": 50, "deadline_s": 4.0}
    with driven(run, toy, carrier_overdue_s=5.0, fallback=[str(scratch)]) as driven_run:
        driven_run.until_step(100)
        sick.now("hang")
        (stuck,) = [one for one in processes(run) if "packtrain.checkpoint.carrier" in one.cmdline()]
        assert str(run) in driven_run.until("say warning: [checkpoint.carrier_hung]")
        carried = len(places(run))
        while not any(places(run)[carried:]):
            LocalPlatform().sleep(0.1)
        assert in_kernel(stuck.pid), "SIGKILL was to find it where it cannot die"
        sick.now("well")
        assert str(run) in driven_run.until(f"say {run} answers again")
        back = len(places(run))
        while all(places(run)[back:]):
            LocalPlatform().sleep(0.1)
        driven_run.signal(signal.SIGINT)
        assert driven_run.end()[0] == 75
    assert "" in places(run)[:2] and saved_state(run)[0] == restore_point(run).step
    assert len(records(run, CarrierGivenUp)) == len(records(run, HomeBack)) == len(records(run, AttemptBegan)) == 1


def places(run: pathlib.Path) -> list[str]:
    """Of each published save: where it fell back to, or nothing."""
    return [commit.place for commit in log(run).all() if commit.kind == "save"]


def in_kernel(pid: int) -> bool:
    """Whether a thread of it waits for a disk and for nothing else."""
    tasks = f"/proc/{pid}/task"
    states = [LocalPlatform().read(f"{tasks}/{task}/stat").decode() for task in os.listdir(tasks)]
    return any(state.rpartition(")")[2].split()[0] == "D" for state in states)
