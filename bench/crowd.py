"""A process of simulated agents, for bench/control.py: the protocol of each over the real link, nothing behind it.

`python bench/crowd.py BASE FIRST LAST`. Each agent has its own key, connection and incarnation, says Hello, is
launched, says that its rank is ready, pulses each second, and tells that its rank saves and steps again, all ranks at
once, every `SAVE_EACH_S`. Beats stay at agents: they are not simulated. An agent is looked at once a second and not,
as a real one, twenty times, so that thousands of them leave the processor to the coordinator.

On stdin: a line of JSON, `quiet`: so many agents fall silent for a while, one after the other; `late`: to be answered.
On stdout, lines of JSON: `heard`: a term that all of them have been welcomed under and run under; `quiet`: [name,
nanoseconds] as each falls silent; `late`: by how many seconds an agent was looked at too late at most, since that was
last asked: for so long it was silent indeed, because this process did not get the processor.
"""

from __future__ import annotations

import heapq
import json
import os
import sys
from collections.abc import Iterator

import zmq

from packtrain.core.contract import GO_ID, Word
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from packtrain.supervise import keys
from packtrain.supervise.delivery import AgentSide
from packtrain.supervise.link import Caller, open_files
from packtrain.supervise.messages import (
    Did,
    Do,
    EndAttempt,
    EndWorkers,
    GiveOrder,
    Hello,
    Launch,
    Pulse,
    RankEnded,
    RankPhase,
    RankReady,
)

PLATFORM = LocalPlatform()
LOOK_NS, LOOK_SOON_NS = NS, NS // 4
"""How often an agent is looked at that runs, and one that has yet to."""
ADDRESS_NS = NS // 5
SAVE_EACH_S = 30
QUIET_NS, QUIET_EACH_NS = 6 * NS, NS // 10
"""For how long an agent falls silent, and how long after the one before."""


class Agent:
    """The protocol of an agent, with ranks that do nothing but count."""

    def __init__(self, context: zmq.Context, base: str, name: str) -> None:
        self.name, self.token = name, PLATFORM.token()
        self.caller = Caller(PLATFORM, f"{base}/{name}", context)
        self.called: keys.Address | None = None
        self.side = AgentSide(name, self.token)
        self.attempt, self.ranks, self.going = 0, (0,), False
        self.step, self.phase = -1, "steps"
        self.quiet_ns = 0
        """Until when it says nothing."""

    @property
    def runs(self) -> bool:
        return self.going and self.side.joined

    def look(self, ns: int, address: keys.Address) -> None:
        if ns < self.quiet_ns:
            return
        if self.side.lost(ns) or address != self.called:
            self.side.anew(ns)
            self.called = address
            self.caller.call(address)
        for message in self.caller.receive():
            do = self.side.arrived(ns, message)
            if do is not None:
                self.obey(ns, do)
        if self.going:
            self.count(ns)
        hello = Hello(
            node=self.name, agent=self.token, boot_id="b", term=0, attempt=self.attempt, version="1", host=self.name
        )
        pulse = Pulse(node=self.name, agent=self.token, attempt=self.attempt, step=self.step, step_s=1.0)
        for said in self.side.due(ns, hello, pulse):
            self.caller.send(said)

    def count(self, ns: int) -> None:
        """A step of a second; each rank saves at the same step."""
        self.step = ns // NS
        phase = "save" if self.step % SAVE_EACH_S == 0 else "steps"
        if phase != self.phase:
            self.phase = phase
            for rank in self.ranks:
                self.side.happened(ns, RankPhase(attempt=self.attempt, rank=rank, phase=phase, step=self.step))

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
            case EndAttempt():
                self.attempt = 0
        self.side.did(ns, Did(id=do.id))


class Crowd:
    """Those of one process, looked at in turn."""

    def __init__(self, base: str, first: int, last: int) -> None:
        open_files(2 * (last - first))
        self.context: zmq.Context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 2 * (last - first) + 16)
        self.agents = [Agent(self.context, base, f"n{n}") for n in range(first, last)]
        self._path = f"{base}/c/{keys.ADDRESS}"
        self._address: keys.Address | None = None
        self._address_ns = 0
        ns = PLATFORM.boot_ns()
        self._queue = [(ns + LOOK_NS * n // len(self.agents), n) for n in range(len(self.agents))]
        self._heard = 0
        self._quiet: Iterator[Agent] = iter(())
        self._quiet_ns = self._late_ns = 0

    def look(self) -> float:
        """Look at those whose turn it is. Seconds until the next one's."""
        ns = PLATFORM.boot_ns()
        if ns >= self._address_ns:
            self._address_ns = ns + ADDRESS_NS
            self._address = keys.read_address(PLATFORM, self._path) or self._address
            self._tell_heard()
        while self._address is not None and self._queue[0][0] <= ns:
            agent = self.agents[self._queue[0][1]]
            agent.look(ns, self._address)
            self._late_ns = max(self._late_ns, ns - self._queue[0][0])
            heapq.heapreplace(self._queue, (ns + (LOOK_NS if agent.runs else LOOK_SOON_NS), self._queue[0][1]))
            ns = PLATFORM.boot_ns()
        self._fall_silent(ns)
        return max(0.001, min(0.05, (self._queue[0][0] - ns) / NS))

    def _tell_heard(self) -> None:
        terms = {agent.side.term if agent.runs else 0 for agent in self.agents}
        if len(terms) == 1 and min(terms) > self._heard:
            self._heard = terms.pop()
            print(json.dumps({"heard": self._heard}), flush=True)

    def tell_late(self) -> None:
        print(json.dumps({"late": self._late_ns / NS}), flush=True)
        self._late_ns = 0

    def quiet(self, count: int) -> None:
        """So many are to fall silent."""
        self._quiet = iter(self.agents[:count])

    def _fall_silent(self, ns: int) -> None:
        if ns >= self._quiet_ns and (agent := next(self._quiet, None)) is not None:
            agent.quiet_ns, self._quiet_ns = ns + QUIET_NS, ns + QUIET_EACH_NS
            print(json.dumps({"quiet": [agent.name, ns]}), flush=True)


def main() -> None:
    crowd = Crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    while True:
        if poller.poll(1000 * crowd.look()):
            line = sys.stdin.readline()
            if not line.strip():
                os._exit(0)  # thousands of sockets take long to close
            asked = json.loads(line)
            crowd.quiet(asked["quiet"]) if "quiet" in asked else crowd.tell_late()


if __name__ == "__main__":
    main()
