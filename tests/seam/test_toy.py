"""Proof of the seam: a supervisor's view of a program it knows nothing about, over real socket, file and signals."""

from __future__ import annotations

import pathlib
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import pytest

from packtrain.core.contract import (
    EXIT_AGAIN,
    EXIT_CONFIG,
    EXIT_DONE,
    GO_ID,
    Beat,
    Order,
    Place,
    Ready,
    Restore,
    Word,
    crc32c,
    order_bytes,
    parse_beat,
    parse_ready,
    worker_env,
)
from packtrain.core.platform import LocalPlatform, Process

TOY = pathlib.Path(__file__).parent / "toy.py"
ROOT = TOY.parent.parent.parent
FOREVER = 10**12
DEADLINE_S = 60


class Node:
    """A run folder, a beat socket and a control file: what an agent has in its hands. It kills what it left."""

    def __init__(self, run: str) -> None:
        self.platform = LocalPlatform()
        self.run = pathlib.Path(run)
        self.place = Place(
            run=run, attempt=1, fresh=True, socket=f"{run}/beats", control=f"{run}/control.json", grace_s=5.0
        )
        self.inbox = self.platform.datagram_receiver(self.place.socket)
        self.inbox.settimeout(DEADLINE_S)
        self.started: list[Process] = []

    def start(self, steps: int = FOREVER, **changes: object) -> Process:
        """`-S`: without site-packages, so nothing but the standard library and the contract can be imported."""
        env = {**worker_env(replace(self.place, **changes)), "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-S", str(TOY), str(steps)]
        self.started.append(self.platform.spawn(argv, env, log_path=str(self.run / "log")))
        return self.started[-1]

    def give(self, order: Order) -> None:
        self.platform.write_replacing(self.place.control, order_bytes(order))

    def beat_where(self, wanted: Callable[[Beat], bool]) -> Beat:
        """The next beat that is as wanted; a worker that sends none fails the test at the deadline."""
        while True:
            beat = parse_beat(self.inbox.recv(8192))
            assert beat is not None
            if wanted(beat):
                return beat

    def waiting(self) -> int:
        """Take what is in the queue, so that the next worker's first beats find room; how many those were."""
        taken = 0
        self.inbox.setblocking(False)
        with suppress(BlockingIOError):
            while self.inbox.recv(8192):
                taken += 1
        self.inbox.settimeout(DEADLINE_S)
        return taken

    def saved(self) -> list[int]:
        return sorted(int(path.name.removeprefix("state-")) for path in self.run.glob("state-*"))

    def log(self) -> str:
        return (self.run / "log").read_text()

    def close(self) -> None:
        for process in self.started:
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_S)
        self.inbox.close()


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="pt-") as run:
        made = Node(run)
        yield made
        made.close()


def test_it_counts_beats_and_ends(node: Node) -> None:
    """A program that finishes exits 0, and its beats said who it is, how far it came and where the time went."""
    process = node.start(steps=5, attempt=7, rank=3)
    beats = [node.beat_where(lambda beat: True)]
    while beats[-1].step < 5:
        beats.append(node.beat_where(lambda beat: True))
    assert process.wait(DEADLINE_S) == EXIT_DONE
    assert {(beat.attempt, beat.rank, beat.pid) for beat in beats} == {(7, 3, process.pid)}
    assert [phase for phase, _ in groupby(beat.phase for beat in beats)] == ["init", "restore", "init", "step"]
    assert [beat.seq for beat in beats] == sorted(beat.seq for beat in beats)
    assert beats[-1].ns["step"] > 0 and node.saved() == [5] and node.log() == ""


def test_sigterm_becomes_a_word(node: Node) -> None:
    """SIGTERM ends no step in the middle: the count is saved, the code says restart me, and the next start goes on."""
    process = node.start()
    before = node.beat_where(lambda beat: beat.step >= 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == EXIT_AGAIN
    (count,) = node.saved()
    assert count >= before.step
    digest = f"{crc32c(b'%d' % count):08x}"
    node.waiting()
    again = node.start(steps=count + 3, attempt=2, fresh=False, restore=Restore(count, digest))
    node.beat_where(lambda beat: beat.attempt == 2 and beat.phase == "step" and beat.step == count)
    assert again.wait(DEADLINE_S) == EXIT_DONE and node.saved() == [count, count + 3]


@pytest.mark.parametrize("word", [Word.STOP, Word.DRAIN])
def test_a_stop_in_the_control_file_is_obeyed_at_a_step_boundary(node: Node, word: Word) -> None:
    """The order is found by looking once a step: the count is saved, and the exit code says restart me."""
    process = node.start()
    before = node.beat_where(lambda beat: beat.step >= 2)
    node.give(Order(1, word))
    assert process.wait(DEADLINE_S) == EXIT_AGAIN
    (count,) = node.saved()
    assert count >= before.step


@pytest.mark.parametrize(("word", "code"), [(Word.GO, EXIT_DONE), (Word.STOP, EXIT_AGAIN)])
def test_a_rank_that_is_ready_waits_for_the_word(node: Node, word: Word, code: int) -> None:
    """It says again and again what it begins from, makes no step, and then begins or leaves as it is told."""
    process = node.start(steps=3, attempt=4, rank=1, go_s=float(DEADLINE_S))
    told: list[Ready] = []
    while len(told) < 3:
        data = node.inbox.recv(8192)
        beat, ready = parse_beat(data), parse_ready(data)
        assert (beat is None) != (ready is None) and (beat is None or beat.step < 0)
        told += [ready] if ready else []
    assert set(map(repr, told)) == {repr(Ready(4, 1, process.pid, {"count": "0"}))}
    node.give(Order(GO_ID, word))
    assert process.wait(DEADLINE_S) == code and node.saved() == ([3] if code == EXIT_DONE else [])


def test_a_rank_waits_so_long_and_no_longer(node: Node) -> None:
    """Where nobody says go in time it ends by itself, with the name of what happened."""
    assert node.start(go_s=0.1).wait(DEADLINE_S) == EXIT_AGAIN
    assert "world.no_go" in node.log()


def test_a_save_is_done_once_and_the_run_goes_on(node: Node) -> None:
    """SAVE saves at the next step, no earlier order is obeyed again, and a STOP after it still ends the run."""
    process = node.start()
    node.beat_where(lambda beat: beat.step >= 2)
    node.give(Order(5, Word.SAVE))
    after = node.beat_where(lambda beat: beat.phase == "step" and beat.ns.get("save", 0) > 0)
    node.beat_where(lambda beat: beat.step > after.step + 10)
    (first,) = node.saved()
    node.give(Order(4, Word.STOP))
    later = node.beat_where(lambda beat: beat.step > after.step + 1000)
    node.give(Order(6, Word.STOP))
    assert process.wait(DEADLINE_S) == EXIT_AGAIN
    assert node.saved()[0] == first <= after.step < later.step <= node.saved()[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fresh": False}, "neither PACKTRAIN_RESTORE nor PACKTRAIN_FRESH is set"),
        ({"restore": Restore(1, "ab")}, "both PACKTRAIN_RESTORE and PACKTRAIN_FRESH are set"),
        ({"rank": -1}, "RANK is '-1'"),
    ],
)
def test_a_start_that_cannot_be_right_is_never_tried_again(node: Node, changes: dict[str, object], said: str) -> None:
    """A wrong environment exits 78 with one clear message, no traceback, and nothing written."""
    process = node.start(**changes)
    assert process.wait(DEADLINE_S) == EXIT_CONFIG
    assert said in node.log() and "Traceback" not in node.log() and node.saved() == []


def test_a_damaged_checkpoint_is_not_started_from(node: Node) -> None:
    """The digest chosen by the coordinator decides, whatever the file says: exit 75, so that another is chosen."""
    (node.run / "state-9").write_text("9")
    process = node.start(fresh=False, restore=Restore(9, "00000000"))
    assert process.wait(DEADLINE_S) == EXIT_AGAIN
    assert "[checkpoint.damaged]" in node.log() and node.saved() == [9]


def test_it_runs_by_hand(node: Node) -> None:
    """With no agent there is no socket and no control file, and the program does not notice."""
    process = node.start(steps=3, attempt=0, socket="", control="")
    assert process.wait(DEADLINE_S) == EXIT_DONE and node.saved() == [3]
    assert node.waiting() == 0


def test_it_outlives_its_agent(node: Node) -> None:
    """An agent that is gone, or gone and back under the same path, costs beats and nothing else."""
    process = node.start()
    node.beat_where(lambda beat: beat.step >= 2)
    node.inbox.close()
    pathlib.Path(node.place.socket).unlink()
    node.inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    node.inbox.settimeout(DEADLINE_S)
    node.inbox.bind(node.place.socket)
    before = node.beat_where(lambda beat: True)
    assert node.beat_where(lambda beat: beat.step > before.step).seq > before.seq
    assert process.poll() is None
