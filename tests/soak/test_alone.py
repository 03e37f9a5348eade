"""Runs that nobody watches: what dies of them comes back, what ends stays ended; with real processes."""

from __future__ import annotations

import pathlib
import random
import shutil
import signal
import sys
from collections.abc import Callable

import psutil
import pytest

from packtrain.core.records import AgentStarted, AttemptEnded, CoordinatorBegan, RunFinished
from packtrain.supervise.console import ask
from packtrain.supervise.decisions import Decisions, replayed
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


def samples() -> list[tuple[int, str]]:
    """Where coordinators die: at their nth batch, before it, in it, after it."""
    rng = random.Random(7)
    return [(rng.randint(1, 9), when) for when in ("before", "torn", "after") for _ in range(2)]


def died(run: Live, nth: int, when: str, path: pathlib.Path, disturb: Callable[[], None]) -> None:
    """A coordinator led until it killed itself there; meanwhile there was something to decide."""
    arguments = ("--job", f"{run.keeper.live.base}/job.json", "--home", run.home)
    command = (sys.executable, "-m", "tests.soak.dying", str(nth), when, str(path), *arguments)
    code = None
    while code != -signal.SIGKILL:
        assert code in (None, 78), run.logs()  # 78: on a busy machine an agent was quicker
        for other in coordinators(run):
            other.kill()
        one = run.platform.spawn(command, run.job.env, log_path=f"{run.home}/log")
        while (code := one.poll()) is None:
            disturb()


def test_a_coordinator_killed_at_sampled_batches_loses_and_repeats_nothing(tmp_path: pathlib.Path) -> None:
    """Whenever it dies, what is replayed is what was written down before; no worker ends but those that the test kills,
    no worker is started twice, no attempt ends twice, and the run ends as it should."""
    with live(tmp_path / "run", nodes=2) as run:
        run.step(1, 3)
        killed: set[int] = set()

        def disturb() -> None:
            """Each attempt is ended once, by the end of a rank, as soon as it runs."""
            status = run.status()
            workers = run.workers()
            if status.get("stage") == "running" and status["attempt"] not in killed and len(workers) == 2:
                killed.add(status["attempt"])
                run.kill(workers[status["attempt"] % 2])

        for number, (nth, when) in enumerate(samples()):
            known = Decisions(run.platform, f"{run.home}/decisions").replay() if number else None
            died(run, nth, when, tmp_path / str(number), disturb)
            counts = replayed((tmp_path / str(number)).read_bytes(), str(number)) or known
            assert counts in (None, Decisions(run.platform, f"{run.home}/decisions").replay())
        run.keeper.coordinator()
        run.until(lambda status: status.get("stage") == "running" and status["attempt"] not in killed)
        assert (run.finish().exit_code, len(killed) > 1) == (0, True)
    began = starts(run.folder)
    assert len(began) == len(set(began)) == 2 * (len(killed) + 1), (began, killed)
    ended = [one.attempt for one in records(run.folder, AttemptEnded)]
    assert len(ended) == len(set(ended)) and len(records(run.folder, RunFinished)) == 1
