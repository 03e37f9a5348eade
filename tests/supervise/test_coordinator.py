"""Real coordinators, agents and workers of several nodes on this machine, killed for real."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.slots import RECORD, Slot, memory_folder, render
from packtrain.core.holder import hold
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import (
    AgentStarted,
    AttemptBegan,
    AttemptEnded,
    CoordinatorBegan,
    NodeLost,
    RunFinished,
    WorldChosen,
)
from packtrain.monitor.recovery import PARTS
from packtrain.monitor.report import gather
from packtrain.supervise import local
from packtrain.supervise.console import ask
from packtrain.supervise.coordinator import main
from packtrain.supervise.job import Job, write_job
from packtrain.supervise.keys import make_keys
from tests.supervise.live import live
from tests.supervise.runs import log, records

# Coordinators and agents outlive on purpose whoever started them, so nobody waits for them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for sockets, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as folder:
        yield pathlib.Path(folder)


def at_work(status: dict[str, Any]) -> list[str]:
    """Nodes of the world in the order of their ranks: which of them work and which wait is whose agent came first."""
    ranks = {node["node"]: node["ranks"] for node in status["nodes"] if node["ranks"]}
    return sorted(ranks, key=lambda name: ranks[name])


def state_of(status: dict[str, Any], name: str) -> str:
    return next((str(node["state"]) for node in status.get("nodes", []) if node["node"] == name), "")


def restarts(status: dict[str, Any]) -> dict[str, int]:
    """Node -> how often its agent was started again, where it was."""
    return {node["node"]: node["restarts"] for node in status.get("nodes", []) if node["restarts"]}


def test_a_run_of_two_nodes_is_healed_and_ends(tmp_path: pathlib.Path) -> None:
    """A killed rank begins another attempt on the same nodes; a killed coordinator touches no worker; a node that is
    stopped is replaced by the spare, and when it goes on, and when its agent was killed, is a spare itself; the run
    ends with 0, and its records tell all of it."""
    with live(tmp_path / "run", spares=1, node_silent_s=2.0, node_lost_s=3.0) as run:
        first, second = at_work(run.step(1, 3))
        (spare,) = {"n0", "n1", "n2"} - {first, second}
        run.kill(run.workers()[1])
        run.step(2, 10)
        before = run.workers()
        assert len(before) == 2
        run.kill(run.processes("supervise.coordinator")[0].pid)
        run.keeper.coordinator()
        status = run.step(2, 30)
        assert run.workers() == before and status["term"] == 2
        agent = run.keeper.live.agents[first]
        for pid in (run.workers()[0], agent):
            os.kill(pid, signal.SIGSTOP)
        assert at_work(run.step(3, 50)) == [spare, second]
        os.kill(agent, signal.SIGCONT)
        run.until(lambda status: state_of(status, first) == "spare")
        run.kill(agent)
        run.until(lambda status: restarts(status) == {first: 1} and state_of(status, first) == "spare")
        assert run.finish() == local.Finish(exit_code=0, reason="done", term=2)
    began, ended = records(run.folder, AttemptBegan), records(run.folder, AttemptEnded)
    assert [one.attempt for one in began] == [one.attempt for one in ended] == [1, 2, 3]
    assert [one.exit_code for one in ended] == [-9, -9, 0] and "SIGKILL" in ended[0].reason
    led = [(one.term, one.nodes, one.spares, one.procs) for one in records(run.folder, CoordinatorBegan)]
    assert led == [(1, 2, 1, 1), (2, 2, 1, 1)]
    assert [one.nodes for one in records(run.folder, WorldChosen)] == [[first, second]] * 2 + [[spare, second]]
    assert records(run.folder, NodeLost)[0].node == first and records(run.folder, RunFinished)[0].exit_code == 0
    assert [(one.node, one.tries) for one in records(run.folder, AgentStarted)] == [(first, 1)]
    told = gather(LocalPlatform(), str(run.folder))
    assert [one.attempt for one in told.facts.attempts] == [1, 2, 3]
    assert [(row.attempt, row.stepped, tuple(row.seconds)) for row in told.recovered] == [
        (1, True, PARTS), (2, True, PARTS),
    ]
    assert log(run.folder).term() == 2


def hold_slot(run: pathlib.Path, begun: Commit, node: str, writer: str) -> None:
    """What a worker leaves in memory, as far as a record tells."""
    folder = memory_folder(str(run), node)
    pathlib.Path(folder).mkdir(0o700)
    image = f"{folder}/{writer}.a0001.0.g0"
    slot = Slot(begin=begun.nonce, attempt=1, step=9, writer=writer, bytes=1, tensors=(), boxes=(), about={})
    pathlib.Path(image).write_bytes(b"x")
    pathlib.Path(image + RECORD).write_bytes(render(slot))


@pytest.mark.soak
def test_what_nodes_hold_in_memory_begins_the_next_attempt(tmp_path: pathlib.Path, memory_disk: None) -> None:
    """Agents tell what lies in the memory of their nodes; the commit log names it, workers are told to restore it, and
    the journal says so."""
    folder = tmp_path / "run"
    try:
        with live(folder) as run:
            run.step(1, 3)
            for node, writer in (("n0", "r00000"), ("n1", "r00001")):
                hold_slot(folder, log(folder).all()[1], node, writer)
            run.kill(run.workers()[1])
            run.step(2, 5)
            (begin,) = [one for one in log(folder).all() if one.attempt == 2]
            assert begin.memory is not None and begin.memory[:2] == (1, 9)
            for pid in run.workers().values():
                assert psutil.Process(pid).environ()["PACKTRAIN_RESTORE"] == f"{begin.number}:{begin.memory[2]}"
            assert run.finish().exit_code == 0
    finally:
        for node in ("n0", "n1"):
            shutil.rmtree(memory_folder(str(folder), node), ignore_errors=True)
    first, second = records(folder, AttemptBegan)
    assert (first.note, second.note) == ("", "step 9 from memory: nothing is on disk yet")
    assert second.restore_step == 9


@pytest.mark.soak
def test_words_of_a_person(tmp_path: pathlib.Path) -> None:
    """What cannot be done is refused with a reason; drain goes on with the spare; stop ends the run with 75 and all its
    processes leave."""
    with live(tmp_path / "run", nodes=1, spares=1) as run:
        (working,) = at_work(run.step(1, 3))
        (spare,) = {"n0", "n1"} - {working}
        for request in ({"op": "dance"}, {"op": "drain", "node": "x"}, {"op": "drain", "node": 7}):
            with pytest.raises(Exception, match="no such|no request"):
                ask(run.platform, run.home, **request)
        ask(run.platform, run.home, "drain", node=working)
        status = run.step(2, 5)
        assert {node["node"]: node["state"] for node in status["nodes"]} == {working: "draining", spare: "running"}
        ask(run.platform, run.home, "stop", by="SIGINT")
        finish = run.finish(enough=False)
        assert finish.exit_code == 75 and finish.error is not None and finish.error["name"] == "run.stopped_on_request"
        run.until(lambda _: not run.processes("supervise.agent") and not run.workers())


@pytest.mark.soak
def test_a_hung_rank_is_found(tmp_path: pathlib.Path) -> None:
    """A rank that is stopped is told by its agent, killed when it is certain, and the run goes on."""
    with live(tmp_path / "run", beat_overdue_s=5.0) as run:
        run.step(1, 3)
        os.kill(run.workers()[1], signal.SIGSTOP)
        run.step(2, 5)
        assert run.finish().exit_code == 0
    ended = records(run.folder, AttemptEnded)
    assert len(ended) == 2 and "rank 1 on n1: silent" in ended[0].reason


def prepared(base: pathlib.Path) -> tuple[list[str], pathlib.Path]:
    """Arguments of a coordinator's main, and its home."""
    run, home = base / "run", base / "c"
    run.mkdir()
    home.mkdir(0o700)
    platform = LocalPlatform()
    write_job(platform, f"{base}/job.json", Job(name="run", run_folder=str(run), worker=(), carrier=(), version="t"))
    make_keys(platform, str(home))
    return ["--job", f"{base}/job.json", "--home", str(home)], home


def test_a_second_coordinator_is_refused(base: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While one holds the run another ends at once with 78, and does not say that the run is over."""
    arguments, home = prepared(base)
    lock = hold(LocalPlatform(), f"{base}/run", "run")
    assert main(arguments) == 78 and "run.held" in capsys.readouterr().err
    assert not (home / "finish").exists() and not (home / "address").exists()
    lock.release()


def test_a_damaged_log_is_told(base: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A coordinator whose log is damaged in its middle decides nothing, and says where and what to do."""
    arguments, home = prepared(base)
    (home / "decisions").mkdir()
    (home / "decisions" / "000001.jsonl").write_bytes(b"no line\n")
    assert main(arguments) == 70 and "run.decisions_damaged" in capsys.readouterr().err
    finish = local.finish_of(LocalPlatform(), local.Live(f"{base}/run", str(base), "n", {}))
    assert finish is not None and finish.error is not None and "000001.jsonl" in finish.error["where"]
    assert log(base / "run").term() == 0
