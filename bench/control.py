"""What control of many nodes costs: one real coordinator, and simulated agents that speak to it over the real link.

Command:  make bench-control     (bench/control.py --agents 12500 --processes 2 --seconds 60)

Each agent has its own key and connection, says Hello, is launched, says that its rank is ready, and pulses each second
(beats stay at agents). Then a hundred of them fall silent, one after the other. Printed: processor time of the
coordinator per second while all run, and how long after its last word each silent agent was suspected (from the
coordinator's log of decisions). A step of an agent counts, so no rank is ever late. On this machine the agents, the
coordinator and their encryption share the cores: only the coordinator's processor time travels to others.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil
import zmq

from packtrain.core.contract import GO_ID, Word
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from packtrain.supervise import keys
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.delivery import AgentSide
from packtrain.supervise.job import Job, write_job
from packtrain.supervise.link import Caller
from packtrain.supervise.messages import Did, Do, EndWorkers, GiveOrder, Hello, Launch, Pulse, RankEnded, RankReady

PLATFORM = LocalPlatform()
SILENT = 100
SILENT_EACH_S = 0.1
LOOK_S = 0.05
START_S_MAX = 600.0


class Agent:
    """The protocol of an agent, with one rank that does nothing but count."""

    def __init__(self, context: zmq.Context, base: str, name: str, address: keys.Address) -> None:
        self.name, self.token = name, PLATFORM.token()
        self.caller = Caller(PLATFORM, f"{base}/{name}", context)
        self.caller.call(address)
        self.side = AgentSide(name, self.token)
        self.attempt, self.ranks, self.going = 0, (0,), False
        self.step = -1
        self.silent = False

    def look(self, ns: int) -> None:
        if self.silent:
            return
        for message in self.caller.receive():
            do = self.side.arrived(ns, message)
            if do is not None:
                self.obey(ns, do)
        if self.going:
            self.step = ns // NS
        hello = Hello(node=self.name, agent=self.token, boot_id="b", term=0, attempt=self.attempt, version="1")
        pulse = Pulse(node=self.name, agent=self.token, attempt=self.attempt, step=self.step, step_s=1.0)
        for said in self.side.due(ns, hello, pulse):
            self.caller.send(said)

    def obey(self, ns: int, do: Do) -> None:
        match do.action:
            case Launch(attempt=attempt, ranks=ranks):
                self.attempt, self.ranks = attempt, ranks
                for rank in ranks:
                    self.side.happened(ns, RankReady(attempt=attempt, rank=rank, facts={"step": "0"}))
            case GiveOrder(order=order, word=word) if order == GO_ID and word is Word.GO:
                self.going = True
            case EndWorkers(attempt=attempt):
                for rank in self.ranks:
                    self.side.happened(ns, RankEnded(attempt=attempt, rank=rank, status=-9))
                self.going = False
        self.side.did(ns, Did(id=do.id))


def agents(base: str, first: int, last: int) -> None:
    """A process of them. Says `running` when all are, reads how many of them are to fall silent, and says when."""
    context: zmq.Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * (last - first) + 16)
    address = keys.read_address(PLATFORM, f"{base}/c/{keys.ADDRESS}")
    assert address is not None
    mine = [Agent(context, base, f"n{n}", address) for n in range(first, last)]
    told = False
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    quiet: Iterator[Agent] = iter(())
    next_ns = 0
    while True:
        ns = PLATFORM.boot_ns()
        for agent in mine:
            agent.look(ns)
        if not told and all(agent.going for agent in mine):
            told = True
            print("running", flush=True)
        if poller.poll(1000 * LOOK_S):
            line = sys.stdin.readline()
            if not line.strip():
                os._exit(0)  # a thousand contexts take long to close
            quiet = iter(mine[: int(line)])
        if ns >= next_ns and (agent := next(quiet, None)) is not None:
            agent.silent, next_ns = True, ns + round(SILENT_EACH_S * NS)
            print(json.dumps([agent.name, ns]), flush=True)


def prepare(base: str, count: int) -> Job:
    """Homes and keys. Not durable: nothing here outlives this command."""
    for folder in ("run", "run/journal", "c", f"c/{keys.ALLOWED}", *(f"n{n}" for n in range(count))):
        os.mkdir(f"{base}/{folder}", 0o700)
    keys.make_keys(PLATFORM, f"{base}/c")
    for n in range(count):
        public, secret = zmq.curve_keypair()
        for path, key in ((f"{base}/n{n}/{keys.SECRET}", secret), (f"{base}/c/{keys.ALLOWED}/n{n}", public)):
            with open(path, "wb") as file:
                file.write(key)
    job = Job(
        name="control", run_folder=f"{base}/run", worker=("none",), carrier=(), version="1", nodes=count,
        supervise=SuperviseConfig(node_lost_s=3600.0),
    )
    write_job(PLATFORM, f"{base}/job.json", job)
    return job


class Suspected:
    """Node -> when its silence was found in the coordinator's log of decisions, which has a clock of its own."""

    def __init__(self, base: str) -> None:
        self.since_ns: dict[str, int] = {}
        self._base = base
        self._read: dict[str, int] = {}

    def look(self) -> None:
        ns = PLATFORM.boot_ns()
        for path in sorted(glob.glob(f"{self._base}/c/decisions/*.jsonl")):
            data = PLATFORM.read(path, self._read.get(path, 0))
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                for record in json.loads(line).get("records", ()):
                    event = record.get("event") or {}
                    if event.get("e") == "silent":
                        self.since_ns.setdefault(event["node"], ns)


def measure(base: str, count: int, processes: int, seconds: float) -> None:
    prepare(base, count)
    own = (sys.executable, "-P", "-m", "packtrain.supervise.coordinator", "--job", f"{base}/job.json")
    coordinator = subprocess.Popen((*own, "--home", f"{base}/c"))
    try:
        _measure(base, count, processes, seconds, psutil.Process(coordinator.pid))
    finally:
        coordinator.kill()
        coordinator.wait()


def _measure(base: str, count: int, processes: int, seconds: float, coordinator: psutil.Process) -> None:
    while not os.path.exists(f"{base}/c/{keys.ADDRESS}"):
        PLATFORM.sleep(0.05)
    began_ns, each = PLATFORM.boot_ns(), -(-count // processes)
    children = [
        subprocess.Popen(
            (sys.executable, __file__, "--child", base, str(n), str(min(n + each, count))), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for n in range(0, count, each)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "running\n"
        print(f"{count:,} agents run after {(PLATFORM.boot_ns() - began_ns) / NS:.1f} s")
        before = sum(coordinator.cpu_times()[:2])
        PLATFORM.sleep(seconds)
        used = (sum(coordinator.cpu_times()[:2]) - before) / seconds
        print(f"coordinator: {used:.2f} cores over {seconds:g} s, {coordinator.memory_info().rss >> 20} MiB")
        _silence(base, children, min(SILENT, each))
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _silence(base: str, children: list[subprocess.Popen[str]], silent: int) -> None:
    first = children[0]
    assert first.stdin is not None and first.stdout is not None
    first.stdin.write(f"{silent}\n")
    first.stdin.flush()
    suspected, end_ns = Suspected(base), PLATFORM.boot_ns() + round((silent * SILENT_EACH_S + 10) * NS)
    suspected.look()
    false = len(suspected.since_ns)
    while PLATFORM.boot_ns() < end_ns:
        suspected.look()
        PLATFORM.sleep(0.02)
    since = dict(json.loads(first.stdout.readline()) for _ in range(silent))
    late = suspected.since_ns
    took = sorted((late[name] - ns) / NS for name, ns in since.items() if name in late)
    false += len([name for name in late if name not in since])
    if took:
        print(f"silence: {len(took)} of {silent} suspected, median {took[len(took) // 2]:.2f} s, "
              f"p99 {took[int(0.99 * (len(took) - 1))]:.2f} s; {false} suspected that were not silent")
    else:
        print(f"silence: none of {silent} suspected; {false} suspected that were not silent")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=12_500)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        agents(args.child[0], int(args.child[1]), int(args.child[2]))
        return
    with tempfile.TemporaryDirectory(prefix="control") as base:
        measure(base, args.agents, args.processes, args.seconds)


if __name__ == "__main__":
    main()
