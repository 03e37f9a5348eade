"""Storms: a fault of every kind, one after the other, on a run that lives on its own; it ends by itself all the same.

`make soak-ci` lets them rage for a short while. The ten minutes of docs/PERFORMANCE.md:

    PACKTRAIN_STORM_S=600 PACKTRAIN_STORM_STEPS=600 PACKTRAIN_STORM_NODES=4 \\
      python -m pytest -m soak tests/soak/test_storm.py -s
"""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from packtrain.core.journal import read_folder
from packtrain.core.records import AttemptBegan, StepDone, WorldChosen
from packtrain.monitor import incidents, report
from tests.soak.lived import MODEL, Lived
from tests.soak.storms import Storm

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
STORM_S = float(os.environ.get("PACKTRAIN_STORM_S", "25"))
STEPS = int(os.environ.get("PACKTRAIN_STORM_STEPS", "80"))
NODES = int(os.environ.get("PACKTRAIN_STORM_NODES", "2"))
LONGER = 3
"""A world of one node steps faster: so many times as many steps, or it is done before the other one is back."""
EVERY_S = 20.0
SEED = 5
KEPT = (
    "checkpoint.every_steps=20", "checkpoint.memory_every_steps=5", "checkpoint.peer_memory=5",
    "supervise.beat_overdue_s=10", "supervise.carrier_overdue_s=10", "supervise.attempts_without_progress=100",
    "supervise.allow_faults=true",
)
SMALLER = (
    "supervise.replace_s=0", "supervise.grow_s=3", "data.batch_rows=16", "data.length=256",
    f"train.steps={LONGER * STEPS}",
)
LOSSES_APART = 0.01
"""Of a mean over twenty steps: other layouts add in another order."""
Start = Callable[..., Lived]


@pytest.fixture
def start(tmp_path: pathlib.Path, store: pathlib.Path) -> Iterator[Start]:
    runs: list[Lived] = []

    def started(*options: str, settings: tuple[str, ...] = ()) -> Lived:
        wanted = [word for setting in (*MODEL, *KEPT, *settings) for word in ("--set", setting)]
        runs.append(Lived(tmp_path / str(len(runs)), store, STEPS, *options, *wanted))
        return runs[-1]

    yield started
    for run in runs:
        run.clear()


def told(run: Lived, storm: Storm) -> None:
    """What a person who ran the long form copies into docs/PERFORMANCE.md."""
    sources = report.gather(run.platform, str(run.run))
    print(f"\n{len(storm.struck)} faults: {dict(Counter(storm.struck))}")
    print("\n".join([*incidents.lines(sources.incidents), *report.seconds(sources.facts)]))


def losses(run: Lived) -> dict[int, float]:
    """Step -> its loss, as the last attempt that did it had it."""
    records = [entry.record for entry in read_folder(run.platform, str(run.run / "journal")).entries]
    return {record.step: record.loss for record in records if isinstance(record, StepDone)}


def test_a_storm_leaves_no_trace_in_the_bits(start: Start) -> None:
    """Nodes, and half as many spares, under faults of every kind: the run ends by itself, with the loss and parameters
    of one that nobody touched, bit for bit."""
    layout = ("--nodes", str(NODES), "--spares", str(NODES // 2))
    quiet = start(*layout)
    assert quiet.end() == 0, quiet.said()
    run = start(*layout, settings=("supervise.replace_s=600",))
    run.until_trained(1, 5)
    storm = Storm(run, SEED)
    storm.rage(STORM_S, EVERY_S)
    assert run.end() == 0, run.said()
    told(run, storm)
    assert len(storm.struck) >= STORM_S // EVERY_S
    assert losses(run)[STEPS] == losses(quiet)[STEPS]
    assert run.final() == quiet.final()


def test_a_storm_without_spares_shrinks_and_grows_back(start: Start) -> None:
    """Two nodes that are lost in turn: the run goes on with one, takes the other in again when it is back, and ends by
    itself with the loss of one that nobody touched, but for the order in which numbers are added."""
    layout = ("--nodes", "2")
    quiet = start(*layout, settings=SMALLER)
    assert quiet.end() == 0, quiet.said()
    run = start(*layout, settings=SMALLER)
    run.until_trained(1, 5)
    storm = Storm(run, SEED, ("stop-agent-long", "lose-machine"))
    storm.rage(STORM_S, EVERY_S)
    assert run.end() == 0, run.said()
    told(run, storm)
    worlds = [len(nodes) for nodes in worlds_of(run)]
    shrank = worlds.index(1)
    assert worlds[0] == 2 and 2 in worlds[shrank:], worlds
    last = range(LONGER * STEPS - 19, LONGER * STEPS + 1)
    ours, theirs = (np.mean([losses(one)[step] for step in last]) for one in (run, quiet))
    print(f"worlds {worlds}, loss {ours:.6f}, undisturbed {theirs:.6f}")
    assert abs(ours / theirs - 1) < LOSSES_APART, (ours, theirs)


def worlds_of(run: Lived) -> list[list[str]]:
    records = [entry.record for entry in read_folder(run.platform, str(run.run / "journal")).entries]
    assert sum(isinstance(record, AttemptBegan) for record in records) > 1
    return [record.nodes for record in records if isinstance(record, WorldChosen)]
