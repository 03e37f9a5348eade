"""What doctor concludes from what a machine says."""

from __future__ import annotations

import errno
import os
import pathlib

import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.mirrors import read_state, with_held, write_state
from packtrain.checkpoint.slots import memory_folder
from packtrain.cli import checkup, limits
from packtrain.cli.checkup import FAIL, OK, UNKNOWN, WARN, Finding
from packtrain.core.config import encode
from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import Folder
from packtrain.core.units import GIB
from packtrain.recipes.spec import RunSpec
from packtrain.supervise.config import SuperviseConfig
from tests.core.flips import Flipping, flip


class Machine(LocalPlatform):
    """This machine, with some files saying something else and so much room on every disk."""

    def __init__(self, files: dict[str, str] | None = None, free: int = 100 * GIB, links: bool = True) -> None:
        self._files, self._free, self._links = files or {}, free, links

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        return self._files[path].encode() if path in self._files else super().read(path, offset, size)

    def exists(self, path: str) -> bool:
        return path in self._files or super().exists(path)

    def free_bytes(self, path: str) -> int:
        return self._free

    def link(self, source: str, target: str) -> None:
        if not self._links:
            raise OSError(errno.EPERM, "Operation not permitted")
        super().link(source, target)


@pytest.mark.parametrize(
    ("text", "quota"),
    [("200000 100000", 2.0), ("50000 100000\n", 0.5), ("max 100000", None), ("", None), ("1 0", None)],
)
def test_quota_of_a_container(text: str, quota: float | None) -> None:
    """cpu.max is read as cores; no limit and nonsense are no quota."""
    assert checkup.cores_quota(text) == quota


def test_little_memory_is_a_warning() -> None:
    """The smaller of what is free and what the container has left counts."""
    meminfo = {
        "/proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   20971520 kB\n", "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.stat": "",
    }
    limits = {"/sys/fs/cgroup/memory.max": f"{3 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{GIB}\n"}
    assert checkup.memory(Machine({**meminfo, "/sys/fs/cgroup/memory.max": "max\n"})).verdict == OK
    tight = checkup.memory(Machine(meminfo | limits))
    assert tight.verdict == WARN and "2.0 GiB left to the container" in tight.found and tight.fix


def test_the_room_for_copies_in_memory_is_told() -> None:
    """The largest state that is kept in memory and the largest that is saved through it, and what sets that bound."""
    files = {"/proc/meminfo": "MemAvailable: 6291456 kB\n", "/proc/self/cgroup": "0::/\n"}
    roomy = checkup.shared_memory(Machine(files, free=12 * GIB))
    assert roomy.verdict == OK and "6.0 GiB free in this machine's memory" in roomy.found
    assert "up to 1.0 GiB is also kept in memory (up to 438.9 MiB at a peer node too), up to 1.5 GiB" in roomy.found
    tight = checkup.shared_memory(Machine(files, free=GIB // 4))
    assert tight.verdict == WARN and "256.0 MiB free in /dev/shm" in tight.found and tight.fix


def test_what_killed_runs_left_in_memory_is_told(tmp_path: pathlib.Path) -> None:
    """Large copies that nothing has renewed for an hour are named with the command that removes them; those of a run
    that trains, and small ones, are not."""
    platform = LocalPlatform()
    before = checkup.left_in_memory(platform)
    folder = pathlib.Path(memory_folder(str(tmp_path), "n0"))
    folder.mkdir(0o700)
    try:
        image = folder / "r00000.a0001.0.g0"
        image.touch()
        os.truncate(image, checkup.LEFT_BYTES_MIN + 1)
        assert str(folder) not in checkup.left_in_memory(platform).fix
        long_ago_s = platform.wall_s() - 2 * checkup.LEFT_S
        os.utime(image, (long_ago_s, long_ago_s))
        told = checkup.left_in_memory(platform)
        assert told.verdict == WARN and f"{folder}" in told.fix and before.fix != told.fix
        os.truncate(image, 1)
        assert str(folder) not in checkup.left_in_memory(platform).fix
    finally:
        image.unlink()
        folder.rmdir()


def test_little_disk_is_a_warning(home: pathlib.Path) -> None:
    """A disk without room for a run is named with what to do."""
    assert checkup.disk(Machine(free=100 * GIB)).verdict == OK
    full = checkup.disk(Machine(free=GIB))
    assert full.verdict == WARN and str(home) in full.found and "PACKTRAIN_HOME" in full.fix


def test_no_links_is_a_failure(home: pathlib.Path) -> None:
    """Where the commit log cannot live, doctor says so and what to do; it leaves no file behind."""
    assert checkup.links(Machine()).verdict == OK
    refused = checkup.links(Machine(links=False))
    assert refused.verdict == FAIL and refused.fix
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "output", "verdict", "says"),
    [
        (0, "devices: 8 gpu H100\n", OK, "8 gpu H100"), (None, "", FAIL, "no answer"), (1, "", FAIL, "no output"),
        (-11, "boom\nCUDA_ERROR\n", FAIL, "CUDA_ERROR"), (0, "nothing useful", FAIL, "nothing useful"),
    ],
)
def test_devices(status: int | None, output: str, verdict: str, says: str) -> None:
    """How the process that asked for devices ended, and its last words, become one line."""
    found = checkup.devices_finding(status, output)
    assert (found.verdict, says in found.found) == (verdict, True)


def test_a_store_is_judged_by_what_it_does(tmp_path: pathlib.Path) -> None:
    """A folder is fit for all but versions and locks, which are unknown; one that gives back other bytes than it took
    is a failure, and so is one that is not there, of which the rest is unknown."""
    good = checkup.store_findings(LocalPlatform(), Folder(LocalPlatform(), str(tmp_path)))
    assert [finding.verdict for finding in good] == [OK, OK, OK, UNKNOWN, UNKNOWN]
    assert list(tmp_path.iterdir()) == []
    bad = checkup.store_findings(LocalPlatform(), Flipping(Folder(LocalPlatform(), str(tmp_path)), flip("read")))
    assert (bad[0].verdict, bad[0].fix) == (FAIL, "nothing can be kept here")
    assert (bad[2].verdict, bad[2].fix) == (WARN, "it can hold copies, but no commit log")
    gone = checkup.store_findings(LocalPlatform(), Folder(LocalPlatform(), str(tmp_path / "gone")))
    assert [finding.verdict for finding in gone] == [FAIL, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN]


def test_mirrors_of_a_run(tmp_path: pathlib.Path) -> None:
    """Each is told with its cadence and what it has, then what the place does; one that cannot be reached or opened is
    a failure; none at all is a warning."""
    mirrors = (
        Mirror(name="disk", place=str(tmp_path), every_s=600.0, bytes_per_s_max=5e6, lock_days=3),
        Mirror(name="away", place=str(tmp_path / "away"), every_s=0.0),
        Mirror(name="b2", place="s3://b", secret="env:NONE"),
    )
    run, platform = tmp_path / "run", LocalPlatform()
    (run / "spec").mkdir(parents=True)
    (run / "spec" / "0001.toml").write_bytes(encode(RunSpec(recipe="test")))
    assert [(one.verdict, one.found) for one in checkup.mirror_findings(platform, str(run))] == [(WARN, "none")]
    spec = RunSpec(recipe="test", checkpoint=CheckpointConfig(mirrors=mirrors))
    (run / "spec" / "0002.toml").write_bytes(encode(spec))
    commit = Commit(number=2, kind="save", attempt=1, step=7, parent=1, nonce="", digest="", folder="f")
    state = read_state(platform, str(run), "disk", str(tmp_path))
    write_state(platform, str(run), with_held(state, commit, platform.wall_s() - 60))
    found = checkup.mirror_findings(platform, str(run))
    assert [one.verdict for one in found] == [OK] * 4 + [UNKNOWN] * 2 + [OK, FAIL] + [UNKNOWN] * 4 + [OK, FAIL]
    assert "every 10m00s, at most 4.8 MiB/s, locked for 3 days, has step 7 (1m00s ago)" in found[0].found
    assert "each save, has nothing yet" in found[6].found and "env:NONE" in found[-1].found


def test_a_check_that_breaks_is_unknown() -> None:
    """A check that cannot look says UNKNOWN, never OK, and does not stop the others."""
    broken = checkup.safely("memory", lambda machine: checkup.memory(machine), Machine({"/proc/meminfo": "rubbish"}))
    assert broken.verdict == UNKNOWN and "memory" in broken.subject


def test_missing_extras_are_warnings() -> None:
    """An extra that is not installed is a warning with the command that installs it."""
    assert checkup.extra("train", ["jax"]) == Finding(
        WARN, "extra train", "jax not found", "pip install 'packtrain[train]'"
    )
    assert checkup.extra("train", []).verdict == OK


def test_the_ladder_of_limits_is_printed() -> None:
    """Each ladder is one line from inner to outer, with the key of each limit and what it is for."""
    lines = [finding.found for finding in limits.rendered(SuperviseConfig(node_silent_s=2.5))]
    assert lines[0].startswith("2.5 s node_silent_s (") and " < 10 s node_lost_s (" in lines[0]
    assert "60 s beat_overdue_s" in lines[1] and lines[1].index("beat_overdue_s") < lines[1].index("progress_s")


def test_saves_stand_in_the_ladder() -> None:
    """What a last save may take lies within the grace; a deadline that a carrier would not live to see is a warning
    with both ways out."""
    last, patience = limits.save_limits(SuperviseConfig(grace_s=50), CheckpointConfig(deadline_s=300))
    assert last.found.startswith("40 s the last save (") and " <= 50 s grace_s (" in last.found
    assert (last.verdict, patience.verdict) == (OK, OK) and "300 s checkpoint.deadline_s" in patience.found
    last, patience = limits.save_limits(SuperviseConfig(), CheckpointConfig(deadline_s=301))
    assert (last.verdict, patience.verdict) == (OK, WARN)
    assert "carrier_overdue_s" in patience.fix and "checkpoint.deadline_s" in patience.fix
    last, _ = limits.save_limits(SuperviseConfig(), CheckpointConfig(deadline_s=7))
    assert last.found.startswith("7 s the last save")


def test_a_run_whose_limits_cannot_be_read_is_told(tmp_path: pathlib.Path) -> None:
    """A spec with limits that are out of order is a FAIL with what to raise."""
    (tmp_path / "spec").mkdir()
    text = encode(RunSpec(recipe="first-light")).replace(b"node_silent_s = 3.0", b"node_silent_s = 30.0")
    (tmp_path / "spec" / "0001.toml").write_bytes(text)
    (finding,) = limits.limit_findings(LocalPlatform(), str(tmp_path))
    assert finding.verdict == FAIL and "node_silent_s" in finding.found and "raise" in finding.fix
