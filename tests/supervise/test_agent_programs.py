"""An agent and a program that knows nothing of it: its environment, its hangs, and the one word it understands."""

from __future__ import annotations

import json
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from packtrain.core.contract import Word
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.messages import GiveOrder, Launch, RankEnded, RankIdle, RankSilent
from packtrain.supervise.processes import MARK
from tests.supervise.agents import Scene, scene
from tests.supervise.fake_agent import JOB, RUN, Node, launch, stubborn

AROUND = {"A": "1", "RANK": "7", "PMI_FD": "3", "PACKTRAIN_OLD": "1", "SLURM_PROCID": "0"}
PLAIN = msgspec.structs.replace(
    JOB, plain=True, carrier=(), env=AROUND, cwd="/here", supervise=SuperviseConfig(progress_s=200, grace_s=5)
)


def started() -> Node:
    node = Node(job=PLAIN, programs={"worker": stubborn})
    node.join()
    node.do(launch(ranks=(2, 3)))
    return node


def idle(node: Node, after_s: float) -> list[RankIdle]:
    """What was told by then, to a coordinator that comes back to hear it."""
    node.pass_s(after_s)
    node.join()
    node.pass_s(1)
    return node.events(RankIdle)


def test_a_program_is_told_who_it_is() -> None:
    """Rank and addresses under every name, ours beside them; nothing of what started us; where it is to run."""
    node = started()
    _, second = node.children("worker")
    env = second.env
    assert (env["RANK"], env["LOCAL_RANK"], env["PMI_RANK"], env["WORLD_SIZE"]) == ("3", "1", "3", "2")
    assert env["MASTER_ADDR"] == "host" and env["JAX_COORDINATOR_ADDRESS"] == "host:123"
    assert (env["TORCHELASTIC_RUN_ID"], env["TORCHELASTIC_RESTART_COUNT"]) == ("small", "0")
    assert (env["PACKTRAIN_RUN"], env["A"]) == (RUN, "1") and env[MARK].startswith("run/n0/")
    assert not {"PMI_FD", "PACKTRAIN_OLD", "SLURM_PROCID", "PACKTRAIN_CARRIER", "PACKTRAIN_GO_S"} & set(env)


def test_a_program_that_does_nothing_is_told_once() -> None:
    """Without beats, output and processor time for `progress_s`: told for each rank, once."""
    node = started()
    assert not idle(node, after_s=195)
    told = idle(node, after_s=30)
    assert sorted(event.rank for event in told) == [2, 3]
    assert all(200 <= event.seconds < 205 and not event.stopped for event in told)


def test_output_and_beats_are_signs_of_life() -> None:
    """A rank that prints is not idle, and one that has sent a beat is judged by its beats alone."""
    node = started()
    for turn in range(15):
        node.platform.write_replacing(f"{RUN}/logs/0001/2.log", b"x" * turn)
        node.beat("step", turn, rank=3)
        node.pass_s(20)
    assert not idle(node, after_s=1)


def test_a_disk_that_hangs_is_held_against_nobody() -> None:
    """While its log cannot be looked at nobody knows whether a program prints."""
    node = started()
    node.pass_s(10)
    hangs_s = [300.0]

    def hang_once(op: str, path: str, n: int) -> None:
        if op == "size" and hangs_s:
            node.platform.pause(hangs_s.pop())

    node.platform.faults = hang_once
    assert not idle(node, after_s=450) and not hangs_s
    assert len(idle(node, after_s=100)) == 2


@pytest.mark.parametrize("word", [Word.STOP, Word.DRAIN, Word.SAVE])
def test_stop_is_a_signal(word: Word) -> None:
    """STOP and DRAIN reach a program as SIGTERM, whatever its control file says; of other words it hears nothing."""
    node = started()
    node.do(GiveOrder(attempt=1, order=1, word=word))
    signals = [signal.SIGTERM] if word != Word.SAVE else []
    assert [child.signals for child in node.children("worker")] == [signals, signals]


# --- real processes ------------------------------------------------------------------------------------


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for sockets, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder:
        yield pathlib.Path(folder)


def launched(one: Scene) -> psutil.Process:
    """The program, once it has printed."""
    one.joined()
    one.coordinator.ask(1, Launch(attempt=1, begin=1, ranks=(0,), world_size=1, master="127.0.0.1:29500"))
    log = one.run / "logs/0001/0.log"
    one.until(lambda: log.exists() and log.read_text(), "output")
    return psutil.Process(next(found.pid for found in one.alive() if found.attempt))


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import json, os, signal, sys, time\n{text}")


def test_a_real_program_runs_where_it_is_told_to(base: pathlib.Path) -> None:
    """Its folder is the person's, and its environment as it was, with its rank."""
    text = "print(json.dumps([os.getcwd(), os.environ['RANK'], os.environ['OMPI_COMM_WORLD_SIZE']]))"
    (base / "here").mkdir()
    with scene(base, program(text), plain=True, cwd=str(base / "here")) as one:
        one.joined()
        one.coordinator.ask(1, Launch(attempt=1, begin=1, ranks=(0,), world_size=1, master="127.0.0.1:29500"))
        one.until(lambda: one.coordinator.of(RankEnded), "an end")
        (end,) = one.coordinator.of(RankEnded)
        assert end.status == 0 and json.loads(end.tail) == [str(base / "here"), "0", "1"]


@pytest.mark.soak
def test_a_real_program_that_is_stopped_is_told(base: pathlib.Path) -> None:
    """SIGSTOP to a child of a shell that is the rank: told after `stopped_s`, and never as silent."""
    command = ("bash", "-c", f"{sys.executable} -c 'print(1, flush=True); import time; time.sleep(600)' & wait")
    with scene(base, command, plain=True, supervise=SuperviseConfig(stopped_s=1)) as one:
        shell = launched(one)
        (child,) = shell.children()
        child.send_signal(signal.SIGSTOP)
        one.until(lambda: one.coordinator.of(RankIdle), "idleness")
        (told,) = one.coordinator.of(RankIdle)
        assert told.stopped and told.rank == 0 and not one.coordinator.of(RankSilent)


def test_sigterm_reaches_what_a_shell_started(base: pathlib.Path) -> None:
    """A program behind a shell takes its time to save, though the shell dies of the signal first."""
    (base / "saves.py").write_text(
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(1)\n    open('saved', 'w')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready')\ntime.sleep(600)\n"
    )
    with scene(base, ("bash", "-c", f"{sys.executable} saves.py; exit"), plain=True, cwd=str(base)) as one:
        launched(one)
        one.coordinator.ask(2, GiveOrder(attempt=1, order=1, word=Word.STOP))
        one.until(lambda: one.coordinator.of(RankEnded), "an end")
        assert (base / "saved").exists()
