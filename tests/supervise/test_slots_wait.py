"""Workers that begin from memory of a lost node wait until their carrier has fetched it, in virtual time."""

from __future__ import annotations

import signal
from typing import Any

import msgspec
import pytest

from packtrain.core.contract import Word
from packtrain.core.errors import SlotDamaged
from packtrain.core.fake import fail
from packtrain.supervise.messages import Action, Did, EndAttempt, EndWorkers, GiveOrder, Launch, Peers, RankEnded
from tests.supervise.fake_agent import HOME, JOB, Node, Slow, answering, launch

WORLD = msgspec.structs.replace(JOB, nodes=3)
FROM = {"r00000": "n1", "r00001": "n2"}
ALL = {"n0": "host:1", "n1": "host:2", "n2": "host:3"}
GO_S = JOB.supervise.go_s


class Fetches:
    """What a carrier answers to `fetch`, and what it was asked. "": it closes the connection."""

    def __init__(self, outcome: object = None) -> None:
        self.outcome = {"re": "outcome", "id": 1, "ok": True, "fetched": 2} if outcome is None else outcome
        self.asked: list[dict[str, Any]] = []

    def __call__(self, line: dict[str, Any]) -> object:
        if line["op"] == "stand":
            return {"re": "stands", "id": line["id"], "saves": 0, "hung": [], "quarantine": []}
        self.asked.append(line)
        return self.outcome


def wanting(attempt: int = 1, ranks: tuple[int, ...] = (0, 1), **holders: str) -> Launch:
    return msgspec.structs.replace(launch(attempt, ranks), memory=True, memory_from=holders or FROM)


def waiting(fetches: Fetches, kind: type = Slow, listens: bool = True) -> Node:
    """A node whose workers wait for their slots; its carrier listens."""
    node = Node(WORLD, {"carrier": answering(fetches)}, kind)
    node.join()
    node.do(wanting())
    if listens:
        node.platform.write_replacing(f"{HOME}/carrier.address", b'{"address": "host:1"}')
    node.pass_s(0.2)
    return node


def introduce(node: Node, **addresses: str) -> None:
    node.do(Peers(attempt=1, addresses=addresses or ALL))
    node.pass_s(0.3)


def work(node: Node) -> None:
    """All errands under way are done."""
    assert isinstance(node.platform, Slow)
    works, node.platform.works[:] = list(node.platform.works), []
    for one in works:
        one()
    node.pass_s(0.3)


def ends(node: Node) -> list[tuple[int, int, str]]:
    node.join()
    return [(end.rank, end.status, end.error.get("name", "")) for end in node.events(RankEnded)]


FROM_DISK = [(0, 75, SlotDamaged.name), (1, 75, SlotDamaged.name)]


def test_workers_start_when_their_slots_are_here() -> None:
    """Not before the carriers of all that hold them are known and the outcome has come; the launch is done at once."""
    fetches = Fetches()
    node = waiting(fetches)
    assert node.events(Did) == [Did(id=1)]
    introduce(node, n0="host:1", n1="host:2")
    work(node)
    assert not fetches.asked
    introduce(node)
    assert not node.children("worker")
    work(node)
    assert len(node.children("worker")) == 2 and not ends(node)
    introduce(node)
    work(node)
    (asked,) = fetches.asked
    assert (asked["op"], asked["writers"]) == ("fetch", FROM) and 0 < asked["deadline_s"] < GO_S / 2
    assert len(node.children("worker")) == 2


def test_a_carrier_that_does_not_listen_yet_is_not_asked() -> None:
    """Peers may know more than this node's carrier has told; it is asked once it listens."""
    fetches = Fetches()
    node = waiting(fetches, listens=False)
    introduce(node)
    work(node)
    assert not fetches.asked
    node.platform.write_replacing(f"{HOME}/carrier.address", b'{"address": "host:1"}')
    node.pass_s(0.3)
    work(node)
    assert len(fetches.asked) == 1 and len(node.children("worker")) == 2


def test_what_a_node_keeps_itself_needs_no_neighbour() -> None:
    """A world shrunk to one node, which keeps the slots of the other: nobody introduces anybody."""
    fetches = Fetches()
    node = Node(WORLD, {"carrier": answering(fetches)}, Slow)
    node.join()
    node.do(wanting(r00000="n0"))
    node.platform.write_replacing(f"{HOME}/carrier.address", b'{"address": "host:1"}')
    node.pass_s(0.3)
    work(node)
    assert len(fetches.asked) == 1 and len(node.children("worker")) == 2


def test_a_carrier_that_went_ahead_may_have_been_introduced() -> None:
    """Its peers were told before the ranks came: they are not waited for again, and the carrier alone fetches
    nothing."""
    fetches = Fetches()
    node = Node(WORLD, {"carrier": answering(fetches)}, Slow)
    node.join()
    node.do(wanting(ranks=()))
    node.platform.write_replacing(f"{HOME}/carrier.address", b'{"address": "host:1"}')
    introduce(node)
    work(node)
    assert not fetches.asked
    node.do(wanting())
    node.do(wanting())
    work(node)
    assert len(fetches.asked) == 1 and len(node.children("worker")) == 2
    assert [did.error for did in node.events(Did)][-1] == "attempt 1 has begun here already"


@pytest.mark.parametrize("outcome", [
    {"re": "outcome", "id": 1, "ok": False, "error": {"name": "checkpoint.peer_copy_failed", "what": "it is gone"}},
    {"re": "outcome", "id": 1, "ok": False, "error": "it is gone"},
    {"re": "outcome", "id": 1}, {"re": "busy", "id": 1}, "",
])
def test_slots_that_do_not_come_end_each_rank_once(outcome: object) -> None:
    """Whatever the carrier says instead of yes, even nothing: exit 75 with `checkpoint.slot_damaged`, so that the next
    attempt begins from disk; no worker is started, then or later."""
    fetches = Fetches(outcome)
    node = waiting(fetches)
    introduce(node)
    work(node)
    introduce(node)
    work(node)
    assert ends(node) == FROM_DISK and not node.children("worker")
    assert len(fetches.asked) == 1
    told = node.events(RankEnded)[0].error
    assert told["fix"] and told["what"].startswith("slots in memory cannot be brought to node n0: ")
    if isinstance(outcome, dict) and isinstance(outcome.get("error"), dict):
        assert told["what"].endswith(": it is gone")


@pytest.mark.parametrize("known", [True, False])
def test_slots_are_not_waited_for_without_end(known: bool) -> None:
    """A carrier that hangs with the request, or one that never learns of all holders: half of `go_s`, which is less
    than the coordinator has patience for."""
    fetches = Fetches()
    node = waiting(fetches)
    introduce(node) if known else introduce(node, n0="host:1", n1="host:2")
    node.pass_s(GO_S / 2 - 5, look_s=0.2)
    assert not ends(node)
    node.pass_s(5, look_s=0.2)
    assert ends(node) == FROM_DISK
    what = node.events(RankEnded)[0].error["what"]
    assert what.endswith("did not answer in time" if known else "no carrier was known in time of n2")
    introduce(node)
    work(node)
    assert len(ends(node)) == 2 and not node.children("worker")


@pytest.mark.parametrize("fetching", [True, False])
@pytest.mark.parametrize("action, status", [
    (EndWorkers(attempt=1, reason="a rank ended"), -9), (EndAttempt(attempt=1), -9), (wanting(2, (5,)), -9),
    (GiveOrder(attempt=1, order=2, word=Word.STOP), 75), (GiveOrder(attempt=1, order=2, word=Word.DRAIN), 75),
])
def test_what_ends_an_attempt_ends_the_wait(fetching: bool, action: Action, status: int) -> None:
    """Each rank is told ended at once, as the coordinator expects; slots that come after that start nobody."""
    node = waiting(Fetches())
    if fetching:
        introduce(node)
    node.do(action)
    node.pass_s(0.3)
    assert [(rank, how, name) for rank, how, name in ends(node)] == [(0, status, ""), (1, status, "")]
    introduce(node)
    work(node)
    node.do(EndWorkers(attempt=1, reason="again"))
    node.pass_s(0.3)
    assert not node.children("worker") and len(ends(node)) == 2


def test_another_word_does_not_end_the_wait() -> None:
    """SAVE has nothing to save, and workers start all the same."""
    node = waiting(Fetches())
    node.do(GiveOrder(attempt=1, order=2, word=Word.SAVE))
    introduce(node)
    work(node)
    assert len(node.children("worker")) == 2


def test_a_node_that_goes_away_ends_the_wait() -> None:
    """SIGTERM to the agent: its ranks are told ended, and nothing is saved or waited for."""
    node = waiting(Fetches())
    node.requests.arrive(signal.SIGTERM)
    node.pass_s(0.5)
    assert [status for _, status, _ in ends(node)] == [75, 75]
    node.pass_s(4)
    assert node.agent.exit_code == 75 and not node.children("worker")


def test_workers_that_cannot_be_started_after_the_wait_are_told() -> None:
    """The launch was answered long ago: one end for each rank, which blames this node, and nothing is left."""
    node = waiting(Fetches())
    introduce(node)
    spawned: list[int] = []

    def refuse(op: str, path: str, n: int) -> object:
        if op == "spawn":
            spawned.append(n)
        return fail(12) if op == "spawn" and len(spawned) == 2 else None

    node.platform.faults = refuse  # type: ignore[assignment]
    work(node)
    node.platform.faults = None
    work(node)
    assert sorted(ends(node)) == [(0, -9, ""), (1, 126, "")]
    assert "cannot begin here" in next(end.tail for end in node.events(RankEnded) if end.rank == 1)
    node.do(EndAttempt(attempt=1))
    assert all(child.poll() is not None for child in node.platform.children)
    assert node.events(Did)[-1].error == ""
