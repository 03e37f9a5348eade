"""What control of many nodes costs, and how soon a fault is seen: goals and figures side by side.

Command:  make bench-control       (bench/control.py --agents 12500 --processes 2; about 17 minutes)

`crowd`: one real coordinator, and simulated agents (bench/crowd.py) that speak to it over the real link, in processes
of their own. While all run, for `--seconds`: processor time of the coordinator per second, all its threads. Then a
hundred agents fall silent for six seconds, one after the other: how long after its last word each was suspected. Then
the coordinator is killed and started again: how long until every agent was welcomed again. Then `--load` processes
that only count run beside all of this for `--load-seconds`: how many nodes were suspected, or given up, wrongly.

`small`: real agents of three nodes with a worker that counts (20 steps a second). A worker is killed, an agent is
stopped, a worker is stopped, `--rounds` times each: how long until the coordinator knew.

When something was seen is when it stood in the coordinator's log of decisions. On one machine the agents, their
encryption and the coordinator share the cores: only the coordinator's processor time travels to other machines.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import zmq
from control_small import small

from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from packtrain.supervise import keys
from packtrain.supervise.job import Job, write_job

PLATFORM = LocalPlatform()
QUIET = 100
QUIET_S = 20.0
"""Until each of them has fallen silent and was found."""
START_S_MAX = 300.0
SETTLE_S = 5.0
"""Between the last agent that runs and the first second that counts."""
HERE = Path(__file__).resolve().parent


class Row(NamedTuple):
    """Of the table."""

    what: str
    goal: str
    figure: str
    met: bool | None = None
    """None: there is no goal."""


BEGAN_NS = PLATFORM.boot_ns()


def say(what: str) -> None:
    print(f"{(PLATFORM.boot_ns() - BEGAN_NS) / NS:6.0f} s  {what}", file=sys.stderr, flush=True)


def told(rows: list[Row]) -> list[Row]:
    """Said at once, so that a run which is cut off has told what it knew."""
    for row in rows:
        say("    " + ", ".join(filter(None, (f"{row.what}: {row.figure}", row.goal and f"goal {row.goal}"))))
    return rows


# --- the coordinator, and what it has decided ---------------------------------------------------------


class Decided:
    """The coordinator's log, read as it grows."""

    def __init__(self, home: str) -> None:
        self._folder = f"{home}/decisions"
        self._read: dict[str, int] = {}

    def new(self, *words: bytes) -> list[dict[str, Any]]:
        """Records of the lines with one of `words` in them that were written since the last call."""
        found = []
        for path in sorted(glob.glob(f"{self._folder}/*.jsonl")):
            data = PLATFORM.read(path, self._read.get(path, 0))
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                if any(word in line for word in words):
                    found += json.loads(line).get("records", ())
        return found


class Doubts(NamedTuple):
    """Nodes that were suspected, with the time at which that was read; and those that were given up."""

    silent: list[tuple[str, int]]
    lost: list[str]


def doubts(decided: Decided) -> Doubts:
    ns, silent, lost = PLATFORM.boot_ns(), [], []
    for record in decided.new(b'"e":"silent"', b'"node_lost"'):
        event, written = record.get("event") or {}, (record.get("own") or {}).get("record") or {}
        silent += [(event["node"], ns)] if event.get("e") == "silent" else []
        lost += [written["node"]] if written.get("kind") == "node_lost" else []
    return Doubts(silent, lost)


def prepare(base: str, count: int) -> None:
    """Homes and keys. Not durable: nothing here outlives this command."""
    for folder in ("run", "run/journal", "c", f"c/{keys.ALLOWED}", *(f"n{n}" for n in range(count))):
        os.mkdir(f"{base}/{folder}", 0o700)
    keys.make_keys(PLATFORM, f"{base}/c")
    for n in range(count):
        public, secret = zmq.curve_keypair()
        for path, key in ((f"{base}/n{n}/{keys.SECRET}", secret), (f"{base}/c/{keys.ALLOWED}/n{n}", public)):
            with open(path, "wb") as file:
                file.write(key)
    write_job(PLATFORM, f"{base}/job.json", Job(
        name="control", run_folder=f"{base}/run", worker=("none",), carrier=(), version="1", nodes=count,
    ))


class Coordinator:
    """The real one, started again as often as it is asked."""

    def __init__(self, base: str, profile: str = "") -> None:
        self._base, self._profile = base, profile
        self.start()

    def start(self) -> None:
        before = ("-m", "cProfile", "-o", self._profile) if self._profile else ()
        self._process = psutil.Popen((
            sys.executable, "-P", *before, "-m", "packtrain.supervise.coordinator", "--job", f"{self._base}/job.json",
            "--home", f"{self._base}/c",
        ))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def cpu_s(self) -> float:
        assert self._process.poll() is None, "the coordinator ended"
        return sum(self._process.cpu_times()[:2])

    @property
    def mib(self) -> int:
        return self._process.memory_info().rss >> 20


class Crowd:
    """The processes of simulated agents."""

    def __init__(self, base: str, count: int, processes: int) -> None:
        each = -(-count // processes)
        self.processes = [
            psutil.Popen(
                (sys.executable, str(HERE / "crowd.py"), base, str(n), str(min(n + each, count))),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for n in range(0, count, each)
        ]

    def until_heard(self, term: int, coordinator: Coordinator) -> float:
        """Seconds until each of them was welcomed under that term, and runs."""
        began_ns, waiting = PLATFORM.boot_ns(), list(self.processes)
        while waiting:
            passed_s = (PLATFORM.boot_ns() - began_ns) / NS
            assert passed_s < START_S_MAX, f"not all agents were heard in {START_S_MAX:g} s"
            coordinator.cpu_s()
            for process in select.select([one.stdout for one in waiting], [], [], 1.0)[0]:
                line = process.readline()
                assert line, "a process of agents ended"
                if json.loads(line).get("heard", 0) >= term:
                    waiting = [one for one in waiting if one.stdout is not process]
        return (PLATFORM.boot_ns() - began_ns) / NS

    def quiet(self, count: int) -> None:
        self._say(self.processes[0], {"quiet": count})

    def late_s(self) -> float:
        """By how much an agent was looked at too late at most, since that was last asked."""
        for process in self.processes:
            self._say(process, {"late": True})
        return max(json.loads(process.stdout.readline())["late"] for process in self.processes)

    def _say(self, process: psutil.Popen, what: dict[str, Any]) -> None:
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()

    def fell_silent(self, count: int) -> dict[str, int]:
        """Node -> when."""
        lines = (json.loads(self.processes[0].stdout.readline()) for _ in range(count))
        return dict(line["quiet"] for line in lines)

    def cpu_s(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self.processes)

    def end(self) -> None:
        """Killed at once: what is left of one keeps the other busy."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


@contextmanager
def load(count: int) -> Iterator[None]:
    """So many processes that only count."""
    running = [subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


# --- the parts ---------------------------------------------------------------------------------------


def watch(seconds: float, look: Callable[[], None]) -> None:
    end_ns = PLATFORM.boot_ns() + round(seconds * NS)
    while PLATFORM.boot_ns() < end_ns:
        look()
        PLATFORM.sleep(0.05)


def join(coordinator: Coordinator, crowd: Crowd, decided: Decided, count: int) -> list[Row]:
    say("  they join")
    seconds = crowd.until_heard(1, coordinator)
    used_s = coordinator.cpu_s()
    PLATFORM.sleep(SETTLE_S)
    false = doubts(decided)
    return [
        Row(
            f"{count:,} agents: from nothing to all of them running", "",
            f"{seconds:.1f} s, {used_s:.1f} s of processor",
        ),
        Row(
            "suspected, given up meanwhile", "0 given up",
            f"{len(false.silent)}, {len(false.lost)} (agents up to {crowd.late_s():.1f} s late themselves)",
            not false.lost,
        ),
    ]


def steady(coordinator: Coordinator, crowd: Crowd, decided: Decided, seconds: float) -> list[Row]:
    say(f"  all run; {seconds:g} s of it")
    false: list[str] = []

    def look() -> None:
        false.extend(name for name, _ in doubts(decided).silent)

    before, agents = coordinator.cpu_s(), crowd.cpu_s()
    watch(seconds, look)
    used, agents = (coordinator.cpu_s() - before) / seconds, (crowd.cpu_s() - agents) / seconds
    return [
        Row("coordinator, cores", "< 1", f"{used:.2f} ({coordinator.mib} MiB; agents {agents:.2f})", used < 1),
        Row("suspected meanwhile", "0", str(len(false)), not false),
    ]


def silence(crowd: Crowd, decided: Decided, count: int) -> list[Row]:
    say(f"  {count} fall silent")
    found: dict[str, int] = {}

    def look() -> None:
        for name, ns in doubts(decided).silent:
            found.setdefault(name, ns)

    crowd.quiet(count)
    watch(QUIET_S, look)
    fell = crowd.fell_silent(count)
    took = sorted((found[name] - ns) / NS for name, ns in fell.items() if name in found)
    p99 = took[int(0.99 * (len(took) - 1))] if len(took) == count else float("inf")
    figure = f"{p99:.2f} s (median {statistics.median(took):.2f}, longest {took[-1]:.2f})" if took else "none found"
    false = len(found.keys() - fell.keys())
    return [
        Row("silence suspected, p99", "< 5 s", figure, p99 < 5),
        Row("suspected that were not silent", "0", str(false), not false),
    ]


def storm(coordinator: Coordinator, crowd: Crowd, decided: Decided) -> list[Row]:
    say("  the coordinator is killed, and started again")
    coordinator.kill()
    coordinator.start()
    seconds = crowd.until_heard(2, coordinator)
    false = doubts(decided)
    return [
        Row("killed coordinator: all heard again", "", f"{seconds:.1f} s, {coordinator.cpu_s():.1f} s of processor"),
        Row(
            "suspected, given up meanwhile", "0 given up",
            f"{len(false.silent)}, {len(false.lost)} (agents up to {crowd.late_s():.1f} s late themselves)",
            not false.lost,
        ),
    ]


def under_load(coordinator: Coordinator, crowd: Crowd, decided: Decided, count: int, seconds: float) -> list[Row]:
    say(f"  {count} processes that count beside it, for {seconds:g} s")
    silent: list[str] = []
    lost: list[str] = []

    def look() -> None:
        false = doubts(decided)
        silent.extend(name for name, _ in false.silent)
        lost.extend(false.lost)

    before = coordinator.cpu_s()
    with load(count):
        watch(seconds, look)
    used = (coordinator.cpu_s() - before) / seconds
    return [
        Row(f"load {count}, {seconds:g} s: given up wrongly", "0", str(len(lost)), not lost),
        Row("suspected wrongly", "", f"{len(silent)} (agents up to {crowd.late_s():.1f} s late themselves)"),
        Row("coordinator, cores", "< 1", f"{used:.2f}", used < 1),
    ]


def crowded(args: argparse.Namespace, base: str) -> list[Row]:
    say(f"{args.agents:,} agents in {args.processes} processes: keys")
    prepare(base, args.agents)
    coordinator, decided = Coordinator(base, args.profile), Decided(f"{base}/c")
    crowd = Crowd(base, args.agents, args.processes)
    try:
        rows = told(join(coordinator, crowd, decided, args.agents))
        rows += told(steady(coordinator, crowd, decided, args.seconds))
        rows += told(silence(crowd, decided, min(QUIET, args.agents // (2 * args.processes))))
        rows += told(storm(coordinator, crowd, decided))
        if args.load:
            rows += told(under_load(coordinator, crowd, decided, args.load, args.load_seconds))
        return rows
    finally:
        say("  they are ended")
        crowd.end()
        coordinator.kill()


def show(rows: list[Row]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        verdict = {None: "", True: "met", False: "MISSED"}[row.met]
        line = "  ".join(text.ljust(width) for text, width in zip(row[:3], widths, strict=True))
        print(f"{line}  {verdict}".rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=12_500)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=int, default=8, help="0: without that part")
    parser.add_argument("--load-seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=("crowd", "small"))
    parser.add_argument("--profile", default="", help="cProfile of the coordinator goes there, if it ends by itself")
    args = parser.parse_args()
    rows = [Row("what", "goal", "figure")]
    if args.only != "small":
        with tempfile.TemporaryDirectory(prefix="control") as base:
            rows += crowded(args, base)
    if args.only != "crowd":
        rows += [Row(*one) for one in small(args.rounds, say)]
    show(rows)


if __name__ == "__main__":
    main()
