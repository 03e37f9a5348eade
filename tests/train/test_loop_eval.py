"""Evaluations and samples in the loop, and a stop while the last one runs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from packtrain.core.contract import Order, Word
from packtrain.core.errors import StoppedOnRequest
from packtrain.core.platform import File, LocalPlatform
from packtrain.core.records import ErrorSeen, EvalDone, SampleDone, StepDone, TrainingDone
from packtrain.train.heldout import Sums
from packtrain.train.orders import Orders
from tests.train import rig


class Synced(LocalPlatform):
    """Knows what of the files it created an fsync has put on disk."""

    def __init__(self) -> None:
        self.known = bytearray()

    def create(self, path: str, mode: int = 0o644) -> File:
        return Followed(super().create(path, mode), self)


class Followed(File):
    def __init__(self, file: File, synced: Synced) -> None:
        self._file, self._synced, self._fresh = file, synced, bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._fresh += data
        self._file.write(data)

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._file.write_at(offset, data)

    def fsync(self) -> None:
        self._file.fsync()
        self._synced.known += self._fresh
        self._fresh.clear()

    def close(self) -> None:
        self._file.close()


STEPS = rig.SPEC.train.steps
SPEC = rig.with_train(rig.SPEC, eval_every_steps=2, eval_rows_max=3, sample_prompts=("a", "b", "c"))


class HeldOut:
    """Two stores whose evaluation takes four batches and adds up to the rows asked for."""

    stores = ("first", "second")

    def sums(self, params: object, store: str, rows_max: int, between: Callable[[], None]) -> Sums:
        for _ in range(4):
            between()
        return Sums(float(rows_max), 2.0, 1)


class Sampler:
    def records(self, params: object, prompts: tuple[str, ...], step: int, final: bool) -> list[SampleDone]:
        return [SampleDone(step=step, prompt=prompt, text="text", final=final) for prompt in prompts]


def attempt(folder: str, run: str, orders: Orders | None = None) -> rig.Attempt:
    made = rig.begin(folder, run, spec=SPEC, held_out=HeldOut(), sampler=Sampler())
    made.orders = orders or made.orders
    return made


def test_evaluates_by_step_number(tmp_path: pathlib.Path) -> None:
    """In the loop each store is evaluated on some rows with one sample; the end takes all rows and all prompts."""
    folder, run = rig.fresh_folder(tmp_path, "journal"), rig.fresh_folder(tmp_path, "run")
    attempt(folder, run).run()
    evals = [(e.step, e.store, e.loss, e.final) for e in rig.records(folder, EvalDone)]
    assert evals == [
        *((step, store, 1.5, False) for step in (2, 4) for store in HeldOut.stores),
        *((STEPS, store, 0.0, True) for store in HeldOut.stores),
    ]
    samples = [(s.step, s.prompt, s.final) for s in rig.records(folder, SampleDone)]
    assert samples == [(2, "a", False), (4, "a", False), *((STEPS, prompt, True) for prompt in "abc")]


def test_a_save_follows_each_evaluation(tmp_path: pathlib.Path) -> None:
    """Where the best saves are kept each evaluation in the loop has one, of the very step, and was on disk before it;
    else none is made for it."""
    judged = replace(SPEC, checkpoint=msgspec.structs.replace(SPEC.checkpoint, keep_best=1))
    for spec, saves in ((SPEC, [STEPS]), (judged, [2, 4, STEPS])):
        base = tmp_path / str(len(saves))
        base.mkdir()
        folder, run = rig.fresh_folder(base, "journal"), rig.fresh_folder(base, "run")
        synced = Synced()
        made = rig.begin(folder, run, spec=spec, held_out=HeldOut(), sampler=Sampler(), platform=synced)
        made.offering = noting = Noting(made.offering, synced)  # type: ignore[assignment]
        made.run()
        assert sorted(rig.saved_commits(run)) == saves == list(noting.saved)
        for step in saves[:-1]:
            told = [b'"step":%d,"store":"%s"' % (step, store.encode()) for store in HeldOut.stores]
            assert all(text in noting.saved[step] for text in told)


class Noting:
    """A saver, and what of the journal was on disk when each of its saves began."""

    def __init__(self, offering: object, synced: Synced) -> None:
        self._offering, self._synced = offering, synced
        self.saved: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._offering, name)

    def save(self, step: int, *args: object) -> object:
        self.saved[step] = bytes(self._synced.known)
        return self._offering.save(step, *args)  # type: ignore[attr-defined]


@pytest.mark.parametrize("poll", [STEPS + 2, STEPS + 3, STEPS + 9])
def test_stop_during_the_last_evaluation(tmp_path: pathlib.Path, poll: int) -> None:
    """A stop that comes after the last step is obeyed between two batches of the last evaluation: nothing is lost or
    called done, and the next attempt evaluates and ends without training."""
    folder, run = rig.fresh_folder(tmp_path, "journal"), rig.fresh_folder(tmp_path, "run")
    with pytest.raises(StoppedOnRequest, match=f"after step {STEPS}"):
        attempt(folder, run, Orders(rig.Script({poll: Order(1, Word.STOP)}))).run()
    assert list(rig.saved_commits(run)) == [STEPS]
    assert rig.records(folder, TrainingDone) == []
    attempt(folder, run).run()
    assert [r.step for r in rig.records(folder, StepDone)] == list(range(1, STEPS + 1))
    assert [r.step for r in rig.records(folder, TrainingDone)] == [STEPS]


class Damaged(rig.Feed):
    """Two rows of batch 2 could not be read."""

    def get(self, index: int) -> rig.Batch:
        return super().get(index)._replace(damaged=("s/tokens.bin: row 1", "s/tokens.bin: row 3") if index == 2 else ())


def test_rows_passed_over_are_told(tmp_path: pathlib.Path) -> None:
    """Each row that damage left out of a batch is one warning in the journal, with its batch and its file."""
    folder = str(tmp_path)
    rig.Attempt(folder, feed=Damaged(), held_out=HeldOut(), sampler=Sampler()).run()
    told = [(seen.severity, seen.name, seen.where) for seen in rig.records(folder, ErrorSeen)]
    wanted = ("s/tokens.bin: row 1", "s/tokens.bin: row 3")
    assert told == [("warning", "data.store_damaged", where) for where in wanted]
    assert "batch 2" in rig.records(folder, ErrorSeen)[0].what
