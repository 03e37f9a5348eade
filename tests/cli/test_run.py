"""`packtrain run` with real processes: a program that knows nothing of Packtrain dies, hangs, is stopped, goes on."""

from __future__ import annotations

import pathlib
import signal
import sys

import pytest

from packtrain.core.platform import LocalPlatform
from tests.cli.home import packtrain, start

PROGRAM = """
import os, pathlib, signal, sys, time
attempt, rank = os.environ["PACKTRAIN_ATTEMPT"], os.environ["RANK"]
print("attempt", attempt, "rank", rank, "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_PORT"])
if rank == "1" and attempt in ("1", "2"):
    os.kill(os.getpid(), signal.SIGKILL if attempt == "1" else signal.SIGSTOP)
def save(*_):
    pathlib.Path("saved." + rank).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
while not pathlib.Path("saved." + rank).exists():
    time.sleep(0.02)
"""


def log_of(home: pathlib.Path, attempt: int, rank: int) -> str:
    path = home / f"runs/program/logs/{attempt:04d}/{rank}.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.soak
def test_a_program_is_kept_alive_and_stopped_and_goes_on(tmp_path: pathlib.Path) -> None:
    """A rank that is killed, then one that is stopped from outside, lead to other attempts with other ports; Ctrl-C is
    SIGTERM, which is not "done"; the same command goes on to the end, and the report has all of it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ("run", "--procs-per-node", "2", "--set", "supervise.stopped_s=0.5", "--", sys.executable, "program.py")
    with start(tmp_path, *command) as first:
        for _ in range(1500):
            if log_of(tmp_path, 3, 0) and log_of(tmp_path, 3, 1):
                break
            assert first.poll() is None, first.communicate()
            LocalPlatform().sleep(0.02)
        first.send_signal(signal.SIGINT)
        out, errors = first.communicate(timeout=30)
    assert first.returncode == 75, (out, errors)
    assert "attempt 2 rank 0 of 2" in out and "stopped_s" in out and "stopped on request" in errors
    told = [log_of(tmp_path, n, rank).split() for n in (1, 2, 3) for rank in (0, 1)]
    ports = {words[-1] for words in told if words}  # the rank beside one that was killed may not have come to a word
    assert len(ports) == 3
    code, out, errors = packtrain(tmp_path, *command)
    assert code == 0 and "done: 4 attempts" in out, (out, errors)
    code, report, _ = packtrain(tmp_path, "report", "program")
    assert code == 0 and "program: done" in report
    for reason in ("killed by SIGKILL", "stopped (SIGSTOP)", "stopped on request (75)", "done (0)"):
        assert reason in report, report


def test_a_program_is_left_to_itself_and_watched_again(tmp_path: pathlib.Path) -> None:
    """A terminal that goes away leaves the run alone, which is not "done"; `attach` sees it end."""
    (tmp_path / "waits.py").write_text(
        "import os, time\nprint('begun')\nwhile not os.path.exists('go'):\n    time.sleep(0.1)\n    print('waits')\n"
    )
    log = tmp_path / "runs/waits/logs/0001/0.log"
    with start(tmp_path, "run", "--", sys.executable, "waits.py") as first:
        for _ in range(1500):
            if log.exists() and log.read_text():
                break
            assert first.poll() is None, first.communicate()
            LocalPlatform().sleep(0.02)
        first.send_signal(signal.SIGHUP)
        out, errors = first.communicate(timeout=30)
    assert first.returncode == 0 and "detached: waits goes on" in out and "done:" not in out, (out, errors)
    with start(tmp_path, "attach", "waits") as second:
        assert second.stdout is not None and second.stdout.readline() == "waits\n"
        (tmp_path / "go").touch()
        out, errors = second.communicate(timeout=30)
    assert second.returncode == 0 and "attempt 1 ended: done (0)" in out, (out, errors)
