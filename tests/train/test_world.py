"""Workers of several processes: they compare what they begin from, train as one process would, and end together."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Callable, Iterator

import msgspec
import pytest

from packtrain.core.config import decode, encode
from packtrain.core.contract import EXIT_AGAIN, EXIT_DONE, GO_ID, Word
from packtrain.core.records import ErrorSeen, EvalDone, RestoreDone, SampleDone, SaveDone, StepDone, TrainingDone
from packtrain.recipes.spec import RunSpec
from tests.train.nodes import World
from tests.train.test_worker import corpus, found, last_saved, last_step, make_run

__all__ = ["corpus"]
Start = Callable[..., World]
STEPS = 60
TOLERANCE = 1e-4
"""Of losses after tens of steps in f32 on other meshes."""


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    worlds: list[World] = []

    def started(run: str, nodes: int, procs: int = 1) -> World:
        worlds.append(World(run, tmp_path / f"home{len(worlds)}", nodes, procs))
        return worlds[-1]

    yield started
    for world in worlds:
        world.close()


def made(folder: pathlib.Path, corpus: str, every_steps: int = 0) -> str:
    """A run of few steps that evaluates little."""
    run = make_run(folder, corpus, STEPS, every_steps)
    path = pathlib.Path(run) / "spec" / "0001.toml"
    spec = decode(path.read_bytes(), RunSpec)
    data = msgspec.structs.replace(spec.data, held_out=(f"{corpus}/held_out",))
    path.write_bytes(encode(msgspec.structs.replace(spec, data=data)))
    return run


def losses(run: str) -> dict[int, float]:
    return {record.step: record.loss for record in found(run, StepDone)}


@pytest.mark.timeout(600)
def test_nothing_is_computed_together_before_the_word(tmp_path: pathlib.Path, corpus: str, start: Start) -> None:
    """Two ranks say the same of what they begin from and wait; told to stop they leave with 75, and no step was made.
    """
    run = made(tmp_path / "run", corpus)
    world = start(run, 2)
    facts = world.ready()
    assert facts[0] == facts[1]
    assert (facts[0]["restored"], facts[0]["step"], facts[0]["mesh"]) == ("fresh", "0", "fsdp 2 of 2 cpu")
    world.order(Word.STOP)
    assert world.ended() == [EXIT_AGAIN] * 2, world.said()
    assert found(run, StepDone) == []
    assert {error.name for error in found(run, ErrorSeen)} == {"run.stopped_on_request"}


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_rank_is_killed_and_one_node_goes_on(tmp_path: pathlib.Path, corpus: str, start: Start) -> None:
    """The other rank ends by itself, says that it was not the first, and leaves what both had saved; on one node the
    run goes on from there to its end."""
    run = made(tmp_path / "run", corpus, every_steps=20)
    world = start(run, 2)
    world.go()
    world.until(lambda: last_saved(run) > 0, "a save")
    world.workers[1].send_signal(signal.SIGKILL)
    first, second = world.ended()
    assert (first in (EXIT_AGAIN, -signal.SIGABRT)) and second == -signal.SIGKILL, world.said()
    assert first != EXIT_AGAIN or [error.name for error in found(run, ErrorSeen)] == ["world.broken"]
    saved = last_saved(run)
    world.close()
    alone = start(run, 1)
    facts = alone.go()
    assert int(facts[0]["step"]) >= saved and facts[0]["mesh"] == "every axis 1 of 1 cpu"
    assert alone.ended() == [EXIT_DONE], alone.said()
    assert [str(restored.step) for restored in found(run, RestoreDone)] == [facts[0]["step"]]
    assert found(run, TrainingDone)[-1].step == STEPS


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("nodes", "procs"), [(4, 1), (2, 2)])
def test_a_world_trains_as_one_process_does(
    tmp_path: pathlib.Path, corpus: str, start: Start, nodes: int, procs: int
) -> None:
    """Four ranks, on four nodes or on two: told to stop all save one step and exit 75; the next attempt goes on from
    it, evaluates and samples; every loss is that of one process, within a tolerance; each thing is written down once.
    """
    alone, run = made(tmp_path / "alone", corpus), made(tmp_path / "run", corpus)
    one = start(alone, 1)
    one.go()
    world = start(run, nodes, procs)
    world.go()
    world.until(lambda: last_step(run) > 5, "steps")
    world.workers[2].send_signal(signal.SIGTERM)
    assert world.ended() == [EXIT_AGAIN] * 4, world.said()
    saved = last_saved(run)
    again = start(run, nodes, procs)
    facts = again.go()
    assert {said["step"] for said in facts.values()} == {str(saved)} and len({*map(str, facts.values())}) == 1
    again.until(lambda: last_step(run) > saved, "steps")
    again.order(Word.SAVE, GO_ID + 1)
    assert again.ended() == [EXIT_DONE] * 4, again.said()
    assert one.ended() == [EXIT_DONE], one.said()
    assert losses(run).keys() == losses(alone).keys()
    assert all(loss == pytest.approx(losses(alone)[step], rel=TOLERANCE) for step, loss in losses(run).items())
    for kind in (EvalDone, SampleDone, TrainingDone):
        assert len(found(run, kind)) == len(found(alone, kind)), kind
    saves = [save.step for save in found(run, SaveDone) if save.commit]
    assert len(saves) == len(set(saves)) == 3 and saves[0] == saved and saves[-1] == STEPS
