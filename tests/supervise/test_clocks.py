"""A real agent and its worker in a time namespace: a clock that is a day ahead of its coordinator's."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from packtrain.supervise.messages import EndWorkers, RankEnded, RankPhase, RankSilent
from tests.supervise.agents import scene, script
from tests.supervise.test_agent_process import STEPS, launch

AHEAD = ("unshare", "--time", "--boottime", "86400", "--monotonic", "86400", "--fork", "--kill-child")


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for sockets, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp") as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def ahead() -> tuple[str, ...]:
    """What stands before a command that is to live in another clock."""
    if shutil.which("unshare") is None or subprocess.run((*AHEAD, "true"), capture_output=True).returncode:
        pytest.skip("a time namespace needs root and a kernel that has it (5.6)")
    return AHEAD


@pytest.mark.soak
def test_a_node_whose_clock_is_a_day_ahead(base: pathlib.Path, ahead: tuple[str, ...]) -> None:
    """It joins, its worker steps, silence is told after the same three seconds, and what is ended is told: no time of
    one machine is ever compared with that of another."""
    with scene(base, script(STEPS)) as one:
        one.before = ahead
        one.joined()
        one.coordinator.ask(1, launch())
        one.until(lambda: any(e.phase == "steps" for e in one.coordinator.of(RankPhase)), "steps")
        (pid,) = [found.pid for found in one.alive() if found.attempt]
        os.kill(pid, signal.SIGSTOP)
        one.until(lambda: one.coordinator.of(RankSilent), "silence")
        assert 2.5 < one.coordinator.of(RankSilent)[0].seconds < 60
        one.coordinator.ask(2, EndWorkers(attempt=1, reason="silent"))
        one.until(lambda: one.coordinator.of(RankEnded), "an end")
