"""Faults on purpose in real runs, asked for as a person asks: each leads to its remedy, and is in the report.

Worlds without a framework; what needs a carrier has the toy as its worker.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

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
    assert "SIGKILL" in first and "MemoryError" in second and "lost" in third and last == "done"
    assert [one.fault for one in records(run.folder, FaultInjected)] == [
        "kill", "oom", "kill-coordinator", "kill-agent"
    ]
    assert len(records(run.folder, CoordinatorBegan)) == 2
    told = report(run.platform, str(run.folder))
    for said in ("worker is killed", "worker runs out of memory", "coordinator is killed", "node is lost"):
        assert f"  a {said}" in told or f"  the {said}" in told


# --- the long way: each scene is a run of its own, all at the same time, since most of it is waiting ---


def forbidden(folder: pathlib.Path) -> None:
    """One error that says how it could be allowed; the run does not notice."""
    with live(folder, nodes=1) as run:
        run.step(1, 2)
        with pytest.raises(FaultsForbidden):
            run.broken("kill")
        assert run.finish().reason == DONE
    assert not records(folder, FaultInjected) and len(records(folder, AttemptBegan)) == 1


def workers(folder: pathlib.Path) -> None:
    """A worker that crashes, leaves, hangs with its interpreter lock held or is stopped begins another attempt, for
    that reason; of one that hangs its stack was taken. A fault that has nothing to strike is missed."""
    faults = {
        "segfault": "SIGSEGV", "exit-1": "exit code 1", "exit-75": "asked to be started again", "hang": "silent for",
        "stop": "silent for", "delete": "done",
    }
    with live(folder, allow_faults=True, beat_overdue_s=5.0) as run:
        for attempt, fault in enumerate(faults, 1):
            run.step(attempt, 20 * attempt)
            run.broken(fault)
        run.step(len(faults), 20 * len(faults) + 20)
        assert run.finish().reason == DONE
    assert [expected in told for expected, told in zip(faults.values(), reasons(folder), strict=True)] == [True] * 6
    stacks = {(one.attempt, one.rank): one.text for one in records(folder, StacksTaken)}
    assert "step" in stacks[4, 1], stacks
    assert [one.why for one in records(folder, FaultMissed)] == ["there is no checkpoint yet"]


def refused(folder: pathlib.Path) -> None:
    """Exit 78 is never followed by another attempt."""
    with live(folder, nodes=1, allow_faults=True) as run:
        run.step(1, 3)
        run.broken("exit-78")
        assert run.finish(enough=False).exit_code == 78
    assert len(records(folder, AttemptBegan)) == 1


def links(folder: pathlib.Path) -> None:
    """A link that flaps costs nothing; a node that is cut off for longer than `node_lost_s` is lost, its spare works
    on, and it comes back as one."""
    with live(folder, spares=1, allow_faults=True, node_silent_s=2.0, node_lost_s=4.0) as run:
        run.step(1, 3)
        run.broken("flap", seconds=6.0)
        run.step(1, 100)
        run.broken("cut", seconds=10.0)
        run.step(2, 120)
        run.until(lambda status: all(node["state"] in ("running", "spare") for node in status["nodes"]))
        assert run.finish().reason == DONE
    assert len(records(folder, NodeLost)) == len(records(folder, NodeBack)) == 1


def straggler(folder: pathlib.Path) -> None:
    """A node that is slow for half a minute gives way to a spare."""
    with live(folder, nodes=3, spares=1, allow_faults=True, replace_stragglers=True) as run:
        run.step(1, 3)
        slow = run.broken("slow", seconds=300.0, factor=4.0).rpartition(" on ")[2].partition(",")[0]
        status = run.step(2, 3)
        assert next(node for node in status["nodes"] if node["node"] == slow)["state"] == "spare"
        assert run.finish().reason == DONE
    assert "is slow" in reasons(folder)[0]


@contextmanager
def saving(folder: pathlib.Path, steps: int, every: int, step_s: float) -> Iterator[Live]:
    """A run of one node whose worker saves now and then, and waits for each save."""
    toy = {"steps": steps, "save_every": every, "wait": True, "step_s": step_s, "deadline_s": 60.0}
    job = {
        "worker": (sys.executable, str(HERE / "toy_worker.py")), "carrier": CARRIER,
        "env": dict(os.environ, PYTHONPATH=str(ROOT), TOY=json.dumps(toy)),
    }
    with live(folder, nodes=1, job=job, allow_faults=True, carrier_overdue_s=60.0) as run:
        yield run
    assert saved_state(folder) == expected(steps)


def warnings(folder: pathlib.Path) -> list[str]:
    return [one.name for one in records(folder, ErrorSeen)]


def disks(folder: pathlib.Path) -> None:
    """A killed carrier, a disk that is full, read-only, or hangs for half a minute: the worker is not touched, and the
    same attempt ends with its last step saved."""
    with saving(folder, 300, 10, 0.02) as run:
        run.step(1, 25)
        run.broken("kill-carrier")
        for fault, seconds in (("disk-full", 2.0), ("disk-read-only", 2.0), ("disk-stall", 30.0)):
            step = run.status()["step"]
            run.broken(fault, seconds=seconds)
            run.step(1, step + 30)
        assert run.finish().reason == DONE, reasons(folder)
    assert "checkpoint.carrier_lost" in warnings(folder) and len(records(folder, AttemptBegan)) == 1


def checkpoints(folder: pathlib.Path) -> None:
    """A restart from a checkpoint that is damaged, or gone, says so, goes back to the save before it, and ends with the
    bits of a quiet run."""
    with saving(folder, 100, 20, 0.1) as run:
        # The second attempt finds the damage, the third finds it again, the fourth begins further back.
        for attempt, fault, step in ((1, "corrupt", 41), (4, "delete", 61)):
            run.step(attempt, step)
            run.broken(fault)
            run.broken("kill")
        assert run.finish().reason == DONE, reasons(folder)
    assert warnings(folder).count("checkpoint.damaged") >= 2 and not records(folder, FaultMissed)


SCENES: dict[str, Callable[[pathlib.Path], None]] = {
    "forbidden": forbidden, "workers": workers, "refused": refused, "links": links, "straggler": straggler,
    "disks": disks, "checkpoints": checkpoints,
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """All scenes, begun together: their time is that of the longest."""
    with ThreadPoolExecutor(len(SCENES)) as crew:
        yield {name: crew.submit(scene, tmp_path_factory.mktemp(name)) for name, scene in SCENES.items()}


@pytest.mark.soak
@pytest.mark.parametrize("scene", SCENES)
def test_a_run_that_is_broken(played: dict[str, Future[None]], scene: str) -> None:
    """Each fault leads to its documented remedy, as the scene says."""
    played[scene].result(240)
