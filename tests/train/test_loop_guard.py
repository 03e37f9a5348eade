"""The guard as the loop plays it: a bad batch is run again from unchanged state; if it stays bad, a policy decides."""

from __future__ import annotations

import functools
import pathlib

import msgspec
import pytest

from packtrain.core.contract import Order, Word
from packtrain.core.errors import GuardRollback, GuardStopped, StoppedOnRequest
from packtrain.core.records import GuardVerdict, StepDone, TrainerStarted, TrainingDone
from packtrain.train.orders import Orders
from packtrain.train.step import Command
from tests.train import rig

STEPS = rig.SPEC.train.steps
ALWAYS = 99
STOP = Order(1, Word.STOP)


def with_policy(policy: str) -> rig.Sections:
    return rig.replace(rig.SPEC, guard=msgspec.structs.replace(rig.SPEC.guard, policy=policy))


@functools.cache
def clean_run(folder: str) -> tuple[dict[str, bytes], dict[int, tuple[float, float]]]:
    final = rig.bits(rig.Attempt(folder).run())
    return final, rig.losses(rig.records(folder, StepDone))


@pytest.fixture
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[int, tuple[float, float]]]:
    return clean_run(str(tmp_path_factory.getbasetemp() / "clean"))


@pytest.mark.parametrize("poison", [{n: 1} for n in range(STEPS)] + [{1: 1, 2: 2}, {2: 1, 4: 2, 5: 2}])
def test_transient_nan_is_rerun(tmp_path: pathlib.Path, clean: tuple, poison: dict[int, int]) -> None:
    """NaN on some fetches of a batch alone leaves every loss and the final bits those of the clean run, and the verdict
    says that the hardware is suspect. (A batch right behind a bad one is fetched for nothing first, hence the 2.)"""
    folder = str(tmp_path)
    final = rig.bits(rig.Attempt(folder, feed=rig.Feed(poison)).run())
    assert (final, rig.losses(rig.records(folder, StepDone))) == clean
    assert rig.records(folder, TrainerStarted)[0].digest_repeats
    verdicts = rig.records(folder, GuardVerdict)
    assert [(v.step, v.reason, v.rerun, v.policy) for v in verdicts] == [
        (index + 1, "non_finite", "clean", "used") for index in sorted(poison)
    ]
    assert all(v.digest != v.rerun_digest for v in verdicts)


@pytest.mark.parametrize("index", range(STEPS))
def test_saves_see_no_batch_that_is_still_open(tmp_path: pathlib.Path, index: int) -> None:
    """A save by step number waits for every verdict: it holds that step of the clean run, wherever the NaN was."""
    spec = rig.replace(rig.SPEC, checkpoint=rig.CheckpointConfig(every_s=0, every_steps=2))

    def saved(name: str, poison: dict[int, int]) -> dict[int, list[bytes]]:
        kept = rig.Kept()
        rig.Attempt(rig.fresh_folder(tmp_path, name), spec=spec, feed=rig.Feed(poison), offering=kept).run()
        return {step: [tensor.array.tobytes() for tensor in tensors] for step, tensors in kept.saved.items()}

    assert saved("bad", {index: 1}) == saved("clean", {})


@pytest.mark.parametrize("index", [0, 3, STEPS - 1])
def test_persistent_nan_is_skipped(tmp_path: pathlib.Path, index: int) -> None:
    """A batch that is bad twice in the same way is consumed without an update, as if it had been ordered skipped."""
    folder, ordered = rig.fresh_folder(tmp_path, "bad"), rig.fresh_folder(tmp_path, "ordered")
    final = rig.Attempt(folder, feed=rig.Feed({index: ALWAYS})).run()
    script = rig.Script({1: Order(1, Word.SKIP, index, 1)})
    assert rig.bits(final) == rig.bits(rig.Attempt(ordered, orders=Orders(script)).run())
    assert [(v.step, v.rerun, v.policy) for v in rig.records(folder, GuardVerdict)] == [(index + 1, "same", "skip")]
    assert rig.records(ordered, GuardVerdict) == []
    assert [r.step for r in rig.records(folder, StepDone)] == list(range(1, STEPS + 1))
    done = rig.records(folder, TrainingDone)
    assert [(d.step, d.updates_skipped) for d in done] == [(STEPS, 1)]


@pytest.mark.parametrize("cut", [0, 11])
def test_skips_in_a_row_are_bounded(tmp_path: pathlib.Path, cut: int) -> None:
    """Two bad batches in a row are skipped, the third ends the run with 78 and the state saved; a resume in between
    counts on, and a good batch starts the count anew."""
    guard = msgspec.structs.replace(rig.SPEC.guard, skips_in_a_row_max=2)
    spec = rig.replace(rig.SPEC, guard=guard)
    bad = {0: ALWAYS, 1: ALWAYS, 3: ALWAYS, 4: ALWAYS, 5: ALWAYS}
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "journal")
    if cut:
        with pytest.raises(StoppedOnRequest):
            rig.begin(folder, run, spec=spec, feed=rig.Feed(bad), orders=Orders(rig.Script({cut: STOP}))).run()
    with pytest.raises(GuardStopped, match="2 batches before it were skipped"):
        rig.begin(rig.fresh_folder(tmp_path, "on"), run, spec=spec, feed=rig.Feed(bad)).run()
    assert max(rig.saved_commits(run)) == 5


def test_policy_stop_saves_and_never_restarts(tmp_path: pathlib.Path) -> None:
    """Policy stop saves the state before the bad batch and ends with 78; a later attempt without the fault goes on to
    the clean run's bits."""
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "journal")
    with pytest.raises(GuardStopped, match="batch 3") as stopped:
        rig.begin(folder, run, spec=with_policy("stop"), feed=rig.Feed({3: ALWAYS})).run()
    assert stopped.value.exit_code == 78
    assert sorted(rig.saved_commits(run)) == [3]
    final = rig.bits(rig.begin(rig.fresh_folder(tmp_path, "later"), run).run())
    clean = rig.bits(rig.Attempt(rig.fresh_folder(tmp_path, "clean")).run())
    assert {**final, "tripped": b""} == {**clean, "tripped": b""}


def test_policy_rollback_saves_nothing(tmp_path: pathlib.Path) -> None:
    """Policy rollback ends with 75 and publishes nothing: the next attempt restores what was published before."""
    run, folder = rig.fresh_folder(tmp_path, "run"), rig.fresh_folder(tmp_path, "journal")
    with pytest.raises(GuardRollback) as stopped:
        rig.begin(folder, run, spec=with_policy("rollback"), feed=rig.Feed({3: ALWAYS})).run()
    assert stopped.value.exit_code == 75
    assert rig.saved_commits(run) == {}


def test_bad_again_in_another_way(tmp_path: pathlib.Path) -> None:
    """A rerun that is bad with another digest makes the hardware suspect, and the policy decides about the batch."""
    drift = iter(range(1, 99))

    def unsteady(step: rig.Step) -> rig.Step:
        """The compiled step on hardware that flips a bit of the gradient now and then: not while it is probed."""

        def call(state: rig.State, batch: rig.Any, orders_R5: rig.Any, command: rig.Any) -> rig.Any:
            state, out = step(state, batch, orders_R5, command)
            return state, out if command == Command.PROBE else out._replace(digest=out.digest + next(drift))

        return call

    rig.Attempt(str(tmp_path), feed=rig.Feed({2: ALWAYS}), around=unsteady, attempt=4).run()
    (told,) = rig.records(str(tmp_path), GuardVerdict)
    assert (told.step, told.rerun, told.policy, told.attempt) == (3, "different", "skip", 4)


def test_without_repeatable_digests_the_verdict_is_unknown(tmp_path: pathlib.Path) -> None:
    """Where one batch does not give one digest twice at start, two digests prove nothing: the rerun is unknown."""

    class Unsteady(rig.Feed):
        probes = 0

        def get(self, index: int) -> rig.Batch:
            self.probes += 1
            return super().get(index if self.probes > 2 else index + self.probes)

    rig.Attempt(str(tmp_path), feed=Unsteady({2: 1})).run()
    assert not rig.records(str(tmp_path), TrainerStarted)[0].digest_repeats
    assert [(v.step, v.rerun, v.policy) for v in rig.records(str(tmp_path), GuardVerdict)] == [(3, "unknown", "used")]


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_window_beside_a_bad_batch(tmp_path: pathlib.Path, index: int) -> None:
    """A skip window right before, at, or behind a transiently bad batch skips its own batches and no other."""
    bad, plain = rig.fresh_folder(tmp_path, "bad"), rig.fresh_folder(tmp_path, "plain")

    def attempt(folder: str, poison: dict[int, int]) -> dict[str, bytes]:
        script = rig.Script({1: Order(1, Word.SKIP, 2, 1)})
        return rig.bits(rig.Attempt(folder, feed=rig.Feed(poison), orders=Orders(script)).run())

    assert attempt(bad, {index: 1}) == attempt(plain, {})
    assert [r.updates_skipped for r in rig.records(bad, TrainingDone)] == [1]
