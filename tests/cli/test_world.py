"""A run of several nodes: its table of worlds, its spec, and which command starts it and which finds it."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from packtrain.cli import spec
from packtrain.cli.launch import PRELOAD, child_env
from packtrain.cli.world import World, alive, ended, record, table
from packtrain.core.errors import LayoutError, RunHeld
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform, explore, fail, power_cut
from packtrain.core.holder import hold
from packtrain.core.pinned import KEY_FILE
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from packtrain.recipes.spec import RunSpec
from packtrain.supervise import local
from packtrain.supervise.job import Job
from packtrain.supervise.keys import read_allowed, read_keys
from packtrain.train.config import TrainConfig
from packtrain.train.sections import newest_spec
from tests.cli.home import call, packtrain, said
from tests.cli.stand_in import standing_in

NODES = World(nodes=3, spares=0, procs=1)
WORLDS = {"3": {"replica": 3}, "2": {"fsdp": 2}, "1": {"fsdp": 1}}


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt-") as path:
        yield pathlib.Path(path) / "b"


def test_worlds_are_made_by_a_process_that_knows(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the spec, the largest first; what is left out is said with the reason; a table of the person's stands."""
    platform, env = LocalPlatform(), child_env() | {"JAX_PLATFORMS": "cpu"}
    wanted = RunSpec(recipe="first-light", train=TrainConfig(mesh={"tensor": 2}))
    made = table(platform, wanted, str(tmp_path), World(nodes=2, spares=1, procs=1), env)
    assert made.train.worlds == {"2": {"tensor": 2}}
    assert "with 1 node this run could not go on" in capsys.readouterr().out
    own = msgspec.structs.replace(wanted, overrides=("train.worlds={}",))
    assert table(platform, own, str(tmp_path), NODES, {}) is own


def test_a_world_that_cannot_be_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Where the mesh takes another number of devices than there are, as everywhere."""
    wanted = RunSpec(recipe="first-light", train=TrainConfig(mesh={"fsdp": 8}))
    with pytest.raises(LayoutError, match="takes 8 devices, but there are 3"):
        table(LocalPlatform(), wanted, str(tmp_path), NODES, child_env() | {"JAX_PLATFORMS": "cpu"})


def test_a_spec_is_written_anew_only_when_it_says_something_else(tmp_path: pathlib.Path) -> None:
    """Another table is the next number; the same is the same."""
    platform, first = LocalPlatform(), RunSpec(recipe="first-light")
    (tmp_path / "spec").mkdir()
    (tmp_path / "spec" / "0001.toml").write_text(spec.text(first))
    assert record(platform, newest_spec(platform, str(tmp_path)), first) == 1
    other = msgspec.structs.replace(first, train=TrainConfig(worlds=WORLDS))
    assert [record(platform, newest_spec(platform, str(tmp_path)), other) for _ in range(2)] == [2, 2]
    assert spec.read(newest_spec(platform, str(tmp_path))) == other


def test_of_two_changes_at_once_one_is_told_to_come_again(tmp_path: pathlib.Path) -> None:
    """It was made from a spec that is not the newest any more, and would take back what the other one changed."""
    platform, first = LocalPlatform(), RunSpec(recipe="first-light")
    (tmp_path / "spec").mkdir()
    (tmp_path / "spec" / "0001.toml").write_text(spec.text(first))
    newest = newest_spec(platform, str(tmp_path))
    mine, other = (msgspec.structs.replace(first, seed=seed) for seed in (1, 2))
    assert record(platform, newest, other) == 2
    with pytest.raises(RunHeld, match="just now"):
        record(platform, newest, mine)
    assert sorted(os.listdir(tmp_path / "spec")) == ["0001.toml", "0002.toml"]
    assert spec.read(newest_spec(platform, str(tmp_path))) == other


@pytest.mark.parametrize("op", ["create", "write", "fsync", "link"])
def test_a_spec_is_there_whole_or_not_at_all(op: str) -> None:
    """The newest spec is read by whoever begins an attempt: a disk that gets full leaves none that is cut."""
    platform = FakePlatform(FakeDisk(), "a")
    platform.mkdir("/run/spec")
    platform.faults = lambda found, path, n: fail(errno.ENOSPC) if found == op else None
    with pytest.raises(OSError, match="No space left"):
        spec.write(platform, "/run/spec/0002.toml", spec.text(RunSpec(recipe="first-light")).encode())
    platform.faults = None
    assert platform.listdir("/run/spec") == []


def test_a_spec_that_was_written_stays() -> None:
    """Wherever the power fails meanwhile its number is free or has all of it; when it is told as written it has it."""
    data, found = spec.text(RunSpec(recipe="first-light")).encode(), set()
    for cut_at, choices in ((at, choices) for at in range(1, 12) for choices in explore()):
        disk, written = FakeDisk(), False
        FakePlatform(disk, "a").mkdir("/run/spec")
        disk.sync_all()
        platform = FakePlatform(disk, "a", faults=lambda op, path, n, at=cut_at: power_cut() if n == at else None)
        with suppress(FakeCrash):
            written = spec.write(platform, "/run/spec/0002.toml", data)
        after = platform.crash(choices)
        found.add((written, after.read("/run/spec/0002.toml") if after.exists("/run/spec/0002.toml") else b""))
    assert found == {(False, b""), (False, data), (True, data)}


@pytest.mark.parametrize("options", [("--spares", "1"), ("--nodes", "-1"), ("--nodes", "2", "--procs-per-node", "0")])
def test_numbers_that_cannot_be_are_refused(
    home: pathlib.Path, store: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is made."""
    assert call("train", "first-light", "--data", store, *options) == 2
    assert "--nodes" in capsys.readouterr().err and not (home / "runs").exists()


# --- where a run lives ---------------------------------------------------------------------------------


def test_a_run_lives_where_somebody_answers(tmp_path: pathlib.Path, base: pathlib.Path) -> None:
    """Not where a dead one left its folder; and where somebody else holds it that is said."""
    platform, run = LocalPlatform(), str(tmp_path / "run")
    with standing_in(run, base):
        found = alive(platform, run)
        assert found is not None and (found.base, found.coordinator) == (str(base), f"{base}/c")
    assert alive(platform, run) is None and local.find(platform, run) is not None
    lock = hold(platform, run, "other")
    with pytest.raises(RunHeld, match="other"):
        alive(platform, run, start_s=0.2)
    lock.release()


def test_a_run_lives_while_an_agent_does(tmp_path: pathlib.Path, base: pathlib.Path) -> None:
    """An agent is known by its home in its command line: another process of that number is none."""
    platform, run = LocalPlatform(), str(tmp_path / "run")
    with standing_in(run, base):
        pass
    live = local.find(platform, run)
    assert live is not None
    waits = [sys.executable, "-c", "input()", f"{base}/c"]
    pipe = subprocess.PIPE
    with subprocess.Popen(waits[:3], stdin=pipe) as other, subprocess.Popen(waits, stdin=pipe) as agent:
        both = msgspec.structs.replace(live, agents={"n0": other.pid, "c": agent.pid, "n2": 2**22 + 1})
        platform.write_replacing(f"{run}/{local.LIVE}", msgspec.json.encode(both))
        try:
            assert local.agents_alive(platform, both) == ["c"]
            assert alive(platform, run) == both
        finally:
            other.kill()
            agent.kill()


class Busy(LocalPlatform):
    """On which a process takes some looks to end."""

    def __init__(self, process: subprocess.Popen[bytes], looks: int) -> None:
        super().__init__()
        self.looks = looks
        self._process = process

    def sleep(self, seconds: float) -> None:
        self.looks -= 1
        if not self.looks:
            self._process.kill()
            self._process.wait()


@pytest.mark.parametrize("cleared", [False, True])
def test_a_command_ends_when_the_coordinator_has(tmp_path: pathlib.Path, base: pathlib.Path, cleared: bool) -> None:
    """It holds the run until its process is over, and the next command would be refused: whether it left its homes to
    whoever watched, or had cleared them away itself."""
    run = str(tmp_path / "run")
    with standing_in(run, base):
        pass
    live = local.find(LocalPlatform(), run)
    assert live is not None
    waits, pipe = [sys.executable, "-c", "print(flush=True); input()", "--home", live.coordinator], subprocess.PIPE
    with subprocess.Popen(waits, stdin=pipe, stdout=pipe) as coordinator:
        assert coordinator.stdout is not None and coordinator.stdout.readline()  # before, it has no command line
        platform = Busy(coordinator, looks=3)
        note = {"job": "run", "pid": coordinator.pid, "node": platform.node(), "since": "now"}
        (pathlib.Path(run) / "holder").write_text(json.dumps(note))
        if cleared:
            local.clean(platform, live)
        assert ended(platform, live, local.Finish(75, "stopped"), "run") == 75
        assert platform.looks <= 0 and coordinator.poll() is not None
    assert not base.exists() and local.find(platform, run) is None


class Held(LocalPlatform):
    """On which a process seems to live for so long, in seconds of a clock that sleeps set."""

    def __init__(self, home: str, lasts_s: float) -> None:
        super().__init__()
        self.now_s, self._home, self._lasts_s = 0.0, home, lasts_s

    def boot_ns(self) -> int:
        return round(self.now_s * NS)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        if path.startswith("/proc/"):
            return self._home.encode() if self.now_s < self._lasts_s else b""
        return super().read(path, offset, size)


@pytest.mark.parametrize(("lasts_s", "said"), [(1.5, []), (5.0, ["process 7"]), (99.0, ["process 7", "has not ended"])])
def test_a_coordinator_that_takes_long_to_end_is_told(tmp_path: pathlib.Path, lasts_s: float, said: list[str]) -> None:
    """After two seconds nobody waits without a word; after sixty nobody waits, and what that means is said."""
    live = local.Live(str(tmp_path), str(tmp_path / "base"), "here", {})
    platform, told = Held(live.coordinator, lasts_s), list[str]()
    (tmp_path / "holder").write_text(json.dumps({"job": "it", "pid": 7, "node": platform.node(), "since": "now"}))
    local.wait_until_free(platform, live, told.append)
    assert len(told) == len(said) and all(word in line for word, line in zip(said, told))
    assert platform.now_s < min(lasts_s, local.FREE_S) + 0.1


def test_a_run_that_somebody_starts_again_is_left_alone(tmp_path: pathlib.Path, base: pathlib.Path) -> None:
    """It may live in the same place."""
    platform, run = LocalPlatform(), str(tmp_path / "run")
    with standing_in(run, base):
        live = local.find(platform, run)
        assert live is not None
        lock = hold(platform, run, "another command", file="launcher")
        assert ended(platform, live, local.Finish(0), "run") == 0 and local.find(platform, run) == live
        lock.release()


def test_a_folder_others_can_enter_is_not_believed(tmp_path: pathlib.Path, base: pathlib.Path) -> None:
    """Somebody could have put a socket there."""
    platform, run = LocalPlatform(), str(tmp_path / "run")
    with standing_in(run, base):
        base.chmod(0o755)
        assert local.find(platform, run) is None


def test_a_copy_of_a_run_is_not_that_run(
    home: pathlib.Path, base: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While that one lives, words for the copy reach nobody, and its command starts nothing and says who holds it; when
    it is put away only its own files go."""
    platform, (run, copy) = LocalPlatform(), (home / "runs" / name for name in ("it", "copy"))
    (run / "spec").mkdir(parents=True)
    (run / "spec" / "0001.toml").write_text(spec.text(RunSpec(recipe="first-light")))
    with standing_in(str(run), base) as there:
        lock = hold(platform, str(run), "it")
        shutil.copytree(run, copy)
        assert local.find(platform, str(copy)) is None
        for words in (("stop", "copy"), ("attach", "copy")):
            code, _, errors = said(capsys, *words)
            assert code == 78 and "run.not_live" in errors
        with pytest.raises(RunHeld, match="job 'it'"):
            alive(platform, str(copy))
        assert there.asked == [] and local.find(platform, str(run)) is not None
        lock.release()


def test_a_run_is_found_by_any_name_of_its_folder(tmp_path: pathlib.Path, base: pathlib.Path) -> None:
    """Not by a new one that it was given while it lived: its processes do not know that one. It says who holds it, and
    the old name, as a link too, finds it again."""
    platform, run, other = LocalPlatform(), tmp_path / "run", tmp_path / "other"
    with standing_in(str(run), base):
        other.symlink_to(run)
        assert all(alive(platform, str(path)) is not None for path in (run, other))
        other.unlink()
        lock = hold(platform, str(run), "it")
        run.rename(other)
        assert local.find(platform, str(other)) is None
        with pytest.raises(RunHeld, match="job 'it'"):
            alive(platform, str(other))
        run.symlink_to(other)
        assert all(alive(platform, str(path)) is not None for path in (run, other))
        lock.release()


@pytest.mark.parametrize("job", [None, b"", b"{}", b"\xff", b'{"run_folder":"/nowhere"}'])
def test_a_folder_that_no_run_made_is_not_believed(
    tmp_path: pathlib.Path, base: pathlib.Path, job: bytes | None
) -> None:
    """What a note names would be cleared away at the end: it must say itself that it is of this run."""
    platform, run = LocalPlatform(), str(tmp_path / "run")
    with standing_in(run, base):
        path = base / local.JOB
        path.unlink() if job is None else path.write_bytes(job)
        assert local.find(platform, run) is None


def test_all_of_a_run_is_started_and_cleared(tmp_path: pathlib.Path, base: pathlib.Path) -> None:
    """Homes that only this user can enter, a job, keys of which the coordinator allows those of the agents, a process
    for each; and nothing is left afterwards outside the run's folder."""
    platform, run = LocalPlatform(), str(tmp_path / "run")
    platform.mkdir(run)
    base.mkdir()
    env = dict(os.environ, XDG_RUNTIME_DIR=str(base), PYTHONPATH=str(pathlib.Path.cwd()))
    job = Job(name="it", run_folder=run, worker=("true",), carrier=(), version="1", nodes=2, spares=1, plain=True)
    keeper = local.start(platform, job, env)
    live = keeper.live
    assert sorted(live.agents) == ["n0", "n1", "n2"] and local.find(platform, run) == live
    assert live.base.startswith(str(base)) and os.stat(live.base).st_mode & 0o777 == 0o700
    allowed = read_allowed(platform, live.coordinator)
    assert allowed == {read_keys(platform, f"{live.base}/{name}")[0]: name for name in live.agents}
    assert os.stat(f"{live.base}/job.json").st_mode & 0o777 == 0o600
    secrets = {pathlib.Path(live.base, name, KEY_FILE).read_bytes() for name in live.agents}
    assert len(secrets) == 1 and os.stat(f"{live.base}/n0/{KEY_FILE}").st_mode & 0o777 == 0o600
    assert sorted(keeper.started) == ["c", "n0", "n1", "n2"]
    for process in keeper.started.values():
        process.send_signal(9)
        process.wait()
    local.clean(platform, live)
    assert os.listdir(base) == [] and not os.path.exists(f"{run}/{local.LIVE}")


def test_packtrain_train_help_names_the_options(tmp_path: pathlib.Path) -> None:
    """What a person can ask for."""
    _, out, _ = packtrain(tmp_path, "train", "--help")
    assert all(option in out for option in ("--nodes", "--spares", "--procs-per-node"))


def test_what_a_standby_imports_touches_no_device() -> None:
    """A warm process holds no accelerator, and is told its rank only when it becomes a worker."""
    look = "import {}; import jax._src.xla_bridge as bridge; assert not bridge._backends"
    done = subprocess.run([sys.executable, "-c", look.format(", ".join(PRELOAD))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
