"""Faults on purpose in real runs, asked for as a person asks: each leads to its remedy, and is in the report.

Worlds without a framework; what needs a carrier has the toy as its worker.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from packtrain.core.errors import FaultsForbidden
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    CoordinatorBegan,
    ErrorSeen,
    FaultInjected,
    FaultMissed,
    NodeBack,
    NodeLost,
    RunFinished,
    StacksTaken,
)
from packtrain.monitor.report import report
from tests.supervise.live import HERE, ROOT, Live, live
from tests.supervise.runs import expected, records, saved_state

# Coordinators and agents outlive on purpose whoever started them, so nobody waits for them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
CARRIER = (sys.executable, "-P", "-m", "packtrain.checkpoint.carrier")
DONE = "done"


def reasons(folder: pathlib.Path) -> list[str]:
    return [one.reason for one in records(folder, AttemptEnded)]


@pytest.mark.soak
def test_a_run_that_does_not_allow_it_is_not_broken(tmp_path: pathlib.Path) -> None:
    """One error that says how it could be; the run does not notice."""
    with live(tmp_path / "run", nodes=1) as run:
        run.step(1, 2)
        with pytest.raises(FaultsForbidden):
            run.broken("kill")
        assert run.finish().reason == DONE
    assert not records(run.folder, FaultInjected) and len(records(run.folder, AttemptBegan)) == 1


def test_a_run_is_broken_again_and_again_and_ends_well(tmp_path: pathlib.Path) -> None:
    """A killed rank, one that runs out of memory, a killed agent and a killed coordinator: after each the run goes on,
    and its report tells what was broken on purpose."""
    with live(tmp_path / "run", spares=1, allow_faults=True, node_silent_s=2.0, node_lost_s=3.0) as run:
        run.step(1, 3)
        assert run.broken("kill", rank=0).startswith("kill: SIGKILL to a worker, rank 0 on n")
        run.step(2, 6)
        run.broken("oom")
        run.step(3, 9)
        run.broken("kill-coordinator")
        run.until(lambda status: not status)
        run.keeper.coordinator()
        run.step(3, 20)
        run.broken("kill-agent")
        run.step(4, 25)
        assert run.finish().reason == DONE
    first, second, third, last = reasons(run.folder)
    assert "SIGKILL" in first and "MemoryError" in second and "n" in third and last == "done"
    assert [one.fault for one in records(run.folder, FaultInjected)] == [
        "kill", "oom", "kill-coordinator", "kill-agent"
    ]
    assert len(records(run.folder, CoordinatorBegan)) == 2 and len(records(run.folder, NodeLost)) == 1
    told = report(run.platform, str(run.folder))
    assert "broken on purpose: 4" in told and "attempt 2: oom of rank 1 on" in told


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("segfault", "SIGSEGV"), ("exit-1", "exit code 1"), ("exit-75", "asked to be started again"),
        ("hang", "silent for"), ("stop", "silent for"),
    ],
)
def test_a_worker_is_broken(tmp_path: pathlib.Path, fault: str, reason: str) -> None:
    """Its world begins another attempt, for that reason; of one that hangs its stack was taken."""
    with live(tmp_path / "run", allow_faults=True, beat_overdue_s=5.0) as run:
        run.step(1, 3)
        run.broken(fault)
        run.step(2, 10)
        assert run.finish().reason == DONE
    assert reason in reasons(run.folder)[0]
    if fault == "hang":
        stacks = {one.rank: one.text for one in records(run.folder, StacksTaken)}
        assert "_hang" in stacks[1] or "step" in stacks[1], stacks


@pytest.mark.soak
def test_a_configuration_that_is_refused_ends_the_run(tmp_path: pathlib.Path) -> None:
    """Exit 78 is never followed by another attempt."""
    with live(tmp_path / "run", allow_faults=True) as run:
        run.step(1, 3)
        run.broken("exit-78")
        assert run.finish(enough=False).exit_code == 78
    assert len(records(run.folder, AttemptBegan)) == 1


@pytest.mark.soak
@pytest.mark.parametrize(("fault", "lost"), [("cut", 1), ("flap", 0)])
def test_a_link_is_broken(tmp_path: pathlib.Path, fault: str, lost: int) -> None:
    """A node that is cut off for longer than `node_lost_s` is lost, its spare works on, and it comes back as one; a
    link that flaps costs nothing."""
    with live(tmp_path / "run", spares=1, allow_faults=True, node_silent_s=2.0, node_lost_s=4.0) as run:
        run.step(1, 3)
        run.broken(fault, seconds=10.0)
        run.step(1 + lost, 60)
        if lost:
            run.until(lambda status: all(node["state"] in ("running", "spare") for node in status["nodes"]))
        assert run.finish().reason == DONE
    assert len(records(run.folder, NodeLost)) == lost == len(records(run.folder, NodeBack))
    assert len(records(run.folder, AttemptBegan)) == 1 + lost


@pytest.mark.soak
def test_a_straggler_is_replaced(tmp_path: pathlib.Path) -> None:
    """At 70% of the others' speed for half a minute a node gives way to a spare."""
    options = {"allow_faults": True, "replace_stragglers": True}
    with live(tmp_path / "run", nodes=3, spares=1, **options) as run:
        run.step(1, 3)
        said = run.broken("slow", seconds=300.0, factor=1.6)
        slow = said.rpartition(" on ")[2].partition(",")[0]
        status = run.step(2, 3)
        assert next(node for node in status["nodes"] if node["node"] == slow)["state"] == "spare"
        assert run.finish().reason == DONE
    assert "is slow" in reasons(run.folder)[0]


# --- with a carrier ------------------------------------------------------------------------------------


@contextmanager
def saving(folder: pathlib.Path, steps: int, **supervise: Any) -> Iterator[Live]:
    """A run of one node whose worker saves every ten steps, and waits for each save."""
    toy = {"steps": steps, "save_every": 10, "wait": True, "step_s": 0.02, "deadline_s": 60.0}
    job = {
        "worker": (sys.executable, str(HERE / "toy_worker.py")), "carrier": CARRIER,
        "env": dict(os.environ, PYTHONPATH=str(ROOT), TOY=json.dumps(toy)),
    }
    with live(folder, nodes=1, job=job, allow_faults=True, **supervise) as run:
        yield run


def warnings(folder: pathlib.Path) -> list[str]:
    return [one.name for one in records(folder, ErrorSeen)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "seconds", "seen"),
    [
        ("kill-carrier", 0.0, lambda folder: "checkpoint.carrier_lost" in warnings(folder)),
        ("disk-full", 3.0, lambda folder: len(reasons(folder)) == 1),
        ("disk-read-only", 3.0, lambda folder: len(reasons(folder)) == 1),
        ("disk-stall", 30.0, lambda folder: len(reasons(folder)) == 1),
    ],
)
def test_what_saves_is_broken(
    tmp_path: pathlib.Path, fault: str, seconds: float, seen: Callable[[pathlib.Path], bool]
) -> None:
    """The worker is not touched: the same attempt ends with its last step saved, once the disk is well again."""
    with saving(tmp_path / "run", 120, carrier_overdue_s=60.0) as run:
        run.step(1, 25)
        run.broken(fault, seconds=seconds)
        assert run.finish().reason == DONE, reasons(run.folder)
    assert seen(run.folder), warnings(run.folder)
    assert len(records(run.folder, AttemptBegan)) == 1 and saved_state(run.folder) == expected(120)


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["corrupt", "delete"])
def test_the_newest_checkpoint_is_broken(tmp_path: pathlib.Path, fault: str) -> None:
    """A restart finds it, says so, goes back to the save before it, and ends with the bits of a quiet run."""
    with saving(tmp_path / "run", 400) as run:
        run.step(1, 25)
        run.broken(fault)
        run.broken("kill")
        assert run.finish().reason == DONE, reasons(run.folder)
    assert "checkpoint.damaged" in warnings(run.folder)
    assert saved_state(run.folder) == expected(400) and not records(run.folder, FaultMissed)


@pytest.mark.soak
def test_a_checkpoint_that_is_not_there_is_missed(tmp_path: pathlib.Path) -> None:
    """Nothing is broken, and that is in the journal."""
    with live(tmp_path / "run", nodes=1, allow_faults=True) as run:
        run.step(1, 2)
        run.broken("delete")
        run.step(1, 20)
        assert run.finish().reason == DONE
    (missed,) = records(run.folder, FaultMissed)
    assert missed.why == "there is no checkpoint yet"
    assert records(run.folder, RunFinished)[0].exit_code == 0
