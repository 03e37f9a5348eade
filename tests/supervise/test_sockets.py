"""The folder of a run's sockets, the beat socket, and signals as requests."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from packtrain.core.contract import Beat, Beats
from packtrain.core.errors import RunUnusable
from packtrain.core.platform import LocalPlatform, Process
from packtrain.supervise import local
from packtrain.supervise.job import Job
from packtrain.supervise.requests import listening
from packtrain.supervise.sockets import BEATS_AT_ONCE_MAX, PATH_BYTES_MAX, BeatSocket

PLATFORM = LocalPlatform()


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for sockets, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder:
        yield pathlib.Path(folder)


class Quiet(LocalPlatform):
    """Coordinator and agents end at once."""

    def spawn(self, command: Sequence[str], *args: Any, **options: Any) -> Process:
        return super().spawn(("true",), *args, **options)


def folder_of(base: pathlib.Path, name: str, runtime_dir: pathlib.Path, platform: LocalPlatform | None = None) -> str:
    """Where the sockets of a run that is started now lie."""
    platform, run = platform or Quiet(), str(base / name)
    platform.mkdir(run)
    job = Job(name=name, run_folder=run, worker=("true",), carrier=(), version="1")
    keeper = local.start(platform, job, {"XDG_RUNTIME_DIR": str(runtime_dir)})
    for process in keeper.started.values():
        process.wait()
    return keeper.live.base


def test_what_a_killed_run_left_is_reused(base: pathlib.Path) -> None:
    """The name follows from the run, so who starts it again empties and uses the folder that is there; another run has
    another one, and only this user can enter any."""
    first = folder_of(base, "a", base)
    pathlib.Path(first, "c", "stale").write_text("stale")
    assert folder_of(base, "a", base) == first and not pathlib.Path(first, "c", "stale").exists()
    assert folder_of(base, "b", base) != first and stat.S_IMODE(os.lstat(first).st_mode) == 0o700


def test_a_squatted_name_is_not_used(base: pathlib.Path) -> None:
    """A folder of our name that is open to others is passed over and left alone."""
    name = folder_of(base, "a", base)
    os.chmod(name, 0o755)
    assert folder_of(base, "a", base) != name and pathlib.Path(name, "job.json").exists()


def test_a_long_base_is_passed_over(base: pathlib.Path) -> None:
    """Where XDG_RUNTIME_DIR would make a socket path too long, /tmp is used."""
    deep = base / ("x" * 90)
    deep.mkdir()
    folder = folder_of(base, "a", deep)
    assert folder.startswith("/tmp/pt-") and len(f"{folder}/n000/control.json") < PATH_BYTES_MAX
    shutil.rmtree(folder)


def test_no_folder_is_one_message(base: pathlib.Path) -> None:
    """Where none can be made private, or looked into, the error says which places were tried."""

    class Refusing(Quiet):
        def mkdir(self, path: str, mode: int = 0o755) -> None:
            if mode == 0o700:
                raise OSError(30, "read-only")
            super().mkdir(path, mode)

    class Unlistable(Quiet):
        def listdir(self, path: str) -> list[str]:
            raise OSError(5, "Input/output error", path)

    for platform in (Refusing(), Unlistable()):
        with pytest.raises(RunUnusable) as caught:
            folder_of(base, "a", base, platform)
        assert "XDG_RUNTIME_DIR" in caught.value.where


def arrived(beats: BeatSocket) -> list[Beat]:
    return [one for one in beats.arrived() if isinstance(one, Beat)]


@pytest.fixture
def beats(tmp_path: pathlib.Path) -> BeatSocket:
    return BeatSocket(PLATFORM, str(tmp_path / "beats"))


def test_beats_arrive_and_rubbish_is_counted(beats: BeatSocket) -> None:
    """Beats of this user are returned in order; datagrams that are none are counted and dropped."""
    sender = Beats(beats.path, attempt=3, repeat_s=3600.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for rubbish in (b"", b"{", b"\xff" * 5000, b'{"seq":1}'):
            stranger.sendto(rubbish, beats.path)
    sender.step_done(7)
    assert [(beat.attempt, beat.step) for beat in arrived(beats)] == [(3, -1), (3, 7)]
    assert beats.refused == 4
    sender.close()
    beats.close()


@pytest.mark.root
def test_beats_of_other_users_are_dropped(base: pathlib.Path) -> None:
    """A datagram that the kernel saw another user send is counted and dropped, whatever it says."""
    beats = BeatSocket(PLATFORM, f"{base}/beats")
    base.chmod(0o755)
    os.chmod(beats.path, 0o666)
    code = "import os, sys; from socket import *; sender = socket(AF_UNIX, SOCK_DGRAM); os.setuid(65534); " \
        "sender.sendto(sys.argv[2].encode(), sys.argv[1])"
    beat = '{"seq":1,"attempt":1,"rank":0,"pid":9,"phase":"step","step":5,"ns":{}}'
    subprocess.run([sys.executable, "-I", "-S", "-c", code, beats.path, beat], check=True)
    assert arrived(beats) == [] and beats.refused == 1
    os.chmod(beats.path, 0o600)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.sendto(beat.encode(), beats.path)
    assert [one.step for one in arrived(beats)] == [5]
    beats.close()


class Endless:
    """A socket in which there is always another beat of this user."""

    def __init__(self) -> None:
        self.received = 0

    def setsockopt(self, *args: object) -> None: ...

    def recvmsg(self, size: int, ancillary_size: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        self.received += 1
        assert self.received < 10_000, "one drain goes on and on"
        who = struct.pack("iII", os.getpid(), os.getuid(), os.getgid())
        beat = b'{"seq":%d,"attempt":1,"rank":0,"pid":9,"phase":"step","step":5,"ns":{}}' % self.received
        return beat, [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)], 0, None


def test_draining_is_bounded(beats: BeatSocket) -> None:
    """One drain takes a bounded number of beats though more keep coming, and returns with nothing there too."""

    class Flooded(LocalPlatform):
        def datagram_receiver(self, path: str) -> socket.socket:
            return Endless()  # type: ignore[return-value]

    flooded = BeatSocket(Flooded(), "/none")
    assert len(arrived(flooded)) == BEATS_AT_ONCE_MAX
    assert arrived(flooded)[0].seq == BEATS_AT_ONCE_MAX + 1
    assert arrived(beats) == []
    beats.close()


def test_a_place_that_refuses_is_one_message(base: pathlib.Path) -> None:
    """A socket that cannot be made is run.unusable, with the place."""
    with pytest.raises(RunUnusable, match="none/beats"):
        BeatSocket(PLATFORM, str(base / "none" / "beats"))


def test_signals_become_requests() -> None:
    """Inside, signals are counted and read later; afterwards the handlers are those from before."""
    before = signal.getsignal(signal.SIGTERM)
    with listening() as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert sorted(requests.take()) == ["SIGINT", "SIGTERM"] and requests.take() == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_nohup_is_respected() -> None:
    """A SIGHUP that was to be ignored stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening() as requests:
            os.kill(os.getpid(), signal.SIGHUP)
            assert requests.take() == []
    finally:
        signal.signal(signal.SIGHUP, before)
