"""Real stalls: a process frozen for 30 seconds, or for good, costs time, never a checkpoint and never the run."""

from __future__ import annotations

import pathlib
import signal

import pytest

from packtrain.core.errors import EXIT_DONE
from packtrain.core.records import AttemptBegan, CarrierGivenUp, StepDone
from tests.soak.conftest import STEPS
from tests.soak.trial import Trial, trial

STALL_S = 30
BRIEF_S = 12
"""Less than a carrier may be silent in these tests."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def wait_for_step(run: Trial, step: int) -> None:
    for _ in run.looks(300, f"step {step}"):
        if steps_done(run) >= step:
            return


def steps_done(run: Trial) -> int:
    return max((entry.record.step for entry in run.entries() if isinstance(entry.record, StepDone)), default=0)


def wait_for_saves(run: Trial, more_than: int) -> None:
    for _ in run.looks(300, f"more than {more_than} saves"):
        if len(run.saves()) > more_than:
            return


def attempts(run: Trial) -> int:
    return sum(isinstance(entry.record, AttemptBegan) for entry in run.entries())


def freeze_mid_save(run: Trial) -> None:
    """SIGSTOP the carrier while it has a folder that is not published yet."""
    for _ in run.looks(300, "a save in flight"):
        if run.unpublished():
            run.send("carrier", signal.SIGSTOP)
            if run.unpublished():
                return
            run.send("carrier", signal.SIGCONT)


def test_a_frozen_carrier_costs_no_run(
    tmp_path: pathlib.Path, store: pathlib.Path, cache: pathlib.Path, undisturbed: dict[str, bytes]
) -> None:
    """While the carrier is frozen in the middle of a save, training goes on, and when it wakes saves are published
    again; one that is frozen for good is given up for another, which publishes. No attempt is lost, and the bits at
    the end are those of an undisturbed run."""
    with trial(tmp_path, store, cache, STEPS, "supervise.carrier_overdue_s=20") as run:
        run.start()
        freeze_mid_save(run)
        before, saves = steps_done(run), len(run.saves())
        run.platform.sleep(BRIEF_S)
        assert steps_done(run) > before
        assert len(run.saves()) == saves
        run.send("carrier", signal.SIGCONT)
        wait_for_saves(run, saves)
        freeze_mid_save(run)
        wait_for_saves(run, len(run.saves()))
        assert run.finish(500) == EXIT_DONE, run.said()
        assert attempts(run) == 1
        assert sum(isinstance(entry.record, CarrierGivenUp) for entry in run.entries()) == 1
        assert run.final() == undisturbed


@pytest.mark.parametrize("part", ["coordinator", "agent"])
def test_a_frozen_supervisor_costs_nothing(
    part: str, tmp_path: pathlib.Path, store: pathlib.Path, cache: pathlib.Path, undisturbed: dict[str, bytes]
) -> None:
    """While the coordinator is frozen for 30 s, or the agent for less than it may be silent, training and saving go on,
    and afterwards neither takes its own absence for the worker's."""
    with trial(
        tmp_path, store, cache, STEPS, "supervise.beat_overdue_s=10", "supervise.node_lost_s=60"
    ) as run:
        run.start()
        wait_for_step(run, 10)
        assert run.send(part, signal.SIGSTOP)
        before = len(run.saves())
        run.platform.sleep(STALL_S if part == "coordinator" else BRIEF_S)
        assert len(run.saves()) > before
        run.send(part, signal.SIGCONT)
        assert run.finish(500) == EXIT_DONE, run.said()
        assert attempts(run) == 1
        assert run.final() == undisturbed


def test_a_frozen_worker_is_replaced(
    tmp_path: pathlib.Path, store: pathlib.Path, cache: pathlib.Path, undisturbed: dict[str, bytes]
) -> None:
    """A worker frozen for 30 s where silence may last 10 s is killed and another attempt ends with the same bits."""
    with trial(tmp_path, store, cache, STEPS, "supervise.beat_overdue_s=10") as run:
        run.start()
        wait_for_step(run, 10)
        frozen = run.process("worker")
        assert frozen is not None
        run.send("worker", signal.SIGSTOP)
        run.platform.sleep(STALL_S)
        assert not frozen.is_running() or frozen.status() == "zombie"
        assert run.finish(500) == EXIT_DONE, run.said()
        assert attempts(run) == 2
        assert run.final() == undisturbed
