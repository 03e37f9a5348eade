"""What the policy of a run hears, what it asks for, and the records of both that its log keeps.

Times are nanoseconds of the watched clock (detect.py): those in which a coordinator looked. It stands still while the
machine sleeps, while the coordinator is stopped and from its death until the next one, so all of that counts against
no deadline.
Fields are added with defaults, never renamed or given a new meaning: a later version replays what an older one logged.
"""

from __future__ import annotations

import msgspec

from packtrain.core.records import (
    AttemptEnded,
    AttemptReached,
    CarrierGivenUp,
    ErrorSeen,
    FaultInjected,
    FaultMissed,
    HomeBack,
    NodeBack,
    NodeCordoned,
    NodeDrained,
    NodeLost,
    NodeSuspected,
    OrderGiven,
    ReplayOrdered,
    SharedCauseSeen,
    StacksTaken,
    WorldChosen,
)
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.messages import AgentEvent


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy needs of the job."""

    nodes: int = 1
    procs: int = 1
    """Workers of a node."""
    worlds: tuple[int, ...] = ()
    """Numbers of nodes below `nodes` that the job can also run on."""
    plain: bool = False
    """A program that sends no `ready`, and is not waited for."""
    memory: bool = False
    """Its workers keep their state in memory, too, from which the next attempt may begin."""
    supervise: SuperviseConfig = SuperviseConfig()


# --- what happened ---------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="e"):
    ns: int = 0


class Opened(Event, tag="opened"):
    """A coordinator leads. `best_step`: of the restore point, 0 when the run is new; `attempt`: the last one begun."""

    term: int
    setup: Setup
    best_step: int = 0
    attempt: int = 0
    blames: dict[str, int] = {}
    """Host -> how often it was blamed, in all runs of this person."""


class Joined(Event, tag="joined"):
    """An agent said who it is. `attempt`: whose workers it runs; 0: none."""

    node: str
    agent: str
    boot_id: str = ""
    host: str = ""
    procs: int = 1
    attempt: int = 0


class Silent(Event, tag="silent"):
    """Nothing was heard from a node for so long."""

    node: str
    seconds: float


class Back(Event, tag="back"):
    """A silent node is heard again, with the agent it had."""

    node: str


class FromNode(Event, tag="from_node"):
    """An edge, the next one of this agent."""

    node: str
    agent: str
    seq: int
    event: AgentEvent


class Begun(Event, tag="begun"):
    """What came of `Begin`. `error` empty: its record is in the commit log."""

    id: int
    attempt: int = 0
    begin: int = 0
    step: int = -1
    """What it restores; -1: nothing."""
    rolled_back: bool = False
    """That lies further back than what the log led to."""
    restore: str = ""
    memory: bool = False
    """It restores what its nodes hold in memory."""
    memory_from: dict[str, dict[str, str]] = {}
    """Node -> its `Launch.memory_from`."""
    note: str = ""
    """Of `AttemptBegan`."""
    master: str = ""
    away: bool = False
    """What it restores was taken away from outside, and a mirror can bring it back."""
    failures: int = 0
    node_minutes: int = 0
    spec: int = 0
    """Number of the newest when it began; 0: the run has none."""
    error: dict[str, str] = {}


class Done(Event, tag="done"):
    """`BringBack` or `WrapUp` is over."""

    id: int


class Progress(Event, tag="progress"):
    """Step completed by all ranks; told seldom. `step_s`: the median over the nodes; 0: not known."""

    attempt: int
    step: int
    step_s: float = 0.0


class Slow(Event, tag="slow"):
    """A node takes much longer for a step than the others do."""

    attempt: int
    node: str
    step_s: float
    median_s: float


class Published(Event, tag="published"):
    """A checkpoint was."""

    step: int


class Doubted(Event, tag="doubted"):
    """What a guard told makes the hardware of an attempt suspect (doubt.py)."""

    step: int
    reason: str
    attempt: int = 0
    """0: an older record."""


class CarrierWanted(Event, tag="carrier_wanted"):
    """There is something for the carrier that publishes to do: a request of its wire, one line of JSON."""

    request: str


class Asked(Event, tag="asked"):
    """A person, or the machine, asks. `op`: stop, pause, resume, save, drain, cordon, uncordon, replace."""

    op: str
    by: str = "operator"
    node: str = ""
    at_s: float = 0.0
    """drain: wall-clock date from which on the node is not there; 0: now."""
    at_once: bool = False
    """stop: without a save, where the run was asked to stop before."""


class BreakAsked(Event, tag="break_asked"):
    """A person has something broken (faults.py). What is empty, -1 or 0 is not named."""

    fault: str
    by: str = "operator"
    node: str = ""
    rank: int = -1
    seconds: float = 0.0
    factor: float = 0.0


class Tick(Event, tag="tick"):
    wall_s: float = 0.0


AnyEvent = (
    Opened | Joined | Silent | Back | FromNode | Begun | Done | Progress | Slow | Published | Doubted | CarrierWanted
    | Asked | BreakAsked | Tick
)


# --- what the coordinator itself is to do ------------------------------------------------------------


class Own(msgspec.Struct, frozen=True, kw_only=True, tag_field="o"):
    """An action without a node. `Begin`, `BringBack` and `WrapUp` are answered by an event; the rest is said once."""


class Begin(Own, tag="begin"):
    """Commit a new attempt. Asked again by a later term it is another one: what an earlier coordinator began has no
    workers, or has workers that this coordinator knows nothing of, and ends."""

    reason: str
    writers: tuple[str, ...]
    node: str
    """Of rank 0."""
    back: int = 0
    """Saves to go back from the one the log leads to."""
    memory: bool = True
    """It may begin from what is held in memory, where that is newer."""


class BringBack(Own, tag="bring_back"):
    """Wait until what the attempt restores is back from a mirror, or cannot be."""

    attempt: int


class WrapUp(Own, tag="wrap_up"):
    """The workers of an attempt are gone: finish retention; when the run is done, bring the last save to the mirrors.
    """

    attempt: int
    done: bool


class Write(Own, tag="write"):
    """Into the journal, where people and reports find it."""

    record: (
        AttemptEnded | AttemptReached | ErrorSeen | OrderGiven | NodeLost | NodeBack | NodeSuspected | NodeCordoned
        | NodeDrained | SharedCauseSeen
        | ReplayOrdered | StacksTaken | WorldChosen | FaultInjected | FaultMissed | CarrierGivenUp | HomeBack
    )


class Finish(Own, tag="finish"):
    """The last action: leave with this exit code. `error` empty: all is well."""

    exit_code: int
    reason: str
    error: dict[str, str] = {}


class Die(Own, tag="die"):
    """SIGKILL to the coordinator itself, asked for by a person."""


OwnAction = Begin | BringBack | WrapUp | Write | Finish | Die
