"""A program that sends no beats: what counts as doing something, in virtual time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from packtrain.supervise.quiet import Idle, Quiet, Sign, Usage, looked, parse, usage


def told(signs: list[Sign], *, progress_s: float = 60, stopped_s: float = 10, gap_s: float = 0) -> list[Idle]:
    """What is told when a program is seen like this, each second. `gap_s`: unwatched, before the last look."""
    quiet, said = Quiet(0), []
    for second, sign in enumerate(signs, 1):
        gap = gap_s if second == len(signs) else 0.0
        ns = round((second + gap) * NS)
        quiet, idle = looked(
            quiet, sign, ns, progress_s=progress_s, stopped_s=stopped_s, unwatched_ns=round(gap * NS)
        )
        said += [idle] if idle else []
    return said


def same(n: int, log_bytes: int = 0, cpu_s: float = 0.0, stopped: bool = False) -> list[Sign]:
    return [Sign(log_bytes, Usage(cpu_s, stopped))] * n


def test_nothing_for_long_is_told_once() -> None:
    """Neither output nor processor time for `progress_s`: told at that time, and not again."""
    assert told(same(59)) == []
    assert told(same(60)) == [Idle(60.0, stopped=False)]
    assert told(same(300)) == [Idle(60.0, stopped=False)]


@pytest.mark.parametrize("sign", [Sign(1, Usage()), Sign(0, Usage(1.0)), Sign(0, Usage(0.0))])
def test_output_or_work_is_a_sign_of_life(sign: Sign) -> None:
    """A log that grew, or a core that was used, begins the time anew; what is as before does not."""
    alive = sign != Sign(0, Usage(0.0))
    assert bool(told([*same(50), sign, *[sign] * 20])) is not alive


def test_a_log_begun_anew_is_a_sign_of_life() -> None:
    """A program that empties its log writes, and is told again when it falls silent later."""
    assert told([*same(1, log_bytes=50), *same(50, log_bytes=50), *same(20, log_bytes=3)]) == []
    assert len(told([*same(70), *same(70, log_bytes=5)])) == 2


def test_threads_that_only_wake_up_do_not_count() -> None:
    """Less than a hundredth of a core since the last sign of life is nothing; a steady hundredth is work."""
    hardly = [Sign(0, Usage(0.005 * second)) for second in range(1, 100)]
    steadily = [Sign(0, Usage(0.02 * second)) for second in range(1, 100)]
    assert told(hardly) == [Idle(60.0, stopped=False)]
    assert told(steadily) == []


def test_one_that_was_stopped_is_told_sooner() -> None:
    """A stopped process is told after `stopped_s`, counted from when it was stopped; one that goes on is not."""
    assert told([*same(30), *same(11, stopped=True)]) == [Idle(10.0, stopped=True)]
    assert told([*same(30), *same(9, stopped=True), *same(9)]) == []
    assert told([*same(30), *same(5, stopped=True), Sign(9, Usage(0.0, True)), *same(9, 9, stopped=True)]) == []


def test_each_limit_can_be_switched_off() -> None:
    """0 switches a limit off."""
    assert told(same(100), progress_s=0) == []
    assert told(same(50, stopped=True), stopped_s=0) == []


def test_unwatched_time_counts_for_nothing() -> None:
    """While the machine was suspended, or its disk hung, nobody could look."""
    assert told(same(31), gap_s=1000.0) == []
    assert told(same(9, stopped=True), gap_s=1000.0) == []


def test_any_name_is_parsed() -> None:
    """A process may call itself anything, also what looks like fields."""
    line = b"4711 (a) T 1 (b) S 9 4700 4711 0 -1 4194304 12 0 0 0 200 100 30 20 20 0 1 0 55\n"
    assert parse(line) == (4711, Usage(350 / os.sysconf("SC_CLK_TCK"), stopped=False))
    assert parse(line.replace(b") S", b") T"))[1].stopped
    assert not parse(line.replace(b") S", b") t"))[1].stopped  # a debugger or py-spy looks at it


def test_a_real_session_is_seen_at_work_and_stopped() -> None:
    """A process that works uses the processor in the eyes of /proc, its child's time included; stopped, it is so."""
    platform = LocalPlatform()
    work = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    child = subprocess.Popen([sys.executable, "-c", work], start_new_session=True)
    try:
        while usage().get(child.pid, Usage()).cpu_s < 0.3:
            platform.sleep(0.02)
        assert not usage()[child.pid].stopped
        os.killpg(child.pid, signal.SIGSTOP)
        while not usage()[child.pid].stopped:
            platform.sleep(0.02)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
