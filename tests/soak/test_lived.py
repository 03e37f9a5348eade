"""A run that lives on its own, end to end: pieces of it are killed, and it ends as if nothing had happened."""

from __future__ import annotations

import functools
import pathlib
import signal
from collections.abc import Callable, Iterator

import pytest

from packtrain.core.journal import read_folder
from packtrain.core.records import AttemptBegan, AttemptEnded
from tests.soak.lived import MODEL, Lived

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
STEPS = 200
SLOW_BYTES_PER_S = 400_000
"""Of copies to another node, 0.4 MB each: one takes a second, in which 20 to 60 steps go by."""
MEMORY = ("checkpoint.memory_every_steps=5", "checkpoint.peer_memory=5", "checkpoint.every_steps=100000")
LAYOUTS = (("--nodes", "2", "--spares", "1"), ("--nodes", "1", "--spares", "1", "--procs-per-node", "2"))
Start = Callable[[tuple[str, ...]], Lived]
Finals = Callable[[tuple[str, ...]], dict[str, bytes]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, store: pathlib.Path) -> Iterator[Start]:
    runs: list[Lived] = []

    def started(options: tuple[str, ...]) -> Lived:
        small = [word for setting in MODEL for word in ("--set", setting)]
        runs.append(Lived(tmp_path_factory.mktemp("lived") / "home", store, STEPS, *options, *small))
        return runs[-1]

    yield started
    for run in runs:
        run.clear()


@pytest.fixture(scope="module")
def quiet(start: Start) -> Finals:
    """The bits of a run of a layout that nobody touched, whatever it saves and where."""

    @functools.cache
    def final(options: tuple[str, ...]) -> dict[str, bytes]:
        run = start(options)
        assert run.end() == 0, run.said()
        return run.final()

    return final


@pytest.mark.parametrize("options", LAYOUTS)
def test_killed_pieces_leave_no_trace_in_the_bits(start: Start, quiet: Finals, options: tuple[str, ...]) -> None:
    """A worker, the agent of the node that works and the coordinator are killed one after the other: two more attempts,
    the second on the spare; none for the coordinator. The end is that of a run nobody touched, bit for bit, and nothing
    is left of either outside its folder."""
    untouched = quiet(options)
    run = start(options)
    run.until_trained(1)
    base = pathlib.Path(run.live.base)
    run.processes("packtrain.train")[-1].send_signal(signal.SIGKILL)
    run.until_trained(2)
    run.working_agent().send_signal(signal.SIGKILL)
    run.until_trained(3)
    (coordinator,) = run.processes("packtrain.supervise.coordinator")
    coordinator.send_signal(signal.SIGKILL)
    assert run.end() == 0, run.said()
    assert "another one is started, the workers go on" in (run.home / "watcher.log").read_text()
    records = [entry.record for entry in read_folder(run.platform, str(run.run / "journal")).entries]
    assert [one.exit_code for one in records if isinstance(one, AttemptEnded)] == [-9, -9, 0]
    assert run.final() == untouched
    assert not base.exists()


@pytest.mark.parametrize(("bytes_per_s_max", "lost_at"), [(0, 25), (SLOW_BYTES_PER_S, 90)], ids=["quick", "slow"])
def test_a_lost_node_goes_on_from_what_its_peer_keeps(
    start: Start, quiet: Finals, bytes_per_s_max: int, lost_at: int
) -> None:
    """Before anything is on disk a node is lost, with what it had in memory. The spare gets its part from the node that
    kept a copy, also where a copy takes many times its cadence, and the end is that of a run nobody touched, bit for
    bit."""
    settings = (*MEMORY, f"checkpoint.peer_bytes_per_s_max={bytes_per_s_max}")
    untouched = quiet(LAYOUTS[0])
    run = start((*LAYOUTS[0], *(word for setting in settings for word in ("--set", setting))))
    run.until_trained(1, lost_at)
    run.lose(run.working_node())
    assert run.end() == 0, run.said()
    records = [entry.record for entry in read_folder(run.platform, str(run.run / "journal")).entries]
    began = [one for one in records if isinstance(one, AttemptBegan)]
    assert [one.exit_code for one in records if isinstance(one, AttemptEnded)] == [-9, 0]
    assert began[1].restore_step >= 5 and "from memory" in began[1].note, began
    assert run.final() == untouched
