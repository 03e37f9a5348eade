"""What agents and the coordinator of a run tell each other, whoever carries it (link.py).

Beats stay at the agent. What travels is an `Edge` when something changed, a `Pulse` each second, and actions.

Nothing is lost and nothing is done twice, over any link: an agent numbers its edges and repeats them until they are
acknowledged, which the coordinator does once they are in its log; the coordinator repeats an action until the agent's
`Did` with its id has arrived, and an agent that has done an id says what came of it and does nothing.
What is meant for one incarnation of an agent says so, and another drops it: a `Launch` for an agent that died must not
start workers in the next. delivery.py holds both sides of this.
Every message of a coordinator carries its term; an agent remembers the highest it has seen, answers lower ones with
`Outdated`, and does nothing that they ask for.

Fields are added with defaults, never renamed or given a new meaning. Times are nanoseconds since the sender's boot.
"""

from __future__ import annotations

import msgspec

from packtrain.core.contract import Word


class Part(msgspec.Struct, frozen=True, kw_only=True, tag_field="m"):
    """A message, or a piece of one; `m` names its kind on the wire."""


# --- what happened on a node: inside an Edge, and the events of the policy ---------------------------


class RankReady(Part, tag="rank_ready"):
    """Restored, and waiting for `Go` before its first collective."""

    attempt: int
    rank: int
    facts: dict[str, str]
    """What all ranks must have in common: restored (digest), step, data_index, plan, code, mesh, version."""


class RankPhase(Part, tag="rank_phase"):
    """Another kind of phase: init, compile, restore, steps (data, step and rerun are one), save, eval, pause, other."""

    attempt: int
    rank: int
    phase: str
    step: int


class RankSilent(Part, tag="rank_silent"):
    """No beat for so long."""

    attempt: int
    rank: int
    seconds: float


class RankStalled(Part, tag="rank_stalled"):
    """Beats come and no step is completed where one is due. `step`: the last one it completed.

    Told early, as `RankSilent` is, and again at each doubling of `seconds` and at the configured bound (ranks.py).
    """

    attempt: int
    rank: int
    seconds: float
    step: int


class RankIdle(Part, tag="rank_idle"):
    """A program without beats neither printed anything nor used the processor for so long (quiet.py), or a process of
    it was `stopped` from outside (SIGSTOP). Told once, when it is certain.
    """

    attempt: int
    rank: int
    seconds: float
    stopped: bool = False


class RankHeard(Part, tag="rank_heard"):
    """A rank that was told silent or stalled beats, or steps, again."""

    attempt: int
    rank: int
    step: int


class RankEnded(Part, tag="rank_ended"):
    """`status` as `Process.poll` gives it; `error`: name, what, where, fix of the last error it journalled."""

    attempt: int
    rank: int
    status: int
    step: int = -1
    """The last step it completed; -1: not known."""
    since_step_s: float = -1.0
    """For so long it had completed none when this was told; below 0: not known."""
    error: dict[str, str] = {}
    tail: str = ""
    """End of its log: hostile text."""


class CarrierUp(Part, tag="carrier_up"):
    """The carrier of this node listens for others of its run."""

    attempt: int
    address: str
    """host:port"""


class CarrierEnded(Part, tag="carrier_ended"):
    """Another one is started by the agent itself. `why`: its exit, or that it hung and was given up."""

    attempt: int
    why: str
    given_up: bool = False
    """It hung: it was killed, and nobody waits for its end."""
    quarantine: tuple[str, ...] = ()
    """Homes of saves that the next one keeps off until they answer."""
    error: dict[str, str] = {}
    """What is told of that: name, what, where, fix."""


class CarrierHomeBack(Part, tag="carrier_home_back"):
    """A home of saves that was in quarantine answers again."""

    attempt: int
    path: str


class Unkillable(Part, tag="unkillable"):
    """A process that was killed has not ended in so long: a disk may hang under it. Told once; nobody waits."""

    attempt: int
    what: str
    pid: int
    seconds: float


class Stacks(Part, tag="stacks"):
    """What a rank was doing, asked for by `TakeStacks`; `text` empty: unknown, `how` says why."""

    attempt: int
    rank: int
    how: str
    text: str


class HardwareSeen(Part, tag="hardware_seen"):
    """The kernel of this node says that its hardware fails; or, as it began, somebody held its devices' memory.
    `verdict`: as in monitor/kernel.py and monitor/devices.py."""

    verdict: str
    what: str
    where: str
    text: str
    """The line: hostile text."""


class NodeLeaves(Part, tag="node_leaves"):
    """The agent was told to end (SIGTERM): workers got the word DRAIN, and everything is ended after `grace_s`."""

    grace_s: float


class Did(Part, tag="did"):
    """What came of an action. `error` empty: done; `data`: what was asked for, JSON."""

    id: int
    error: str = ""
    data: str = ""


AgentEvent = (
    RankReady | RankPhase | RankSilent | RankStalled | RankIdle | RankHeard | RankEnded
    | CarrierUp | CarrierEnded | CarrierHomeBack | Unkillable | Stacks | HardwareSeen | NodeLeaves | Did
)


# --- what an agent is asked to do --------------------------------------------------------------------


class Launch(Part, tag="launch"):
    """Start the carrier and the workers of this node for an attempt that has begun (its record is in the commit log).

    Commands, environment and configuration are the agent's from its job; here is what differs from attempt to attempt.
    """

    attempt: int
    begin: int
    """Number of its `begin` in the commit log."""
    ranks: tuple[int, ...]
    """Of this node, in order: local rank 0, 1, ..."""
    world_size: int
    master: str
    """host:port of rank 0."""
    restore: str = ""
    """commit:digest; empty: fresh."""
    memory: bool = False
    """What it restores is in memory, here or at a peer (`Launch.memory_from`)."""
    memory_from: dict[str, str] = {}
    """Writer -> node that holds its slot, for writers of this node whose slot lies elsewhere."""
    spec: int = 0
    """Number of the run's spec that all its workers read; 0: the run has none."""
    failures: int = 0
    node_minutes: int = 0
    reuse_standby: bool = True


class Peers(Part, tag="peers"):
    """Where the carriers of an attempt listen: node -> host:port, this node's own included."""

    attempt: int
    addresses: dict[str, str]


class GiveOrder(Part, tag="give_order"):
    """Put a word into the control file."""

    attempt: int
    order: int
    word: Word
    a: int = 0
    b: int = 0


class EndWorkers(Part, tag="end_workers"):
    """SIGKILL the workers of an attempt that still live, with all they started. `RankEnded` follows for each."""

    attempt: int
    reason: str


class EndAttempt(Part, tag="end_attempt"):
    """Its workers are gone: the carrier has `carrier_s` for the saves it took, then what is left of the attempt goes.
    """

    attempt: int
    carrier_s: float = 10.0


class RunDone(Part, tag="run_done"):
    """All its workers are done, and no attempt follows: what this node's carrier owes the mirrors some time is due now,
    and what it keeps in memory for others goes. Said to each carrier of the attempt, one that is yet to come included.
    """

    attempt: int


class TakeStacks(Part, tag="take_stacks"):
    """What every rank of this node is doing: one `Stacks` each, within 2 s."""

    attempt: int


class AskCarrier(Part, tag="ask_carrier"):
    """Hand a request (one line of JSON of the carrier's wire) to this node's carrier; `Did.data` is its outcome."""

    attempt: int
    request: str


class TellHeld(Part, tag="tell_held"):
    """Which slots in memory this node holds: `Did.data`, a JSON list of `checkpoint.slots.Held`."""


class Break(Part, tag="break"):
    """Break something of this node on purpose (faults.py). An agent that is to kill itself says no `Did`."""

    attempt: int
    fault: str
    rank: int = -1
    """-1: no worker is meant."""
    seconds: float = 0.0
    factor: float = 0.0


class Leave(Part, tag="leave"):
    """The run is over, or this node's part in it: end everything that is left, and exit."""

    reason: str


Action = (
    Launch | Peers | GiveOrder | EndWorkers | RunDone | EndAttempt | TakeStacks | AskCarrier | TellHeld | Break
    | Leave
)


# --- from an agent -----------------------------------------------------------------------------------


class Hello(Part, tag="hello"):
    """First on every connection, and again until a `Welcome` with a term that is not lower than `term`."""

    node: str
    agent: str
    """Token of this incarnation: a restarted agent is another one, and has no workers."""
    boot_id: str
    term: int
    """The highest term it has seen."""
    attempt: int
    """Whose workers it runs; 0: none."""
    version: str
    procs: int = 1
    """Workers it can run at once."""
    host: str = ""
    """Where others reach this node: name or address, no port."""


class Pulse(Part, tag="pulse"):
    """Each second: this agent lives, and how far its ranks are."""

    node: str
    agent: str
    attempt: int
    step: int
    """Completed by all of its ranks; -1: not known."""
    step_s: float = 0.0
    """Median of its latest steps; 0: not known."""
    phase: str = ""
    """Of its first rank; empty: not known."""


class Edge(Part, tag="edge"):
    node: str
    agent: str
    seq: int
    """1, 2, 3 ... of this incarnation."""
    ns: int
    event: AgentEvent
    since: int = 1
    """All before this one were acknowledged, and are forgotten."""


class Outdated(Part, tag="outdated"):
    """The answer to a lower term."""

    node: str
    term: int


FromAgent = Hello | Pulse | Edge | Outdated


# --- from the coordinator ----------------------------------------------------------------------------


class Welcome(Part, tag="welcome"):
    term: int
    seq: int
    """Edges of this incarnation up to here are in the log already."""
    agent: str = ""
    """The incarnation it is meant for; empty: any. So below."""


class Acknowledge(Part, tag="acknowledge"):
    """Also sent when there is nothing to acknowledge, so that an agent knows that its coordinator lives."""

    term: int
    seq: int
    agent: str = ""


class Do(Part, tag="do"):
    term: int
    id: int
    """Of one action for one node; grows over the whole life of the run."""
    action: Action
    agent: str = ""
    after: int = 0
    """Id of the action of this node that must be begun before this one; 0: none."""


FromCoordinator = Welcome | Acknowledge | Do
