"""LocalPlatform on the real machine: files, locks, children, sockets. Waits are on descriptors, never on time."""

from __future__ import annotations

import errno
import os
import pathlib
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from packtrain.core import platform as door
from packtrain.core.platform import LocalPlatform

HERE = pathlib.Path(door.__file__).parents[2]
GUARD_MS = 60_000
"""Only a broken program waits this long."""

PAUSE = [sys.executable, "-c", "import signal; signal.pause()"]
REPORT_TERM = [
    sys.executable, "-c",
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit('told to stop'))\n"
    "print('ready', flush=True)\nsignal.pause()",
]
SPAWNER = """
import sys
from packtrain.core.platform import LocalPlatform
child = LocalPlatform().spawn(sys.argv[3:], {}, die_with_parent=sys.argv[1] == "tied", log_path=sys.argv[2])
print(child.pid, flush=True)
sys.stdin.read()
"""
HOLDER = """
import sys
from packtrain.core.platform import LocalPlatform
held = LocalPlatform().lock(sys.argv[1], "holder")
print("held" if held else "refused", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def platform() -> LocalPlatform:
    return LocalPlatform()


@pytest.fixture
def helper() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes started by a test; killed and reaped at its end."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def run_helper(started: list[subprocess.Popen[str]], source: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
    )
    started.append(process)
    return process


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_for_end(pidfd: int) -> None:
    """Return when the process behind `pidfd` has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(GUARD_MS), "the process lives on"


def wait_for_text(path: pathlib.Path, text: str, pidfd: int) -> None:
    """Return when `text` is in the file its living writer appends to."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while text not in path.read_text():
        assert not poll.poll(1), "the process ended without saying so"


# --- children ----------------------------------------------------------------------------------------


def test_a_tied_child_dies_with_its_parent(helper: list[subprocess.Popen[str]], tmp_path: pathlib.Path) -> None:
    """After kill -9 of the parent the kernel ends the child, whoever it has become in between."""
    parent = run_helper(helper, SPAWNER, "tied", str(tmp_path / "log"), *PAUSE)
    pidfd = os.pidfd_open(int(first_line(parent)))
    try:
        parent.kill()
        wait_for_end(pidfd)
    finally:
        os.close(pidfd)


def test_an_untied_child_lives_on(helper: list[subprocess.Popen[str]], tmp_path: pathlib.Path) -> None:
    """A child that is not tied still answers a signal after its parent was killed and reaped."""
    log = tmp_path / "log"
    parent = run_helper(helper, SPAWNER, "untied", str(log), *REPORT_TERM)
    pidfd = os.pidfd_open(int(first_line(parent)))
    try:
        wait_for_text(log, "ready", pidfd)
        parent.kill()
        parent.wait()
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        wait_for_end(pidfd)
    finally:
        os.close(pidfd)
    assert "told to stop" in log.read_text()


def test_a_child_whose_parent_is_gone_dies_at_once() -> None:
    """A parent that died before the tie was made is noticed: the command never runs."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", door.SHIM, "1", "--", sys.executable, "-c", "print('ran')"],
        capture_output=True, text=True, check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_spawn_gives_session_environment_folder_and_log(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """The child has its own session, exactly the environment and folder given, and appends to its log."""
    log = tmp_path / "log"
    log.write_text("before\n")
    program = "import os, sys; print(sorted(os.environ), os.getcwd(), os.getsid(0) == os.getpid()); sys.exit(75)"
    child = platform.spawn(
        [sys.executable, "-I", "-c", program], {"A": "1", "LC_ALL": "C.UTF-8"}, cwd=str(tmp_path), log_path=str(log)
    )
    assert child.wait(60) == 75 == child.poll()
    assert log.read_text() == f"before\n['A', 'LC_ALL'] {tmp_path} True\n"
    child.send_signal(signal.SIGTERM)


def test_waiting_and_signals(platform: LocalPlatform) -> None:
    """`wait` gives None while the child lives, then the signal that ended it as a negative number."""
    child = platform.spawn(PAUSE, {})
    assert child.poll() is None
    assert child.wait(0) is None
    child.send_signal(signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL


def test_a_command_that_is_not_there(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """A tied command that cannot start ends with the shell's codes and one line in the log; an untied one raises."""
    log = tmp_path / "log"
    assert platform.spawn([str(tmp_path / "nothing")], {}, log_path=str(log)).wait(60) == 127
    assert platform.spawn([str(tmp_path)], {}, log_path=str(log)).wait(60) == 126
    assert log.read_text() == f"{tmp_path}/nothing: No such file or directory\n{tmp_path}: Permission denied\n"
    with pytest.raises(FileNotFoundError):
        platform.spawn([str(tmp_path / "nothing")], {}, die_with_parent=False)


# --- locks -------------------------------------------------------------------------------------------


def test_a_lock_excludes_and_is_dropped_by_death(
    platform: LocalPlatform, helper: list[subprocess.Popen[str]], tmp_path: pathlib.Path
) -> None:
    """While a process holds it nobody else gets the lock or disturbs its note; kill -9 frees it."""
    path = str(tmp_path / "holder")
    holder = run_helper(helper, HOLDER, path)
    assert first_line(holder) == "held"
    assert platform.lock(path, "me") is None
    assert platform.read(path) == b"holder"
    holder.kill()
    holder.wait()
    lock = platform.lock(path, "me")
    assert lock is not None
    assert platform.read(path) == b"me"
    assert first_line(run_helper(helper, HOLDER, path)) == "refused"
    lock.release()
    lock.release()
    assert first_line(run_helper(helper, HOLDER, path)) == "held"


# --- files -------------------------------------------------------------------------------------------


def test_replacing_is_atomic(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """A reader beside the writer sees one whole version or another, and nothing is left over."""
    path = str(tmp_path / "control.json")
    versions = [bytes([65 + i % 26]) * (1 + 997 * (i % 9)) for i in range(150)]
    platform.write_replacing(path, versions[0])
    seen: list[bytes] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(platform.read(path))

    reader = threading.Thread(target=look)
    reader.start()
    for version in versions:
        platform.write_replacing(path, version)
    done.set()
    reader.join()
    assert seen and set(seen) <= set(versions)
    assert platform.listdir(str(tmp_path)) == ["control.json"]


def test_a_failed_replacement_leaves_nothing(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """Where the name cannot be replaced the error is raised and the temp name is gone."""
    target = tmp_path / "control.json"
    (target / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        platform.write_replacing(str(target), b"x")
    assert platform.listdir(str(tmp_path)) == ["control.json"]


def test_writing_takes_any_shape_of_bytes(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """Empty and many-dimensional views are written as their bytes."""
    with platform.create(str(tmp_path / "file"), 0o600) as file:
        file.write(b"")
        file.write(memoryview(np.empty((0, 3), np.int32)))
        file.write(memoryview(b"abcdef").cast("B", (2, 3)))
    assert platform.read(str(tmp_path / "file")) == b"abcdef"
    assert stat.S_IMODE(os.stat(tmp_path / "file").st_mode) == 0o600
    assert platform.free_bytes(str(tmp_path)) > 0
    assert abs(platform.modified_s(str(tmp_path / "file")) - platform.wall_s()) < 3600


def test_is_dir_and_exists_do_not_guess(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """A name that cannot be looked up is an error, not an absence."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for ask in (platform.exists, platform.is_dir):
        assert not ask(str(tmp_path / "nothing" / "below"))
        with pytest.raises(OSError) as raised:
            ask(str(loop))
        assert raised.value.errno == errno.ELOOP


def test_a_file_nobody_holds_any_more_is_closed(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """Its descriptor goes with the last reference, and closing it twice closes no other."""
    path = str(tmp_path / "file")
    file = platform.create(path)
    open_before = len(os.listdir("/proc/self/fd"))
    del file
    assert len(os.listdir("/proc/self/fd")) == open_before - 1
    again = platform.reopen(path)
    again.close()
    with platform.reopen(path) as other:
        del again
        other.write_at(3, b"x")
    assert platform.read(path) == b"\0\0\0x"


# --- time, chance, names -------------------------------------------------------------------------------


def test_clock_chance_and_name(platform: LocalPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boot time grows, tokens differ, and a node's name is safe in file names whatever the host is called."""
    before = platform.boot_ns()
    platform.sleep(0)
    assert before <= platform.boot_ns()
    assert platform.boot_id() == platform.boot_id()
    assert len({platform.token() for _ in range(100)}) == 100
    assert len(platform.token(4)) == 8
    monkeypatch.setenv("PACKTRAIN_NODE", "gpu-7/rack 3\u00e9" + "x" * 100)
    assert platform.node() == "gpu_7_rack_3_" + "x" * 51
    monkeypatch.setenv("PACKTRAIN_NODE", "")
    assert platform.node()


# --- sockets -------------------------------------------------------------------------------------------


def test_sockets_are_private_and_work(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """Both kinds of socket carry bytes and can be opened by their owner only."""
    beats, stream = str(tmp_path / "beats"), str(tmp_path / "stream")
    with platform.datagram_receiver(beats) as receiver, platform.stream_listener(stream) as listener:
        assert all(stat.S_IMODE(os.stat(path).st_mode) == 0o600 for path in (beats, stream))
        with pytest.raises(BlockingIOError):
            receiver.recv(100)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"beat", beats)
        assert receiver.recv(100) == b"beat"
        with platform.stream_connect(stream, 60) as client, listener.accept()[0] as server:
            client.sendall(b"offer")
            assert server.recv(100) == b"offer"


def test_sockets_that_cannot_be(platform: LocalPlatform, tmp_path: pathlib.Path) -> None:
    """A path too long, a name taken and a listener that is not there each raise OSError with its errno."""
    long, taken = str(tmp_path / ("x" * 120)), str(tmp_path / "taken")
    pathlib.Path(taken).touch()
    for make, path, code in (
        (platform.datagram_receiver, long, errno.ENAMETOOLONG), (platform.stream_listener, long, errno.ENAMETOOLONG),
        (platform.datagram_receiver, taken, errno.EADDRINUSE), (platform.stream_listener, taken, errno.EADDRINUSE),
        (lambda path: platform.stream_connect(path, 1), long, errno.ENAMETOOLONG),
        (lambda path: platform.stream_connect(path, 1), taken, errno.ECONNREFUSED),
        (lambda path: platform.stream_connect(path, 1), str(tmp_path / "nothing"), errno.ENOENT),
    ):
        with pytest.raises(OSError) as raised:
            make(path)
        assert raised.value.errno == code
