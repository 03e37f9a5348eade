"""Runs that nobody watches: what dies of them comes back, what ends stays ended; with real processes."""

from __future__ import annotations

import pathlib
import shutil
import signal
from collections.abc import Callable

import psutil
import pytest

from packtrain.core.records import AgentStarted, AttemptEnded, CoordinatorBegan, RunFinished
from packtrain.supervise.console import ask
from tests.supervise.live import Live, live
from tests.supervise.runs import records

# Coordinators and agents outlive on purpose whoever started them, so nobody waits for them.
pytestmark = [
    pytest.mark.soak, pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def coordinators(run: Live) -> list[psutil.Process]:
    return run.processes("supervise.coordinator")


def until(run: Live, seen: Callable[[], object]) -> None:
    """Without a word to the run."""
    end_ns = run.platform.boot_ns() + 60 * 10**9
    while not seen():
        assert run.platform.boot_ns() < end_ns, f"{run.status()}\n{left(run)}\n{run.logs()}"
        run.platform.sleep(0.1)


def left(run: Live) -> list[str]:
    """What is still there of its homes."""
    return [str(path) for path in pathlib.Path(run.keeper.live.base).glob("**/*")]


def starts(folder: pathlib.Path) -> list[tuple[int, int]]:
    """(attempt, rank) of every worker that was ever started."""
    lines = [line.split() for line in (folder / "starts").read_text().splitlines()]
    return [(int(attempt), int(rank)) for attempt, rank, _ in lines]


def test_what_dies_comes_back_and_what_is_stopped_does_not(tmp_path: pathlib.Path) -> None:
    """A killed coordinator is started by an agent and touches no worker; an agent is started by the coordinator; both
    at once come back, too. A run that was told to stop stops, though its coordinator is killed right after it said yes;
    nothing of it is started any more, and nothing is left outside its folder."""
    with live(tmp_path / "run", nodes=2) as run:
        run.step(1, 3)
        before = run.workers()
        (first,) = coordinators(run)
        run.kill(first.pid)
        status = run.until(lambda status: status.get("term") == 2)
        run.step(1, status["step"] + 10)
        assert run.workers() == before
        agents = run.processes("supervise.agent")
        run.kill(agents[0].pid)
        run.step(2, 0)
        run.kill(coordinators(run)[0].pid)
        run.kill(agents[1].pid)
        run.step(3, 0)
        ask(run.platform, run.home, "stop", by="somebody")
        run.kill(coordinators(run)[0].pid)
        until(run, lambda: not pathlib.Path(run.keeper.live.base).exists())
        assert not (tmp_path / "run" / "live.json").exists()
        until(run, lambda: not run.processes("supervise") and not run.workers())
    assert [one.exit_code for one in records(run.folder, RunFinished)] == [75]
    began = records(run.folder, CoordinatorBegan)
    assert [one.term for one in began] == [1, 2, 3, 4] and began[0].by == ""
    assert all(one.by.startswith("the agent of n") for one in began[1:])
    assert len(records(run.folder, AgentStarted)) == 2
    assert starts(run.folder) == [(attempt, rank) for attempt in (1, 2, 3) for rank in sorted_ranks(run, attempt)]


def sorted_ranks(run: Live, attempt: int) -> list[int]:
    """The ranks of an attempt in the order in which they happened to start, each once."""
    order = [rank for number, rank in starts(run.folder) if number == attempt]
    assert sorted(order) == [0, 1]
    return order


def test_a_run_whose_homes_are_deleted_ends(tmp_path: pathlib.Path) -> None:
    """Workers, agents, coordinator, in seconds; what they are to be found by is gone."""
    with live(tmp_path / "run", nodes=2) as run:
        run.step(1, 3)
        shutil.rmtree(run.keeper.live.base, ignore_errors=True)
        shutil.rmtree(run.keeper.live.base, ignore_errors=True)
        until(run, lambda: not run.processes("supervise") and not run.workers())


@pytest.mark.parametrize("stopped", [False, True])
def test_of_two_coordinators_one_is_obeyed(tmp_path: pathlib.Path, stopped: bool) -> None:
    """The lock is lost (its file was deleted), and a second one leads with a higher term; the first, at once or when it
    wakes after an attempt that it knows nothing of, ends by itself. No worker is touched by either, nothing is started
    twice, persons reach the one that leads, and the run ends as it should."""
    with live(tmp_path / "run", nodes=2) as run:
        run.step(1, 3)
        (first,) = coordinators(run)
        if stopped:
            first.send_signal(signal.SIGSTOP)
        (tmp_path / "run" / "holder").unlink()
        before = run.workers()
        run.keeper.coordinator()
        status = run.until(lambda status: status.get("term") == 2 and status["state"] == "running")
        run.step(1, status["step"] + 10)
        assert run.workers() == before
        if stopped:
            assert first.status() == psutil.STATUS_STOPPED
            run.kill(before[1])
            run.step(2, 0)
            before = run.workers()
            first.send_signal(signal.SIGCONT)
        assert first.wait(30) in (75, None)
        status = run.status()
        run.step(2 if stopped else 1, status["step"] + 10)
        assert run.workers() == before and status["term"] == 2
        assert "run.term_lost" in pathlib.Path(run.home, "log").read_text()
        finish = run.finish()
        assert (finish.exit_code, finish.term) == (0, 2)
    assert len(starts(run.folder)) == (4 if stopped else 2)
    assert [one.exit_code for one in records(run.folder, AttemptEnded)] == ([-9, 0] if stopped else [0])
    assert [one.exit_code for one in records(run.folder, RunFinished)] == [0]
