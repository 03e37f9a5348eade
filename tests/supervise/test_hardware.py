"""Failing hardware, from a line of the kernel to what becomes of its node."""

from __future__ import annotations

import signal

import pytest

from packtrain.core.contract import Word
from packtrain.core.fake import fail
from packtrain.core.kernel_log import message
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import ErrorSeen, NodeCordoned, NodeSuspected
from packtrain.supervise import messages as m
from packtrain.supervise.messages import HardwareSeen, Pulse
from tests.monitor.test_kernel import CE, recorded
from tests.supervise.fake_agent import Node, launch
from tests.supervise.played import Play, actions, begin_of, written

OFF_BUS = next(line for *_, line in recorded() if "Xid" in line and "fallen off the bus" in line)
XIDS = [(verdict, line) for verdict, *_, line in recorded() if verdict and "Xid" in line]


# --- an agent and its kernel -----------------------------------------------------------------------------


def listening(*lines: str) -> Node:
    """A node with a worker whose kernel says this."""
    node = Node()
    node.platform.kernel.append("NVRM: Xid (PCI:0000:01:00): 79, pid=1, said before this agent began")
    node.agent = node.incarnation()
    node.join()
    node.do(launch())
    node.platform.kernel += lines
    node.pass_s(3.0)
    return node


@pytest.mark.parametrize(("verdict", "line"), XIDS)
def test_an_agent_tells_what_its_kernel_says(verdict: str, line: str) -> None:
    """Once, with the line; what was said before it began is not held against the node; the worker is not touched."""
    node = listening(line, line, "eth0: link up")
    (seen,) = node.events(HardwareSeen)
    assert (seen.verdict, seen.text) == (verdict, line[:300])
    assert node.children("worker")[0].poll() is None


def test_a_burst_of_ecc_errors_is_told() -> None:
    """Single errors, corrected by the machine, are not."""
    assert not listening(*[CE.format(1)] * 9).events(HardwareSeen)
    (seen,) = listening(*[CE.format(1)] * 30).events(HardwareSeen)
    assert (seen.verdict, seen.what) == ("leave", "burst of ECC errors")


@pytest.mark.parametrize("op", ["kernel_log", "kernel_log_read"])
def test_a_log_that_may_not_be_read(op: str) -> None:
    """From the start, or from some time on: nothing is heard, and nothing else changes."""
    node = Node()
    node.platform.faults = lambda asked, path, count: fail() if asked == op else None
    node.agent = node.incarnation()
    node.join()
    node.do(launch())
    node.platform.kernel.append(OFF_BUS)
    node.pass_s(3.0)
    assert not node.events(HardwareSeen) and node.children("worker")[0].poll() is None
    assert len([said for said in node.link.sent if isinstance(said, Pulse)]) >= 3


def test_a_record_of_the_kernel_is_its_text() -> None:
    """Without what stands before it and the lines about the device."""
    record = b"4,1234,5140900,-;NVRM: Xid (PCI:0000:01:00): 79, it fell\n SUBSYSTEM=pci\n DEVICE=+pci:0000:01:00.0\n"
    assert message(record) == "NVRM: Xid (PCI:0000:01:00): 79, it fell"
    assert message(b"rubbish") == ""


def test_the_log_of_this_machine() -> None:
    """It opens and says nothing that was said before, or refuses as an OSError."""
    try:
        log = LocalPlatform().kernel_log()
    except OSError as error:
        assert error.errno
        return
    assert len(log.read()) < 1000
    log.close()


def test_a_worker_that_the_kernel_killed_for_want_of_memory() -> None:
    """Its end is told with the kernel's own words, which become the reason; those about other processes do not."""
    node = listening()
    (worker,) = node.children("worker")
    said = f"Out of memory: Killed process {worker.pid} (python) total-vm:81266312kB, anon-rss:64713848kB"
    node.platform.kernel += [said.replace(str(worker.pid), "1"), said]
    worker.send_signal(signal.SIGKILL)
    node.pass_s(1.0)
    (ended,) = node.events(m.RankEnded)
    assert ended.status == -9 and ended.tail.splitlines()[-1] == said


# --- what follows ----------------------------------------------------------------------------------------


def seen(verdict: str, what: str = "Xid 79: fell off the bus") -> HardwareSeen:
    return HardwareSeen(verdict=verdict, what=what, where="0000:01:00", text="the line")


def test_a_node_whose_gpu_is_gone_is_left_at_once() -> None:
    """The attempt ends, the node is cordoned, and a spare works on: nobody waits until a collective notices."""
    play = Play(nodes=2, spares=1).run()
    issued = play.edge("n1", seen("lost"))
    assert {node for node, _ in actions(issued, m.EndWorkers)} == {"n0", "n1"}
    assert [one.node for one in written(issued, NodeCordoned)] == ["n1"]
    assert "fell off the bus" in written(issued, NodeSuspected)[0].reason
    begin = begin_of(play.end_rest())
    assert "fell off the bus" in begin.reason and play.members() == ["n0", "n2"]


def test_a_node_whose_memory_grows_weak_is_left_with_a_save() -> None:
    """All save and stop, and go on without it."""
    play = Play(nodes=2, spares=1).run()
    orders = actions(play.edge("n1", seen("leave", "burst of ECC errors")), m.GiveOrder)
    assert {order.word for _, order in orders} == {Word.STOP}
    play.end_rest(75)
    assert play.members() == ["n0", "n2"] and play.state.nodes["n1"].cordoned


@pytest.mark.parametrize(
    ("verdict", "spares", "done"),
    [
        ("tell", 1, "it is told, and goes on"), ("lost", 0, "it may not be cordoned: it goes on"),
        ("leave", 0, "it may not be cordoned: it goes on"), ("a later version's", 1, "it is told, and goes on"),
    ],
)
def test_what_is_only_told(verdict: str, spares: int, done: str) -> None:
    """Where it says little, or there is no spare: the node may be all there is."""
    play = Play(nodes=2, spares=spares).run()
    issued = play.edge("n1", seen(verdict))
    assert [one.done for one in written(issued, NodeSuspected)] == [done]
    assert not actions(issued, m.EndWorkers) and not actions(issued, m.GiveOrder)


def test_a_spare_that_fails_is_cordoned_and_disturbs_nobody() -> None:
    """And the same of a cordoned node changes nothing more."""
    play = Play(nodes=2, spares=2).run()
    issued = play.edge("n2", seen("lost"))
    assert written(issued, NodeCordoned) and not actions(issued, m.EndWorkers)
    again = play.edge("n2", seen("lost"))
    assert not written(again, NodeCordoned)
    assert [one.done for one in written(again, NodeSuspected)] == ["it is told, and goes on"]


def test_failing_hardware_is_no_lack_of_progress() -> None:
    """The end of an attempt that completed no new step is counted as that of a lost node."""
    play = Play(nodes=2, spares=1).run(step=4)
    play.edge("n1", seen("lost"))
    assert [one.name for one in written(play.end_rest(), ErrorSeen)] == ["run.node_gone"]
    assert play.state.run.fruitless == 0
