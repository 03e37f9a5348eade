"""Words: real processes that are told to stop at different moments all stop after the same step."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.train.lowering import QUICK_FLAGS

SEED = 20
DEADLINE_S = 540
"""For all episodes together, on a machine many times too busy; a rank that hangs is killed then, and the test fails."""
WORKER = pathlib.Path(__file__).with_name("words_worker.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(folder: pathlib.Path, episodes: int, rank: int, ranks: int, port: int) -> subprocess.Popen[str]:
    env = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS, "PYTHONPATH": str(pathlib.Path.cwd()),
    }
    command = [sys.executable, str(WORKER), str(folder / "journal"), str(episodes), str(SEED)]
    with open(folder / f"{rank}.log", "w") as log:
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize(("ranks", "episodes"), [(3, 20), pytest.param(4, 100, marks=pytest.mark.soak)])
def test_all_ranks_stop_after_the_same_step(tmp_path: pathlib.Path, ranks: int, episodes: int) -> None:
    """In 20 (or 100) episodes of orders and SIGTERMs that reach three (or four) skewed ranks at random moments, all
    ranks make the same number of calls and stop after the same step, and none hangs."""
    port = free_port()
    world = [launch(tmp_path, episodes, rank, ranks, port) for rank in range(ranks)]
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in world]
    finally:
        for process in world:
            process.kill()
            process.wait()
    logs = [(tmp_path / f"{rank}.log").read_text()[-2000:] for rank in range(ranks)]
    assert [process.returncode for process in world] == [0] * ranks, logs
    told = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]
    assert [len(lines) for lines in told] == [episodes] * ranks
    assert all(lines == told[0] for lines in told)
    assert all(line["step"] == line["state"] for line in told[0])
