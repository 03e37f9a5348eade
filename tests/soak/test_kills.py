"""Real SIGKILLs at seeded moments to real trainers: what was published stays, and the bits at the end are the same."""

from __future__ import annotations

import itertools
import pathlib
import random
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.format import parse_folder
from packtrain.core.errors import EXIT_DONE
from packtrain.core.records import AttemptBegan, StepDone
from tests.conftest import SoakClock
from tests.soak.conftest import STEPS
from tests.soak.trial import Trial, trial

KILLS = 200
LANES = 2
"""Runs at a time; a start of JAX keeps about one core busy."""
ENDING_S = 120
"""Left of the session's time to let the last runs end."""
HANG_S = 600
"""Nothing that goes on takes this long, however busy the machine."""
TARGETS = ("worker", "worker", "worker", "carrier", "agent", "coordinator")
MOMENTS = {"at any moment": 3, "in a save": 10, "after a save": 7}
"""How often each is chosen. At any moment: also before the trainer's first step."""
ANY_S, IN_S, AFTER_S = 5.0, 0.05, 0.3
MEMORY_KILLS = 8


class Killer:
    """Kills one run again and again and checks after each kill."""

    def __init__(self, run: Trial, seed: int, counts: Counter[str]) -> None:
        self.run, self.dice, self.counts = run, random.Random(seed), counts
        self.known: list[Commit] = []

    def work(self, kills: int, clock: SoakClock) -> None:
        """Until the run is done; once `kills` were counted it is left in peace."""
        self.run.start()
        while not self.done():
            if self.counts["kills"] >= kills or clock.left_s() < ENDING_S:
                self.run.finish(HANG_S)
            elif self.strike():
                self.check()
        self.check()
        check_lineage(self.known)

    def done(self) -> bool:
        """Whoever watches starts again what was killed, and ends in no other way than done."""
        assert self.run.watcher is not None
        status = self.run.watcher.poll()
        assert status in (None, EXIT_DONE), f"exit {status}\n{self.run.said()}"
        return status == EXIT_DONE

    def strike(self) -> bool:
        """Kill at a moment the dice choose; False when the target was not there to be killed."""
        target = self.dice.choice(TARGETS)
        moment = self.dice.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment == "at any moment":
            self.run.platform.sleep(self.dice.uniform(0, ANY_S))
        else:
            self.wait_for_saves(self.dice.randint(1, 3))
            if moment == "in a save":
                self.wait_for(self.saving, "a save in flight")
            self.run.platform.sleep(self.dice.uniform(0, IN_S if moment == "in a save" else AFTER_S))
        in_flight = self.saving()
        if not self.run.send(target, signal.SIGKILL):
            return False
        self.counts.update(["kills", target, moment, *["save in flight at that moment"] * in_flight])
        return True

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Until it is so, or the run has ended."""
        for _ in self.run.looks(HANG_S, what):
            if ready() or self.done():
                return

    def wait_for_saves(self, more: int) -> None:
        wanted = len(self.run.saves()) + more
        self.wait_for(lambda: len(self.run.saves()) >= wanted, f"save {wanted}")

    def saving(self) -> bool:
        """Whether the attempt that runs now has a folder that is not published yet."""
        attempt = max((commit.attempt for commit in self.run.commits()), default=0)
        folders = map(parse_folder, self.run.unpublished())
        return any(folder is not None and folder.attempt == attempt for folder in folders)

    def check(self) -> None:
        """The log only grew, the journal reads, and what a restart would restore loads and is no older than before."""
        commits = self.run.log.all() if self.run.commits() else []
        assert commits[: len(self.known)] == self.known
        self.known = commits
        self.run.entries()
        point = self.run.log.restore_point() if commits else None
        newest = max((commit.step for commit in commits if commit.kind == "save"), default=-1)
        assert newest <= (point.step if point else -1)  # it may have been published a moment ago
        if point is not None:
            assert self.run.open(point).verify() == []


def check_lineage(commits: list[Commit]) -> None:
    """Each attempt begins at the newest save before it, and saves forward from there."""
    newest = -1
    for commit in commits:
        if commit.kind == "begin":
            assert commit.step == newest, commit
        elif commit.kind == "save":
            assert commit.step > newest, commit
            newest = commit.step


class Lane:
    """Runs one after the other, each killed until its end, until this lane's share of kills is done."""

    def __init__(self, folder: pathlib.Path, store: pathlib.Path, cache: pathlib.Path, seed: int) -> None:
        self.folder, self.store, self.cache, self.seed = folder, store, cache, seed
        self.counts: Counter[str] = Counter()
        self.finals: list[dict[str, bytes]] = []

    def work(self, kills: int, clock: SoakClock) -> None:
        for n in itertools.count():
            if self.counts["kills"] >= kills or clock.left_s() < 2 * ENDING_S:
                return
            with trial(self.folder / str(n), self.store, self.cache, STEPS) as run:
                Killer(run, self.seed + 1000 * n, self.counts).work(kills, clock)
                self.finals.append(run.final())


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_trainers_lose_nothing(
    tmp_path: pathlib.Path, store: pathlib.Path, cache: pathlib.Path, undisturbed: dict[str, bytes],
    soak_clock: SoakClock, notes: list[str],
) -> None:
    """Through 200 kills of worker, carrier, agent and coordinator no published save is lost or damaged, every attempt
    begins at the newest one, and each run ends with the bits of a run that nobody touched."""
    lanes = [Lane(tmp_path / str(i), store, cache, seed=i) for i in range(LANES)]
    try:
        with ThreadPoolExecutor(LANES) as pool:
            for done in [pool.submit(lane.work, KILLS // LANES, soak_clock) for lane in lanes]:
                done.result()
    finally:
        counts = sum((lane.counts for lane in lanes), Counter())
        finals = [final for lane in lanes for final in lane.finals]
        notes.append(f"kills: {dict(counts)} over {len(finals)} runs that ended")
    assert finals and all(final == undisturbed for final in finals)
    if counts["kills"] < KILLS:
        notes.append(f"not run: {KILLS - counts['kills']} of {KILLS} kills, the session's time was used up")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_kills_lose_two_steps_at_most(
    tmp_path: pathlib.Path, store: pathlib.Path, cache: pathlib.Path, undisturbed: dict[str, bytes], notes: list[str]
) -> None:
    """With a copy in memory after every step and saves on disk a hundred apart, a worker that is killed again and again
    loses at most the two steps before each kill, and the run ends with the bits of a run that nobody touched."""
    dice, lost = random.Random(6), []
    settings = ("checkpoint.every_steps=100", "checkpoint.every_s=0", "checkpoint.memory_every_steps=1")
    with trial(tmp_path, store, cache, STEPS, *settings) as run:
        run.start()
        for _ in range(MEMORY_KILLS):
            before = done_steps(run)
            for _ in run.looks(HANG_S, "more steps"):
                if done_steps(run) >= before + dice.randint(5, 30):
                    break
            run.platform.sleep(dice.uniform(0, IN_S))
            assert run.send("worker", signal.SIGKILL)
            begun = len(begins(run))
            for _ in run.looks(HANG_S, "another attempt"):
                if len(begins(run)) > begun:
                    break
            begin = begins(run)[-1]
            assert begin.memory is not None and begin.memory[0] == begin.attempt - 1, begin
            lost.append(done_steps(run, begin.attempt - 1) - begin.step)
        assert run.finish(HANG_S) == EXIT_DONE, run.said()
        final = run.final()
    notes.append(f"steps lost at {len(lost)} kills with copies in memory, as far as the journal tells: {lost}")
    assert max(lost) <= 2 and final == undisturbed


def done_steps(run: Trial, attempt: int = 1 << 30) -> int:
    """The highest step that the journal knows, up to that attempt."""
    begun, step = 0, 0
    for entry in run.entries():
        begun = entry.record.attempt if isinstance(entry.record, AttemptBegan) else begun
        if isinstance(entry.record, StepDone) and begun <= attempt:
            step = max(step, entry.record.step)
    return step


def begins(run: Trial) -> list[Commit]:
    return [commit for commit in run.commits() if commit.kind == "begin"]
