"""The second part of bench/control.py: real agents of three nodes, a worker that counts, and three faults."""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from tests.supervise.counter import STEP_S
from tests.supervise.live import Live, live

PLATFORM = LocalPlatform()
WARM_STEPS = 20
"""Of an attempt before a fault: the median of a step is known then."""
SEEN_S_MAX = 60.0
Event = dict[str, Any]


class Log:
    """The coordinator's log of decisions, read as it grows."""

    def __init__(self, home: str) -> None:
        self._folder = Path(home, "decisions")
        self._read: dict[str, int] = {}

    def events(self) -> list[Event]:
        """Those consumed since the last call."""
        found = []
        for path in sorted(self._folder.glob("*.jsonl")):
            data = PLATFORM.read(str(path), self._read.get(path.name, 0))
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path.name] = self._read.get(path.name, 0) + len(whole)
            records = [record for line in whole.splitlines() for record in json.loads(line).get("records", ())]
            found += [record["event"] for record in records if record["r"] == "consumed"]
        return found

    def seen_s(self, is_it: Callable[[Event], bool]) -> float:
        """How long from now until such an event is in the log."""
        self.events()
        began_ns = PLATFORM.boot_ns()
        while (PLATFORM.boot_ns() - began_ns) / NS < SEEN_S_MAX:
            if any(is_it(event) for event in self.events()):
                return (PLATFORM.boot_ns() - began_ns) / NS
            PLATFORM.sleep(0.002)
        return float("inf")


def told(*kinds: str) -> Callable[[Event], bool]:
    """An edge of one of these kinds."""
    return lambda event: (event.get("event") or {}).get("m") in kinds


def settled(run: Live, attempt: int) -> int:
    """Once an attempt after `attempt` steps on all nodes: its number."""

    def ready(status: dict[str, Any]) -> bool:
        now = status.get("attempt", 0)
        step = min((node["step"] for node in status.get("nodes", []) if node["ranks"]), default=-1)
        return now > attempt and step >= 0 and step >= first.setdefault(now, step) + WARM_STEPS

    first: dict[int, int] = {}
    return int(run.until(ready)["attempt"])


def kill_worker(run: Live, log: Log, number: int) -> float:
    run.kill(run.workers()[number % 2])
    return log.seen_s(told("rank_ended"))


def stop_agent(run: Live, log: Log, number: int) -> float:
    """As a machine that hangs: one that is killed is started again before its silence would be seen. It goes on then,
    and its worker is killed, so that the next round has an attempt of its own."""
    name = next(node["node"] for node in run.status()["nodes"] if node["ranks"] == [number % 2])
    agent = next(one for one in run.processes("supervise.agent") if name in one.cmdline())
    agent.suspend()
    seconds = log.seen_s(lambda event: event["e"] == "silent" and event["node"] == name)
    agent.resume()
    run.kill(run.workers()[number % 2])
    return seconds


def stop_worker(run: Live, log: Log, number: int) -> float:
    """The coordinator ends its attempt at `beat_overdue_s`."""
    os.kill(run.workers()[number % 2], signal.SIGSTOP)
    return log.seen_s(told("rank_silent", "rank_stalled"))


FAULTS: tuple[tuple[str, float, Callable[[Live, Log, int], float]], ...] = (
    ("SIGKILL of a worker: seen", 0.2, kill_worker),
    ("SIGSTOP of an agent: its node suspected", 3.0, stop_agent),
    (f"SIGSTOP of a worker: suspected, steps of {STEP_S:g} s", 3 * STEP_S + 2, stop_worker),
)


def small(rounds: int, say: Callable[[str], None]) -> list[tuple[str, str, str, bool]]:
    """Rows of the table: the median of `rounds` counts."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="control") as base, live(
        Path(base, "run"), spares=1, beat_overdue_s=5.0, attempts_without_progress=1000
    ) as run:
        log, attempt = Log(run.home), 0
        for what, goal_s, fault in FAULTS:
            took = []
            for number in range(rounds):
                attempt = settled(run, attempt)
                took.append(fault(run, log, number))
                say(f"  {what}: {took[-1]:.3f} s")
            median_s = statistics.median(took)
            figure = f"{median_s:.2f} s ({min(took):.2f} to {max(took):.2f})"
            rows.append((what, f"{goal_s:g} s", figure, median_s <= goal_s))
        run.finish()
    return rows
