"""The worker as a process: by hand it trains, is killed, goes on, is stopped, goes on, and ends."""

from __future__ import annotations

import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.core.config import encode
from packtrain.core.journal import read_folder
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import (
    AttemptBegan,
    ErrorSeen,
    EvalDone,
    PhaseTotals,
    ProfileDone,
    RestoreDone,
    SampleDone,
    SaveDone,
    StepDone,
    TrainingDone,
)
from packtrain.data.build import BuildOptions, build
from packtrain.data.config import DataConfig, StoreUse
from packtrain.monitor.report import report
from packtrain.recipes.spec import RunSpec
from packtrain.train.sample import generate
from tests.train import rig
from tests.train.lowering import QUICK_FLAGS

STEPS, EVERY_STEPS, DEADLINE_S = 600, 200, 240
"""Saves are so far apart that what is seen of one can be acted on before the next."""
LINES = [f"line {n} of a small text with the number {n * n} in it\n" for n in range(2000)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny store built by the real build, with the byte tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(20):
        (folder / f"{n}.txt").write_text("".join(LINES[n * 100 : n * 100 + 100]))
    out = str(folder / "out")
    options = BuildOptions(tokenizer="byte", workers=1, held_out_fraction=0.1)
    build(LocalPlatform(), [str(folder)], out, options, lambda stage, done, total: None)
    return out


def make_run(folder: pathlib.Path, corpus: str, steps: int = STEPS, every_steps: int = EVERY_STEPS) -> str:
    spec = RunSpec(
        recipe="test", seed=3, model=rig.SPEC.model, optim=rig.SPEC.optim,
        train=rig.TrainConfig(steps=steps, eval_every_steps=0, sample_prompts=("line ",), sample_tokens=8),
        data=DataConfig(
            stores=(StoreUse(path=f"{corpus}/train"),), held_out=(f"{corpus}/held_out", f"{corpus}/train"),
            batch_rows=4, length=32,
        ),
        checkpoint=CheckpointConfig(every_s=0, every_steps=every_steps, memory_every_steps=0),
    )
    (folder / "spec").mkdir(parents=True)
    (folder / "spec" / "0001.toml").write_bytes(encode(spec))
    return str(folder)


class Worker:
    """`python -m packtrain.train`, its output in a file."""

    def __init__(self, run: str, *arguments: str) -> None:
        self.log = pathlib.Path(run).with_suffix(f".{len(list(pathlib.Path(run).parent.iterdir()))}.log")
        # Compiled without the costly passes; these are the bits all workers here agree on.
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_backend_optimization_level=0 {QUICK_FLAGS}"}
        command = [sys.executable, "-m", "packtrain.train", run, *arguments]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def until(self, seen: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not seen():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, "nothing happened"
            time.sleep(0.02)

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def started() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def start(*arguments: str) -> Worker:
        workers.append(Worker(*arguments))
        return workers[-1]

    yield start
    for worker in workers:
        worker.process.kill()
        worker.process.wait()


def found(run: str, kind: type) -> list:
    return [e.record for e in read_folder(LocalPlatform(), f"{run}/journal").entries if isinstance(e.record, kind)]


def last_saved(run: str) -> int:
    return max((s.step for s in found(run, SaveDone) if s.commit), default=0)


def last_step(run: str) -> int:
    return max((r.step for r in found(run, StepDone)), default=0)


@pytest.mark.timeout(600)
def test_by_hand_from_the_first_step_to_the_last(
    tmp_path: pathlib.Path, corpus: str, started: Callable[..., Worker]
) -> None:
    """Killed while it trains, stopped by SIGTERM, resumed each time by the same command: no published step is lost,
    a repeated step (traced the second time) has the same loss, and at the end the evaluation of both held-out stores, a
    sample and TrainingDone are there."""
    run = make_run(tmp_path / "run", corpus)
    worker = started(run, "--fresh")
    worker.until(lambda: 0 < last_saved(run) < last_step(run))
    worker.process.kill()
    worker.end()
    killed_at = last_step(run)

    worker = started(run, "--profile", "3")
    worker.until(lambda: len(found(run, AttemptBegan)) == 2)
    second = started(run)
    assert second.end() == 78
    assert f"process {worker.process.pid}" in second.log.read_text() and "run.held" in second.log.read_text()
    worker.until(lambda: last_step(run) > killed_at)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 75, worker.log.read_text()
    assert "run.stopped_on_request" in worker.log.read_text()
    point = CommitLog(LocalPlatform(), f"{run}/commits").restore_point()
    assert point is not None and point.step == last_step(run) < STEPS

    last = started(run)
    assert last.end() == 0, last.log.read_text()
    assert "Traceback" not in last.log.read_text() + worker.log.read_text()
    assert [d.step for d in found(run, TrainingDone)] == [STEPS]
    check_evals(found(run, EvalDone), corpus, report(LocalPlatform(), run))
    check_profile(found(run, ProfileDone))
    assert [(s.step, s.prompt, s.final) for s in found(run, SampleDone)] == [(STEPS, "line ", True)]
    assert [b.restore_step < 0 for b in found(run, AttemptBegan)] == [True, False, False]
    check_restores(found(run, RestoreDone), found(run, AttemptBegan), last.log.read_text())
    assert [e.name for e in found(run, ErrorSeen)] == ["run.stopped_on_request"]
    check_losses(found(run, StepDone))
    check_phases(found(run, PhaseTotals))
    assert generate(run, "line ", 8, 0.0) == generate(run, "line ", 8, 0.0)


def check_restores(restores: list[RestoreDone], began: list[AttemptBegan], log: str) -> None:
    """Each attempt but the first tells what it read, and from where; one process reads all and passes nothing on."""
    assert [done.step for done in restores] == [attempt.restore_step for attempt in began[1:]]
    for done in restores:
        assert done.read_bytes == done.read_bytes_all > 0 and (done.sent_bytes, done.ranks) == (0, 1)
        assert f"step-{done.step:08d}" in done.source and done.seconds > 0
    assert f"restored step {restores[-1].step} from {restores[-1].source}" in log


def check_evals(evals: list[EvalDone], corpus: str, text: str) -> None:
    """Each held-out store has its figures, and its name in the report beside them."""
    assert [(e.step, e.store, e.final) for e in evals] == [
        (STEPS, f"{corpus}/held_out", True), (STEPS, f"{corpus}/train", True)
    ]
    for store, e in zip(("out/held_out", "out/train"), evals, strict=True):
        after = text.split(f"held out {store}: bits per byte")[1].splitlines()[1]
        assert f"{e.bits_per_byte:.3f}  perplexity {math.exp(e.loss):.4g} a token" in after


def check_profile(profiles: list[ProfileDone]) -> None:
    """The attempt asked for three traced steps traced them, and each kind of work took some of their time."""
    profile, = profiles
    assert profile.steps == 3 and list(pathlib.Path(profile.folder).rglob("*.xplane.pb"))
    assert profile.folder.endswith("profile/0002-rank0")
    assert all(profile.ns[kind] > 0 for kind in ("matmul", "attention", "loss", "optimizer", "norm", "host", "other"))
    assert profile.ns["collective"] == 0


def check_losses(steps: list[StepDone]) -> None:
    """Every step is there; those computed twice have one loss."""
    losses: dict[int, set[float]] = {}
    for record in steps:
        losses.setdefault(record.step, set()).add(record.loss)
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in losses.values())
    assert len(steps) > STEPS
    assert min(losses[STEPS]) < 0.8 * max(losses[1])


def check_phases(totals: list[PhaseTotals]) -> None:
    last = {t.attempt: t.ns for t in totals}
    for attempt, phases in {2: ("compile", "restore", "step", "save"), 3: ("init", "compile", "step", "eval")}.items():
        assert all(last[attempt][phase] > 0 for phase in phases)
