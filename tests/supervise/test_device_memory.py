"""An agent that begins waits for its devices' memory, for so long, and tells who has it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from packtrain.core.fake import FakeDisk, FakePlatform, FakeProcess
from packtrain.core.fake_process import Life
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import NodeCordoned, NodeSuspected
from packtrain.core.units import NS
from packtrain.supervise import messages as m
from packtrain.supervise.agent import Agent
from packtrain.supervise.device_memory import ASK_S_MAX, FREE_S_MAX, TOOL, wait_until_free
from packtrain.supervise.job import Job
from packtrain.supervise.messages import HardwareSeen
from packtrain.supervise.place import Place
from packtrain.supervise.processes import MARK, Processes
from tests.monitor.test_devices import A, B
from tests.supervise.fake_agent import HOME, JOB, FakeProcesses, Node
from tests.supervise.played import Play, actions, written

PATH = "/opt/none:/usr/bin"
Says = Callable[[float], str]
"""What the tool prints so many seconds after the agent began."""


def free(seconds: float) -> str:
    return f"{A}, 4\n{B}, 611\n"


def nobody(seconds: float) -> str:
    return ""


class Machine:
    """A node with the tool, in virtual time."""

    def __init__(self, devices: Says = free, holders: Says = nobody, status: int = 0, hangs: bool = False) -> None:
        self.disk = FakeDisk()
        self.platform = FakePlatform(
            self.disk, "n0", programs=lambda argv: self._tool if argv[0] == f"/usr/bin/{TOOL}" else None
        )
        for folder in (HOME, "/usr/bin", "/proc/7"):
            self.platform.mkdir(folder)
        self.platform.write_new(f"/usr/bin/{TOOL}", b"")
        self.platform.write_new("/proc/7/comm", b"python3\n")
        self.says, self.status, self.hangs = {"gpu": devices, "compute-apps": holders}, status, hangs
        self.processes, self.asked = FakeProcesses(), list[list[str]]()
        self.began_ns = self.platform.boot_ns()

    @property
    def seconds(self) -> float:
        return (self.platform.boot_ns() - self.began_ns) / NS

    def _tool(self, process: FakeProcess) -> int | Life:
        self.asked.append(process.argv)
        if self.hangs:
            return self._hang()
        name = process.argv[1].removeprefix("--query-").partition("=")[0]
        process.print(self.says[name](self.seconds))
        return self.status

    def _hang(self) -> Life:
        while True:
            yield 1000.0

    def wait(self, job: Job = JOB) -> HardwareSeen | None:
        place = Place("n0", HOME, "host", "me", "run")
        return wait_until_free(self.platform, self.processes, place, job, {"PATH": PATH})


def test_memory_that_is_free_is_not_waited_for() -> None:
    """What a driver or a daemon keeps for itself is no program's."""
    machine = Machine()
    assert machine.wait() is None and machine.seconds < 1


def test_memory_that_comes_free_is_waited_for() -> None:
    """As long as it takes and no longer, with nobody blamed."""
    machine = Machine(lambda seconds: f"{A}, 4\n{B}, {81000 if seconds < 7 else 3}\n")
    assert machine.wait() is None and 7 <= machine.seconds < 9


def test_who_keeps_it_is_told() -> None:
    """After a minute, no later: on which device, how much, by which processes, and whether they are ours."""
    machine = Machine(
        lambda seconds: f"{A}, 4\n{B}, 81000\n",
        lambda seconds: f"7, {B}, 40000\n8, {B}, 1000\n9, {B}, [N/A]\n10, {A}, 1\n",
    )
    machine.processes.marks = {8: "run/n0/old", 9: "other/n0/x"}
    seen = machine.wait()
    assert seen is not None and FREE_S_MAX <= machine.seconds < FREE_S_MAX + 2
    assert (seen.verdict, seen.what, seen.where) == ("held", "device memory is not free", B)
    assert seen.text == (
        f"{B} has 81000 MiB in use, by process 7 (python3, 40000 MiB, not of packtrain), process 8 (?, 1000 MiB, left "
        "by this node), process 9 (?, ? MiB, of another run)"
    )


def test_memory_of_nobody_is_told() -> None:
    """In a container whoever has it cannot be seen."""
    seen = Machine(lambda seconds: f"{A}, 81000\n").wait()
    assert seen is not None and seen.text.endswith("by nobody who can be seen from here")


def test_other_nodes_of_this_machine_may_work() -> None:
    """Their workers' memory is theirs; what is in use beside it is waited for all the same."""
    machine = Machine(lambda seconds: f"{A}, 61000\n", lambda seconds: f"7, {A}, 60500\n")
    machine.processes.marks = {7: "run/n1/x"}
    assert machine.wait() is None and machine.seconds < 1
    machine.says["gpu"] = lambda seconds: f"{A}, 66000\n"
    seen = machine.wait()
    assert seen is not None and "process 7" not in seen.text


@pytest.mark.parametrize(
    ("devices", "status"),
    [
        ("", 0), ("No devices were found\n", 6), ("NVIDIA-SMI has failed\n", 9), (f"{A}, 81000\n", 1),
        ("\x00\xff rubbish, more, of it\n" * 9, 0),
    ],
)
def test_what_says_nothing_is_not_waited_for(devices: str, status: int) -> None:
    """No device, a driver that fails, garbage."""
    machine = Machine(lambda seconds: devices, status=status)
    assert machine.wait() is None and machine.seconds < 1


@pytest.mark.parametrize(
    ("devices", "holders", "where"),
    [
        (f"{A}, [N/A]\n{B}, 4\n", "", A),
        (f"{A}, [Insufficient Permissions]\n{B}, [GPU requires reset]\n", "", f"{A}, {B}"),
        (f"{A}, 61000\n", f"7, {A}, [N/A]\n", A), (f"{A}, 900\n", f"7, {A}, [N/A]\n", ""),
        (f"{A}, 61000\n", f"7, {A}, [N/A]\n9, {A}, [N/A]\n", A),
    ],
)
def test_what_is_unknown_is_told(devices: str, holders: str, where: str) -> None:
    """A device whose memory nobody tells, or nobody tells how much of it another node of this run has: it is not taken
    for free, nor for held, and not waited for. Where all together is little, whose it is does not matter."""
    machine = Machine(lambda seconds: devices, lambda seconds: holders)
    machine.processes.marks = {7: "run/n1/x"}
    seen = machine.wait()
    assert machine.seconds < 1 and (seen.where if seen is not None else "") == where
    assert seen is None or (seen.verdict, seen.what) == ("unknown", "device memory may not be free")


def test_what_is_held_beside_what_is_unknown_is_waited_for() -> None:
    """And when it is free what is unknown is told."""
    machine = Machine(lambda seconds: f"{A}, [N/A]\n{B}, {81000 if seconds < 7 else 3}\n")
    seen = machine.wait()
    assert seen is not None and (seen.verdict, seen.where) == ("unknown", A) and 7 <= machine.seconds < 9


def test_a_machine_without_the_tool() -> None:
    """Nothing is started to find that out."""
    machine = Machine()
    machine.platform.unlink(f"/usr/bin/{TOOL}")
    assert machine.wait() is None and machine.asked == []


def test_a_tool_that_hangs_is_told() -> None:
    """It is killed, not asked again, and not waited for."""
    machine = Machine(hangs=True)
    seen = machine.wait()
    assert seen is not None and (seen.verdict, seen.what) == ("held", "nvidia-smi does not answer")
    assert len(machine.asked) == 1 and ASK_S_MAX <= machine.seconds < ASK_S_MAX + 1


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"env": {"CUDA_VISIBLE_DEVICES": "1,3"}}, ["--id=1,3"]), ({"env": {"CUDA_VISIBLE_DEVICES": ""}}, None),
        ({"env": {"CUDA_VISIBLE_DEVICES": "-1"}}, None), ({"env": {"JAX_PLATFORMS": "cpu"}}, None),
        ({"env": {"JAX_PLATFORMS": "cpu"}, "plain": True}, []), ({"env": {}}, []),
    ],
)
def test_only_devices_that_are_used_are_asked_about(job: dict[str, Any], words: list[str] | None) -> None:
    """Those that workers see; none for a trainer on CPU. `words` None: nothing is asked."""
    machine = Machine()
    assert machine.wait(msgspec.structs.replace(JOB, **job)) is None
    assert [argv[2:-1] for argv in machine.asked[:1]] == ([] if words is None else [words])


def test_a_real_tool(tmp_path: pathlib.Path) -> None:
    """A program of that name on PATH is run with our words, and what it prints is understood; a process that carries
    another node's mark is known for that."""
    here, bin = LocalPlatform(), tmp_path / "bin"
    bin.mkdir()
    child = here.spawn(("sleep", "60"), os.environ | {MARK: "run/n1/x"}, die_with_parent=False)
    (bin / TOOL).write_text(
        "#!/bin/sh\n"
        '[ "$2" = "--format=csv,noheader,nounits" ] || exit 2\n'
        f'case "$1" in --query-gpu=uuid,memory.used) echo "{A}, 2000";;\n'
        f'--query-compute-apps=pid,gpu_uuid,used_memory) echo "{child.pid}, {A}, 1999";; *) exit 2;; esac\n'
    )
    (bin / TOOL).chmod(0o755)
    try:
        place = Place("n0", str(tmp_path), "host", "me", "run")
        assert wait_until_free(here, Processes(), place, JOB, {"PATH": f"{bin}:{os.environ['PATH']}"}) is None
    finally:
        child.send_signal(9)
        child.wait()


# --- what follows ----------------------------------------------------------------------------------------


def test_what_was_held_is_told_with_the_first_words() -> None:
    """An edge like any other: its coordinator hears of it once it knows the agent."""
    node = Node()
    held = HardwareSeen(verdict="held", what="device memory is not free", where=A, text="by process 7")
    place = Place("n0", HOME, "host", "other", "run")
    node.agent = Agent(
        node.job, place, node.platform, node.link, node.ears, node.processes, node.requests, f"{HOME}/address",
        held=held,
    )
    node.join()
    node.pass_s(1.0)
    assert node.events(HardwareSeen) == [held]


def test_a_node_whose_memory_is_held_is_chosen_last() -> None:
    """A spare takes its place in the next attempt; nothing that runs is disturbed, nobody is cordoned, and where there
    is no spare it works on."""
    held = HardwareSeen(verdict="held", what="device memory is not free", where=A, text="by process 7")
    for spares, members in ((1, ["n0", "n2"]), (0, ["n0", "n1"])):
        play = Play(nodes=2, spares=spares).run()
        issued = play.edge("n1", held)
        (told,) = written(issued, NodeSuspected)
        assert told.reason == f"as it began: device memory is not free ({A}): by process 7"
        assert told.done == "it is chosen last" and not written(issued, NodeCordoned)
        assert not actions(issued, m.EndWorkers) and not actions(issued, m.GiveOrder)
        play.end(0, -9)
        play.end_rest()
        assert play.members() == members


def test_a_node_whose_memory_is_unknown_is_chosen_as_ever() -> None:
    """It is told, in words of its own."""
    play = Play(nodes=2, spares=1).run()
    issued = play.edge("n1", HardwareSeen(verdict="unknown", what="device memory may not be free", where=A, text="?"))
    (told,) = written(issued, NodeSuspected)
    assert (told.reason, told.done, told.blamed) == (
        f"as it began: device memory may not be free ({A}): ?", "it is told, and goes on", False
    )
    play.end(0, -9)
    play.end_rest()
    assert play.members() == ["n0", "n1"]
