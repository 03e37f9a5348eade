"""An ordinary DDP script under `packtrain run`, unchanged: ranks killed and hung, the same bits as an undisturbed run.

Needs torch (extra: interop-test).
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from packtrain.core.platform import LocalPlatform
from tests.cli.home import ROOT, packtrain, start

pytest.importorskip("torch", reason="torch is not installed (extra: interop-test)")
pytestmark = [pytest.mark.interop, pytest.mark.soak]
STEPS, BOUND = 400, 6000
"""`BOUND`: looks, 20 ms apart, after which it is not waited any longer."""


def script(name: str, steps: int = STEPS) -> tuple[str, ...]:
    path = str(ROOT / f"examples/{name}.py")
    return (sys.executable, path, "out", "--steps", str(steps), "--step-s", "0.01")


def quiet(folder: pathlib.Path) -> str:
    """What the last rank of a run under torchrun says in the end: the hash of the weights."""
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script("ddp")[1:])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    return hash_in(done.stdout)


def hash_in(text: str) -> str:
    return next(line.split()[-1] for line in reversed(text.splitlines()) if " done: " in line)


def rows(home: pathlib.Path) -> list[list[str]]:
    """Steps that were completed: (step, seconds, loss, pid of rank 0)."""
    path = home / "out/steps.csv"
    return [line.split(",") for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def victim(home: pathlib.Path, rank: int, attempt: int) -> int:
    """The process of a rank, found as a person would: by its environment."""
    wanted = {f"PACKTRAIN_RUN={home}/runs/".encode(), f"RANK={rank}".encode(), f"PACKTRAIN_ATTEMPT={attempt}".encode()}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                env = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if all(any(value.startswith(one) for value in env) for one in wanted):
                return int(entry.name)
    raise AssertionError(f"no process of rank {rank} in attempt {attempt}")


def stepping(home: pathlib.Path, process: subprocess.Popen[str], incarnation: int) -> None:
    """Wait until rank 0 has completed 30 steps in its n-th life."""
    for _ in range(BOUND):
        pids = [row[3] for row in rows(home)]
        lives = list(dict.fromkeys(pids))
        if len(lives) >= incarnation and pids.count(lives[-1]) >= 30:
            return
        assert process.poll() is None, process.communicate()
        LocalPlatform().sleep(0.02)
    raise AssertionError(f"no 30 steps in life {incarnation}")


@pytest.mark.parametrize("name", ["ddp", "ddp_beats"])
def test_killed_and_hung_ranks_change_nothing(tmp_path: pathlib.Path, name: str) -> None:
    """Rank 1 killed, rank 0 killed, rank 1 stopped: it goes on from its own checkpoint to the same bits."""
    (tmp_path / "quiet").mkdir()
    expected = quiet(tmp_path / "quiet")
    more = ("--set", "supervise.stopped_s=1", "--set", "supervise.attempts_without_progress=9")
    command = ("run", "--procs-per-node", "2", *more, "--", *script(name))
    with start(tmp_path, *command) as process:
        for n, (rank, signum) in enumerate([(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)], 1):
            stepping(tmp_path, process, n)
            os.kill(victim(tmp_path, rank, n), signum)
        out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, (out, errors)
    assert hash_in(out) == expected and "done: 4 attempts" in out
    steps = [int(row[0]) for row in rows(tmp_path)]
    assert steps[-1] == STEPS and set(steps) == set(range(1, STEPS + 1))


def test_a_client_of_ten_lines_saves_when_it_is_stopped(tmp_path: pathlib.Path) -> None:
    """With beats a stop saves first: the next life goes on at the very next step."""
    command = ("run", "--procs-per-node", "2", "--", *script("ddp_beats"))
    with start(tmp_path, *command) as process:
        stepping(tmp_path, process, 1)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=100)
    assert process.returncode == 75, (out, errors)
    code, out, errors = packtrain(tmp_path, *command)
    assert code == 0, (out, errors)
    steps = [int(row[0]) for row in rows(tmp_path)]
    assert steps == list(range(1, STEPS + 1))


def test_two_nodes_and_a_spare(tmp_path: pathlib.Path) -> None:
    """Four ranks on two nodes find each other over env://; a node whose agent is killed is replaced by the spare."""
    command = ("run", "--nodes", "2", "--spares", "1", "--procs-per-node", "2", "--", *script("ddp"))
    with start(tmp_path, *command) as process:
        stepping(tmp_path, process, 1)
        parent = pathlib.Path(f"/proc/{victim(tmp_path, 3, 1)}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGKILL)
        out, errors = process.communicate(timeout=250)
    assert process.returncode == 0, (out, errors)
    assert "rank 0 of 4 starts at step" in out and "done: 2 attempts" in out
    code, report, _ = packtrain(tmp_path, "report", "ddp")
    assert code == 0 and "done (0)" in report
