"""Real agents with real workers, over the real link, with a coordinator that the test plays."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator

import psutil
import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.core.contract import Word
from packtrain.supervise.messages import (
    AskCarrier,
    CarrierEnded,
    Did,
    EndAttempt,
    EndWorkers,
    GiveOrder,
    HardwareSeen,
    Launch,
    Leave,
    NodeLeaves,
    RankEnded,
    RankPhase,
    RankSilent,
    Stacks,
    TakeStacks,
)
from packtrain.supervise.processes import Processes
from tests.supervise.agents import PLATFORM, Coordinator, Scene, gone, scene, script, toy_env
from tests.supervise.runs import saved_state

STEPS = "beats.enter('step', 0)\nfor step in range(1, 100000):\n  time.sleep(0.02)\n  beats.step_done(step)\n"
OBEYS = STEPS + "  order = control.poll()\n  if order and order.word in (2, 3): sys.exit(75)\n"


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for sockets, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="a", dir="/tmp") as folder:
        yield pathlib.Path(folder)


def launch(attempt: int = 1, begin: int = 1, restore: str = "") -> Launch:
    return Launch(
        attempt=attempt, begin=begin, ranks=(0,), world_size=1, master="127.0.0.1:29500", restore=restore
    )


def running(one: Scene) -> None:
    """Attempt 1 runs, and its worker makes steps."""
    one.joined()
    one.coordinator.ask(1, launch())
    one.until(lambda: any(e.phase == "steps" for e in one.coordinator.of(RankPhase)), "steps")


def worker(one: Scene) -> psutil.Process:
    (pid,) = [found.pid for found in one.alive() if found.attempt]
    return psutil.Process(pid)


def test_the_death_of_an_agent_is_the_death_of_all_it_started(base: pathlib.Path) -> None:
    """SIGKILL: its worker dies with it; what that one had started and hidden in a session of its own ends before the
    next agent says Hello, which runs nothing."""
    hides = "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    with scene(base, script(hides + STEPS)) as one:
        running(one)
        mine, hidden = worker_and_child(one)
        one.agents[0].kill()
        assert gone([mine])
        assert psutil.pid_exists(hidden)
        one.joined()
        assert not one.alive()
        hello = one.coordinator.hellos[-1]
        assert hello.attempt == 0 and hello.agent != one.coordinator.hellos[0].agent


def worker_and_child(one: Scene) -> tuple[int, int]:
    """Once both are seen: what has just become another program has no environment for a moment."""
    by_name = dict[str, int]()

    def seen() -> bool:
        by_name.clear()
        by_name.update({psutil.Process(found.pid).name(): found.pid for found in one.alive()})
        return "sleep" in by_name

    one.until(seen, "what it started")
    sleep = by_name.pop("sleep")
    (mine,) = by_name.values()
    return mine, sleep


@pytest.mark.parametrize("how, status", [
    ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os.kill(os.getpid(), signal.SIGSEGV)", -11), ("sys.exit(3)", 3),
    ("raise ValueError('planted')", 1), ("sys.exit(0)", 0),
])
def test_the_end_of_a_worker_is_one_edge(base: pathlib.Path, how: str, status: int) -> None:
    """With its status, its last step and the end of its log; what it left behind in its group is gone."""
    before = "subprocess.Popen(['sleep', '1000'])\nbeats.enter('step', 5)\nprint('last words')\n"
    with scene(base, script(before + how)) as one:
        one.joined()
        one.coordinator.ask(1, launch())
        one.until(lambda: one.coordinator.of(RankEnded), "an end")
        (end,) = one.coordinator.of(RankEnded)
        assert (end.attempt, end.rank, end.status, end.step) == (1, 0, status, 5) and "last words" in end.tail
        assert gone([found.pid for found in one.alive()])


@pytest.mark.soak
def test_a_stopped_worker_is_told_silent_and_can_be_ended(base: pathlib.Path) -> None:
    """SIGSTOP: silent after 3 s; `EndWorkers` ends it all the same."""
    with scene(base, script(STEPS)) as one:
        running(one)
        worker(one).send_signal(signal.SIGSTOP)
        one.until(lambda: one.coordinator.of(RankSilent), "silence")
        one.coordinator.ask(2, EndWorkers(attempt=1, reason="silent"))
        one.until(lambda: one.coordinator.of(RankEnded), "an end")
        assert [end.status for end in one.coordinator.of(RankEnded)] == [-9]


def test_an_action_is_done_once_however_often_it_is_asked(base: pathlib.Path) -> None:
    """Each start of a worker leaves a line: there is one."""
    with scene(base, script(f"open({str(base / 'starts')!r}, 'a').write('x')\n" + STEPS)) as one:
        running(one)
        assert one.coordinator.side is not None
        for _ in range(5):
            one.coordinator.side.ask(1, launch(attempt=7))
            one.coordinator.look()
        one.coordinator.ask(2, GiveOrder(attempt=1, order=1, word=Word.SAVE))
        one.until(lambda: {did.id for did in one.coordinator.of(Did)} == {1, 2}, "both outcomes")
        assert (base / "starts").read_text() == "x"


def test_another_coordinator_disturbs_no_worker(base: pathlib.Path) -> None:
    """The first one falls silent; the next hears the same agent, whose worker counts on."""
    with scene(base, script(STEPS)) as one:
        running(one)
        before, old = worker(one), one.coordinator
        old_agent = old.hellos[0].agent
        one.coordinator = Coordinator(one.home, 2, seq=old.seq, agent=old_agent)
        one.until(lambda: one.coordinator.pulses and one.coordinator.pulses[-1].step > old.pulses[-1].step, "a pulse")
        assert worker(one) == before and one.coordinator.hellos[-1].attempt == 1
        assert one.coordinator.hellos[-1].agent == old_agent and not one.coordinator.of(RankEnded)
        old.close()


def test_a_whole_attempt_with_carrier_and_saves(base: pathlib.Path) -> None:
    """The toy trains, saves through the carrier, which is killed on the way and comes again, and ends; then the carrier
    goes too."""
    toy = toy_env(steps=200, save_every=20, wait=True, step_s=0.005)
    here = os.path.dirname(os.path.abspath(__file__))
    carrier = (sys.executable, "-P", "-m", "packtrain.checkpoint.carrier")
    with scene(base, (sys.executable, f"{here}/toy_worker.py"), carrier=carrier, more_env=toy, plain=True) as one:
        (one.run / "commits").mkdir()
        begin = CommitLog(PLATFORM, str(one.run / "commits")).begin(None, writers=("r00000",), node="n0")
        one.joined()
        one.coordinator.ask(1, launch(begin=begin.number))
        one.until(lambda: any(e.step > 40 for e in one.coordinator.of(RankPhase)), "steps")
        (old,) = [found.pid for found in one.alive() if not found.attempt]
        os.kill(old, signal.SIGKILL)
        one.until(lambda: one.coordinator.of(RankEnded), "an end")
        assert [end.status for end in one.coordinator.of(RankEnded)] == [0]
        assert [end.why for end in one.coordinator.of(CarrierEnded)] == ["killed by SIGKILL"]
        assert saved_state(one.run)[0] == 200
        one.coordinator.ask(2, AskCarrier(attempt=1, request='{"op": "retain", "id": 1, "actions": [], "grace_s": 1}'))
        one.until(lambda: len(one.coordinator.of(Did)) == 2, "what the carrier said")
        one.coordinator.ask(3, EndAttempt(attempt=1))
        one.until(lambda: {did.id for did in one.coordinator.of(Did)} == {1, 2, 3}, "all outcomes")
        assert '"outcome"' in one.coordinator.of(Did)[1].data and not one.alive()


def test_stacks_are_taken_and_nobody_is_hurt(base: pathlib.Path) -> None:
    """From a handler for SIGUSR1 where there is one."""
    handler = "import faulthandler\nfaulthandler.register(signal.SIGUSR1, all_threads=True)\n"
    with scene(base, script(handler + STEPS)) as one:
        running(one)
        one.coordinator.ask(2, TakeStacks(attempt=1))
        one.until(lambda: one.coordinator.of(Stacks), "stacks")
        (taken,) = one.coordinator.of(Stacks)
        assert taken.how == "faulthandler" and 'File "<string>"' in taken.text
        assert worker(one).is_running()


def test_stacks_of_a_program_that_knows_nothing_of_it(base: pathlib.Path) -> None:
    """py-spy's, or the kernel's word; the signal would kill it, and is not sent: the program goes on."""
    with scene(base, script(STEPS)) as one:
        running(one)
        one.coordinator.ask(2, TakeStacks(attempt=1))
        one.until(lambda: one.coordinator.of(Stacks), "stacks")
        (taken,) = one.coordinator.of(Stacks)
        assert taken.how in ("py-spy", "/proc") and taken.text
        step = one.coordinator.pulses[-1].step
        one.until(lambda: one.coordinator.pulses[-1].step > step, "steps")


def test_sigterm_to_an_agent_is_a_node_that_goes_away(base: pathlib.Path) -> None:
    """Told; its worker obeys the word and exits 75; the coordinator says Leave, and the agent is gone, 0."""
    with scene(base, script(OBEYS)) as one:
        running(one)
        one.agents[0].send_signal(signal.SIGTERM)
        one.until(lambda: one.coordinator.of(RankEnded), "an end")
        assert one.coordinator.of(NodeLeaves) and [e.status for e in one.coordinator.of(RankEnded)] == [75]
        one.coordinator.ask(2, Leave(reason="as it wished"))
        one.until(lambda: any(did.id == 2 for did in one.coordinator.of(Did)), "the last word")
        assert one.agents[0].wait(10) == 0 and not one.alive()


def test_an_agent_is_ready_when_device_memory_is_free(base: pathlib.Path) -> None:
    """It asks the tool on its PATH before it says Hello, and again until its leftovers' memory is given back."""
    asked, tool = base / "asked", base / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        f"#!/bin/sh\ncase $1 in --query-gpu=*) echo x >> {asked}\n"
        f"[ $(wc -l < {asked}) -ge 2 ] && echo GPU-1, 4 || echo GPU-1, 81000;; esac\n"
    )
    tool.chmod(0o755)
    with scene(base, script(STEPS), more_env={"JAX_PLATFORMS": ""}) as one:
        one.before = ("env", f"PATH={tool.parent}:{os.environ['PATH']}")
        one.joined()
        assert asked.read_text() == "x\n" * 2 and not one.coordinator.of(HardwareSeen)
        one.agents[0].terminate()
        one.agents[0].wait(30)
        assert one.agents[0].stdout is not None
        assert "waits until device memory is free" in one.agents[0].stdout.read()


def test_two_agents_in_one_home_are_one_too_many(base: pathlib.Path) -> None:
    """The second says so and ends with 78; the first is not disturbed."""
    with scene(base, script(STEPS)) as one:
        one.joined()
        second = one.start()
        assert second.wait(30) == 78
        assert second.stdout is not None and "an agent of this node runs" in second.stdout.read()
        assert one.agents[0].poll() is None


def test_marks_are_found_in_environments(base: pathlib.Path) -> None:
    """Only those of this run and node."""
    mark = "0123456789ab/n7/x"
    child = PLATFORM.spawn(("sleep", "100"), {"PATH": os.environ["PATH"], "PACKTRAIN_MARK": mark})
    try:
        for _ in range(200):
            found = Processes().marked("0123456789ab", "n7")
            if found and psutil.Process(child.pid).name() == "sleep":
                break
            PLATFORM.sleep(0.02)
        assert [(one.pid, one.mark, one.attempt) for one in found] == [(child.pid, mark, "")]
        assert not Processes().marked("0123456789ab", "n") and not Processes().marked("other", "n7")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
