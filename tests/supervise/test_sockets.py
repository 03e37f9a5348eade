"""The private folder and the beat socket."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from packtrain.core.contract import Beats
from packtrain.core.errors import RunUnusable
from packtrain.core.platform import LocalPlatform
from packtrain.supervise.requests import listening
from packtrain.supervise.sockets import BEATS_AT_ONCE_MAX, PATH_BYTES_MAX, BeatSocket, private_folder

PLATFORM = LocalPlatform()


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for sockets, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder:
        yield pathlib.Path(folder)


def test_private_folder_is_ours_and_goes_away(base: pathlib.Path) -> None:
    """Inside there is a folder with mode 0700 and a short path; afterwards it and what was put into it are gone."""
    with private_folder(PLATFORM, str(base / "run"), {"XDG_RUNTIME_DIR": str(base)}) as folder:
        assert stat.S_IMODE(os.lstat(folder).st_mode) == 0o700 and folder.startswith(str(base))
        pathlib.Path(folder, "carrier").write_text("left behind")
    assert list(base.iterdir()) == []


def test_what_a_killed_foreground_left_is_reused(base: pathlib.Path) -> None:
    """The name follows from the run, so the next holder of the run empties and uses the folder of a killed one."""
    env = {"XDG_RUNTIME_DIR": str(base)}
    with private_folder(PLATFORM, "/runs/a", env) as first:
        name = first
    os.mkdir(name, 0o700)
    pathlib.Path(name, "beats").write_text("stale")
    with private_folder(PLATFORM, "/runs/a", env) as second:
        assert second == name and os.listdir(second) == []
    with private_folder(PLATFORM, "/runs/b", env) as other:
        assert other != name


def test_a_squatted_name_is_not_used(base: pathlib.Path) -> None:
    """A folder of our name that is open to others, or a link, is passed over and left alone."""
    env = {"XDG_RUNTIME_DIR": str(base)}
    with private_folder(PLATFORM, "/runs/a", env) as folder:
        name = folder
    os.mkdir(name, 0o755)
    pathlib.Path(name, "theirs").write_text("keep")
    with private_folder(PLATFORM, "/runs/a", env) as folder:
        assert folder != name and folder.startswith(name)
    assert pathlib.Path(name, "theirs").read_text() == "keep"


def test_a_long_base_is_passed_over(tmp_path: pathlib.Path) -> None:
    """Where XDG_RUNTIME_DIR would make a socket path too long, /tmp is used."""
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    with private_folder(PLATFORM, "/runs/a", {"XDG_RUNTIME_DIR": str(deep)}) as folder:
        assert folder.startswith("/tmp/") and len(f"{folder}/control.json") < PATH_BYTES_MAX


def test_no_folder_is_one_message() -> None:
    """Where no folder can be made private the error says which places were tried."""

    class Refusing(LocalPlatform):
        def mkdir(self, path: str, mode: int = 0o755) -> None:
            raise OSError(30, "read-only")

    with pytest.raises(RunUnusable, match="XDG_RUNTIME_DIR"), private_folder(Refusing(), "/runs/none", {}):
        pass


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
    beats.wait(5.0)
    assert [(beat.attempt, beat.step) for beat in beats.drain()] == [(3, -1), (3, 7)]
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
    assert beats.drain() == [] and beats.refused == 1
    os.chmod(beats.path, 0o600)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.sendto(beat.encode(), beats.path)
    assert [one.step for one in beats.drain()] == [5]
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
    assert len(flooded.drain()) == BEATS_AT_ONCE_MAX
    assert flooded.drain()[0].seq == BEATS_AT_ONCE_MAX + 1
    assert beats.drain() == []
    beats.close()


def test_a_place_that_refuses_is_one_message(base: pathlib.Path) -> None:
    """A socket that cannot be made and a folder that cannot be listed are run.unusable, with the place."""
    with pytest.raises(RunUnusable, match="none/beats"):
        BeatSocket(PLATFORM, str(base / "none" / "beats"))

    class Unlistable(LocalPlatform):
        def listdir(self, path: str) -> list[str]:
            raise OSError(5, "Input/output error", path)

    env = {"XDG_RUNTIME_DIR": str(base)}
    with pytest.raises(RunUnusable, match="Input/output"), private_folder(Unlistable(), "/runs/a", env):
        pass


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
