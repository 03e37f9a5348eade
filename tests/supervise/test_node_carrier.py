"""The carrier under an agent, in virtual time: it comes again, is given up where it hangs, and finds its neighbours."""

from __future__ import annotations

import signal
from typing import Any, TypeVar

import msgspec
import pytest

from packtrain.core.contract import Word
from packtrain.core.fake import FakePlatform, FakeProcess, fail
from packtrain.core.fake_process import Life
from packtrain.core.platform import Process
from packtrain.supervise.messages import (
    Action,
    CarrierEnded,
    CarrierHomeBack,
    CarrierUp,
    Did,
    EndAttempt,
    EndWorkers,
    GiveOrder,
    RunDone,
    Unkillable,
)
from packtrain.supervise.node_carrier import HURRY
from tests.supervise.fake_agent import HOME, JOB, Node, answering, launch, stubborn

T = TypeVar("T")
DISK = "/disks/a"
OVERDUE_S = JOB.supervise.carrier_overdue_s


class Standing:
    """What carriers of a test say of themselves."""

    def __init__(self) -> None:
        self.mute = self.leaves = False
        self.hung: list[dict[str, Any]] = []
        self.quarantine: list[str] = []
        self.heard = 0

    def __call__(self, line: dict[str, Any]) -> object:
        self.heard += 1
        stands = {"re": "stands", "id": line["id"], "saves": 0, "hung": self.hung, "quarantine": self.quarantine}
        return None if self.mute else stands

    def hang(self, seconds: float = OVERDUE_S + 1) -> None:
        self.hung = [{"path": DISK, "threads": 1, "s": seconds}]


def started(standing: Standing, nodes: int = 1, spares: int = 0) -> Node:
    node = Node(
        msgspec.structs.replace(JOB, nodes=nodes, spares=spares),
        {"carrier": answering(standing, lambda: standing.leaves)},
    )
    node.join()
    node.do(launch())
    return node


def told(node: Node, kind: type[T]) -> list[T]:
    """All that the coordinator has heard of a kind; the agent may have called it anew."""
    node.join()
    return node.events(kind)


def test_a_carrier_that_answers_stays() -> None:
    """Asked once a second and never ended, however long the attempt is."""
    standing = Standing()
    node = started(standing)
    node.pass_s(300, look_s=0.2)
    assert len(node.children("carrier")) == 1 and not told(node, CarrierEnded)
    assert 200 < standing.heard <= 301


def test_a_carrier_that_cannot_be_started_again_is_tried_later_and_later() -> None:
    """The first try that succeeds is the last one; why it cannot be is told, the worker is not touched."""
    node = started(Standing())
    tries: list[str] = []

    def refuse(op: str, path: str, n: int) -> object:
        if op == "spawn":
            tries.append(path)
        return fail(12) if op == "spawn" else None

    node.platform.faults = refuse  # type: ignore[assignment]
    node.children("carrier")[0].exit(-11)
    node.pass_s(6)
    assert len(tries) == 3
    node.platform.faults = None
    node.pass_s(30)
    whys = [end.why for end in told(node, CarrierEnded)]
    assert set(whys) == {"it cannot be started: Cannot allocate memory"}
    assert len(node.children("carrier")) == 2 and node.children("carrier")[1].poll() is None
    assert node.children("worker")[0].poll() is None


def test_a_silent_carrier_is_given_up() -> None:
    """Killed after `carrier_overdue_s` without an answer, told once, and another one starts at once."""
    standing = Standing()
    node = started(standing)
    node.pass_s(5)
    standing.mute = True
    node.pass_s(OVERDUE_S - 2)
    assert len(node.children("carrier")) == 1
    node.pass_s(3)
    first, second = node.children("carrier")
    assert first.poll() == -9 and second.poll() is None and node.children("worker")[0].poll() is None
    (end,) = told(node, CarrierEnded)
    assert end.given_up and end.why == "answered nothing for 30 s (supervise.carrier_overdue_s)"
    assert end.error["name"] == "checkpoint.carrier_hung" and "another one starts" in end.error["what"]


def test_time_in_which_the_agent_slept_is_no_silence() -> None:
    """A machine suspended for an hour: its carrier is not given up for that."""
    standing = Standing()
    node = started(standing)
    node.pass_s(5)
    standing.mute = True
    node.pass_s(3)
    node.platform.pause(3600)
    standing.mute = False
    node.agent.turn()
    assert not told(node, CarrierEnded)


def test_a_carrier_whose_thread_hangs_is_given_up_for_one_that_keeps_off_that_disk() -> None:
    """`--quarantine` names the home; the next one is not given up for the same home."""
    standing = Standing()
    node = started(standing)
    node.pass_s(3)
    standing.hang()
    node.pass_s(1.2)
    standing.quarantine = [DISK]
    node.pass_s(60)
    first, second = node.children("carrier")
    assert first.poll() == -9 and "--quarantine" not in first.argv
    assert second.poll() is None and second.argv[second.argv.index("--quarantine") + 1] == DISK
    (end,) = told(node, CarrierEnded)
    assert end.given_up and end.quarantine == (DISK,) and f"hung in {DISK}" in end.why


def test_what_is_known_of_a_disk_outlives_an_attempt() -> None:
    """The carrier of the next attempt keeps off the home that one of the attempt before hung in, is not given up for
    it, and when it answers that is told."""
    standing = Standing()
    node = started(standing)
    node.pass_s(3)
    standing.hang()
    node.pass_s(1.2)
    standing.quarantine = [DISK]
    node.pass_s(3)
    node.do(EndAttempt(attempt=1))
    node.pass_s(1)
    node.do(launch(attempt=2))
    node.pass_s(60)
    *_, carrier = node.children("carrier")
    assert carrier.poll() is None and carrier.argv[carrier.argv.index("--quarantine") + 1] == DISK
    assert len(told(node, CarrierEnded)) == 1 and not told(node, CarrierHomeBack)
    standing.quarantine, standing.hung = [], []
    node.pass_s(3)
    assert told(node, CarrierHomeBack) == [CarrierHomeBack(attempt=2, path=DISK)]


@pytest.mark.parametrize("word, stays", [(Word.STOP, True), (Word.DRAIN, True), (Word.SAVE, False)])
def test_no_carrier_is_given_up_for_a_thread_while_the_last_save_is_waited_for(word: Word, stays: bool) -> None:
    """STOP and DRAIN keep it; another word does not."""
    standing = Standing()
    node = started(standing)
    node.children("worker")[0].catches.add(signal.SIGTERM)
    node.do(GiveOrder(attempt=1, order=1, word=word))
    standing.hang()
    node.pass_s(20)
    assert (node.children("carrier")[0].poll() is None) == stays


def test_what_a_carrier_said_before_it_ended_says_nothing_of_the_next() -> None:
    """An answer that would have it given up, and its exit, seen in one look: one end is told, another one starts at
    once and keeps off nothing."""
    standing = Standing()
    node = started(standing)
    node.pass_s(3)
    said = standing.heard
    standing.hang()
    while standing.heard == said:
        node.agent.turn()
        node.platform.pause(0.06)
    standing.leaves = True
    node.platform.pause(0.2)
    standing.leaves, standing.hung = False, []
    node.pass_s(0.5)
    assert [end.why for end in told(node, CarrierEnded)] == ["exit code 3"]
    assert len(node.children("carrier")) == 2 and "--quarantine" not in node.children("carrier")[1].argv


@pytest.mark.parametrize("nodes, spares, has", [(1, 0, False), (1, 1, True), (2, 0, True)])
def test_only_a_job_of_several_nodes_has_neighbours(nodes: int, spares: int, has: bool) -> None:
    """`--peers` and `--listen` where another node may take part; a spare counts."""
    (carrier,) = started(Standing(), nodes, spares).children("carrier")
    pairs = dict(zip(carrier.argv[1::2], carrier.argv[2::2], strict=True))
    assert (pairs.get("--peers"), pairs.get("--listen")) == ((f"{HOME}/peers.json", "host") if has else (None, None))


def test_where_a_carrier_listens_is_told_once_for_each() -> None:
    """Not before it says so, nor what the one before said; a file of nonsense is waited out."""
    node = started(Standing(), nodes=2)
    address = f"{HOME}/carrier.address"
    node.platform.write_replacing(address, b"[]")
    node.pass_s(1)
    assert not told(node, CarrierUp)
    node.platform.write_replacing(address, b'{"address": "host:9"}')
    node.pass_s(2)
    node.children("carrier")[0].exit(-9)
    node.pass_s(2)
    assert told(node, CarrierUp) == [CarrierUp(attempt=1, address="host:9")] and told(node, CarrierEnded)
    node.platform.write_replacing(address, b'{"address": "host:10"}')
    node.pass_s(2)
    assert [up.address for up in told(node, CarrierUp)] == ["host:9", "host:10"]


def test_an_attempt_that_ends_starts_no_carrier() -> None:
    """One that is silent while it finishes its saves is neither given up nor followed by another; killed at its
    bound."""
    node = Node(programs={"carrier": stubborn})
    node.join()
    node.do(launch())
    node.do(EndAttempt(attempt=1, carrier_s=200.0))
    node.pass_s(190, look_s=0.5)
    (carrier,) = node.children("carrier")
    assert carrier.poll() is None and carrier.signals == [signal.SIGTERM]
    node.pass_s(15, look_s=0.5)
    assert carrier.poll() == -9 and len(node.children("carrier")) == 1 and not told(node, CarrierEnded)
    assert [did.id for did in told(node, Did)] == [1, 2]


def hurrying(process: FakeProcess) -> Life:
    """A carrier that takes the word, and listens."""
    process.catches.add(HURRY)
    life = answering(Standing())(process)
    assert not isinstance(life, int | None)
    return life


def test_carriers_of_a_run_that_is_done_are_told_once_they_listen() -> None:
    """One that still starts would die of the signal; each is told once, and so is the one that takes its place."""
    node = Node(programs={"carrier": hurrying})
    node.join()
    node.do(launch())
    listener = f"{HOME}/carrier"
    node.platform.unlink(listener)
    node.do(RunDone(attempt=1))
    node.pass_s(2)
    (first,) = node.children("carrier")
    assert first.signals == []
    node.platform.write_new(listener, b"")
    node.pass_s(2)
    assert first.signals == [HURRY]
    first.exit(-9)
    node.pass_s(2)
    assert [one.signals for one in node.children("carrier")] == [[HURRY], [HURRY]]
    assert [did.error for did in told(node, Did)] == ["", ""]


class Stuck(Process):
    """A process that nobody sees end, as if it hung in a dead file system."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return None

    def wait(self, timeout_s: float | None = None) -> int | None:
        assert timeout_s is not None, "this would wait for ever"
        return None

    def send_signal(self, signum: int) -> None: ...


class Hanging(FakePlatform):
    """Processes that cannot be killed."""

    def spawn(self, *args: Any, **options: Any) -> Process:
        return Stuck(super().spawn(*args, **options))


@pytest.mark.parametrize(("ends", "what"), [
    (EndWorkers(attempt=1, reason="test"), "rank 0"), (EndAttempt(attempt=1, carrier_s=1.0), "the carrier"),
])
def test_what_not_even_sigkill_ends_is_told(ends: Action, what: str) -> None:
    """Once, five seconds after it was killed, with its number; the agent goes on meanwhile."""
    node = Node(platform=Hanging)
    node.join()
    node.do(launch())
    node.do(ends)
    node.pass_s(4)
    assert not told(node, Unkillable)
    node.do(EndWorkers(attempt=1, reason="again"))
    node.pass_s(30)
    one = next(one for one in told(node, Unkillable) if one.what == what)
    assert one.pid == node.children(what.split()[-1] if "carrier" in what else "worker")[0].pid
    assert 5 <= one.seconds < 6 and [one.what for one in told(node, Unkillable)].count(what) == 1
    assert node.agent.exit_code is None
