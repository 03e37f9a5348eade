"""Every typed, versioned record that rooms exchange through the journal. Frozen structs, tagged by `kind`.

A record says what happened; whoever reads folds over them. Fields are added with defaults, never renamed or given a new
meaning: that takes a new kind. Units come last in names. Times are added by the journal, not by the record.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    v: int = 1


# --- the journal itself ------------------------------------------------------------------------------


class SegmentBegan(Record, tag="segment_began"):
    """First line of every journal segment; the reader consumes it, no fold sees it."""

    first: int
    """Sequence number of the first record after it; lower than one already read where a failed write was repeated."""
    boot_id: str
    wall_less_boot_ns: int
    """Wall clock minus boot clock when the segment began: turns boot times into dates, for reports only."""


class RecordsLost(Record, tag="records_lost"):
    """The writer could not put `count` records on disk (they hold the sequence numbers before this one's)."""

    count: int
    error: str


# --- a run and its attempts (written by whoever plays coordinator) -----------------------------------


class RunCreated(Record, tag="run_created"):
    run: str
    spec: int
    version: str


class AttemptBegan(Record, tag="attempt_began"):
    attempt: int
    commit: int
    parent: int
    restore_step: int
    """Step restored from; -1 when fresh."""
    note: str = ""
    """Where that lies when it is not on disk, or why it does not come from memory, in words; empty: nothing to say."""


class AttemptEnded(Record, tag="attempt_ended"):
    attempt: int
    exit_code: int
    reason: str


class AttemptReached(Record, tag="attempt_reached"):
    """A point on the way from one step to the next, over the end of an attempt.

    The coordinator writes `noticed` (this attempt is over, whatever was first to say so), `started` (all its workers
    are) and `go` (they may take their first step); each rank of the trainer `state` (restored, or made anew).
    """

    attempt: int
    point: Literal["noticed", "started", "go", "state"]
    rank: int = -1
    since_step_s: float = -1.0
    """noticed: so long before, by the clock of its agent, a rank completed its last step. Below 0: not known."""


class OrderGiven(Record, tag="order_given"):
    order: int
    word: str
    reason: str


class ErrorSeen(Record, tag="error_seen"):
    """A `PacktrainError` as it was shown; `severity` warning: the run went on."""

    severity: Literal["warning", "error"]
    name: str
    what: str
    where: str = ""
    fix: str = ""


class CarrierGivenUp(Record, tag="carrier_given_up"):
    """It answered nothing, or threads of it hung in a dead file system: it was killed, and another one started."""

    reason: str
    quarantine: list[str] = []
    """Homes of saves that the next carrier keeps off until they answer."""
    node: str = ""


class HomeBack(Record, tag="home_back"):
    """A home of saves that was in quarantine answers again."""

    path: str
    node: str = ""


class RetentionDone(Record, tag="retention_done"):
    action: Literal["tombstone", "purge", "lift"]
    folder: str
    reason: str


# --- a run on several nodes (written by its coordinator) ----------------------------------------------


class SpecChanged(Record, tag="spec_changed"):
    """A person changed values of a run that had begun: its spec of this number has them."""

    spec: int
    changes: list[str]
    """`key: old -> new` each."""


class CoordinatorBegan(Record, tag="coordinator_began"):
    term: int
    log: str
    """Folder of its log of decisions."""
    by: str = ""
    """Who started it again because it was missed; empty: a person's command."""
    nodes: int = 0
    """Of a full world, as the run was launched; 0: not told."""
    spares: int = 0
    procs: int = 1
    """Workers of a node."""


class AgentStarted(Record, tag="agent_started"):
    """The agent of this node had died, and was started again by the coordinator."""

    node: str
    tries: int
    """In a row."""
    given_up: bool = False
    """This was the last one."""


class WorldChosen(Record, tag="world_chosen"):
    """Which nodes run an attempt: the first has rank 0, the next the ranks after its own. `spares`: who waits."""

    attempt: int
    nodes: list[str]
    procs: int
    spares: list[str]
    wanted: int
    """How many nodes the run asks for; more than `nodes`: it goes on smaller for now."""


class NodeLost(Record, tag="node_lost"):
    node: str
    reason: str


class NodeBack(Record, tag="node_back"):
    node: str
    reason: str


class NodeSuspected(Record, tag="node_suspected"):
    """An attempt ended, or is slow, because of this node. `in_row`: attempts one after the other."""

    node: str
    reason: str
    in_row: int
    done: str
    """What follows, in words."""
    blamed: bool = True
    """Counted against its host, for this run and others; False: it is told only."""


class NodeCordoned(Record, tag="node_cordoned"):
    """No attempt begins on this node until a person takes that back."""

    node: str
    by: str
    cordoned: bool = True
    """False: taken back."""


class NodeDrained(Record, tag="node_drained"):
    """This node is to be gone without, until another agent runs there or a person takes it back."""

    node: str
    by: str
    in_world: bool
    """It has a place in the world: where ranks run they save, and another attempt begins without it."""


class SharedCauseSeen(Record, tag="shared_cause"):
    """The same symptom on many nodes at once: none of them is blamed."""

    symptom: str
    nodes: list[str]


class ReplayOrdered(Record, tag="replay_ordered"):
    """Steps that a node may have computed wrong are to be computed again elsewhere, from the checkpoint of `first`, and
    compared bit for bit. Its result is pending until a record says otherwise."""

    attempt: int
    first: int
    """Step of the checkpoint that the replay begins from; 0: from nothing."""
    last: int
    nodes: list[str]
    """Which of them it was is not known, where there are several."""
    on: list[str]
    """Spares that are there for it; empty: it waits for some."""
    halves: list[list[str]] = []
    """Of several nodes: those that are to be replaced in the first replay, and in the second."""
    reason: str = ""
    result: str = "pending"


class StacksTaken(Record, tag="stacks"):
    """What a rank of a hung world was doing. `text` empty: unknown, `how` says why."""

    attempt: int
    rank: int
    node: str
    how: str
    text: str


class FaultInjected(Record, tag="fault_injected"):
    """Something is about to be broken on purpose. `node` empty: the coordinator; `rank` -1: no worker."""

    fault: str
    attempt: int
    node: str
    rank: int
    seconds: float
    """0: it lasts no time, or for good."""
    factor: float
    by: str


class FaultMissed(Record, tag="fault_missed"):
    """It was not broken after all."""

    fault: str
    node: str
    rank: int
    why: str


class RunFinished(Record, tag="run_finished"):
    """The last record of a coordinator. `error` empty: all is well."""

    exit_code: int
    reason: str
    error: dict[str, str] = {}


# --- the trainer -------------------------------------------------------------------------------------


class TrainerStarted(Record, tag="trainer_started"):
    attempt: int
    rank: int
    parameters: int
    mesh: dict[str, int]
    attention: str
    """The kernel in use: the concrete name, whatever was asked for."""
    precision: str
    peak_flops_per_s: float
    """Best matmul rate measured on the spot, all local devices together."""
    digest_repeats: bool
    """Whether this executable gave one gradient digest twice for one batch; if not, hardware verdicts are UNKNOWN."""
    attention_reason: str = ""


class StepDone(Record, tag="step"):
    """Metrics of one applied or skipped batch (class: metrics)."""

    step: int
    loss: float
    bits_per_byte: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    """Since the step before it ended; saves, evaluations and pauses in between are left out."""
    mfu: float
    """Model FLOPs by mask area / (seconds * measured matmul peak)."""
    update_norm: float = 0.0
    """Global norm of what the update changed, rate and decay included, every tenth step; 0: not told, or no update.
    With `optim.master=bf16` before the change is rounded to what is kept."""
    param_norm: float = 0.0
    """Global norm of the parameters after the update; 0: no update, or an older record."""


class GuardVerdict(Record, tag="guard_verdict"):
    step: int
    reason: Literal["non_finite", "spike", "copies_differ"]
    rerun: Literal["clean", "same", "different", "unknown"]
    """How the rerun of the same batch from unchanged state ended. same: the batch is to blame. clean: another digest
    and a good verdict, whose result was used; different: another digest, bad again; both make the hardware suspect.
    unknown: this executable does not repeat its digests."""
    policy: str
    """What was done: `used` the rerun, or the guard's policy."""
    digest: int
    rerun_digest: int
    attempt: int = 0
    """0: an older record."""


class PhaseTotals(Record, tag="phase_totals"):
    """Cumulative nanoseconds per phase of one rank of one attempt, as its beats carry them."""

    attempt: int
    rank: int
    ns: dict[str, int]


class EvalDone(Record, tag="eval"):
    step: int
    store: str
    loss: float
    bits_per_byte: float
    tokens: int
    final: bool = False


class SampleDone(Record, tag="sample"):
    step: int
    prompt: str
    text: str
    final: bool = False


class ProfileDone(Record, tag="profile"):
    """Where the time of some traced steps went."""

    step: int
    """Batches consumed, the traced ones included."""
    steps: int
    ns: dict[str, int]
    """Kind of work -> nanoseconds of all traced steps together; they add up to the time these took."""
    folder: str
    """The trace, for TensorBoard and Perfetto."""


class SaveDone(Record, tag="save"):
    """Outcome of one save as the trainer saw it. `commit` is 0 when it failed."""

    step: int
    commit: int
    bytes: int
    stall_s: float
    write_s: float
    error: str = ""


class MirrorDone(Record, tag="mirror"):
    """A published checkpoint was brought to a mirror, or was not: then `error` says why."""

    mirror: str
    step: int
    commit: int
    bytes: int = 0
    """Read back from there and found good; those that were there before are counted, too."""
    bytes_sent: int = 0
    seconds: float = 0.0
    verified: str = ""
    """Level: `r`, every byte was read back from the mirror. Empty: it is not there."""
    locked_days: int = 0
    """Governance retention it got; 0: none."""
    error: str = ""


class BroughtBack(Record, tag="brought_back"):
    """A published checkpoint that something else than retention had deleted, or files of it, is there again."""

    mirror: str
    """Where it was found."""
    step: int
    commit: int
    folder: str
    bytes: int
    seconds: float


class MemorySaved(Record, tag="memory_save"):
    """The state was copied into memory (class: metrics). `bytes` 0: skipped, no slot was free or there was no room."""

    step: int
    bytes: int
    stall_s: float
    at_peer: int = 0
    """Copies that another node has, since the last of these records."""
    not_at_peer: int = 0
    """Those that were to go there and did not arrive, or were not made."""


class RestoreDone(Record, tag="restore"):
    """What one rank restored, from where, and what it took; every byte of it was checked."""

    step: int
    commit: int
    rank: int
    ranks: int
    source: str
    """Folder that was read."""
    reason: str
    """Why that one."""
    read_bytes: int
    """By this rank, in whole blocks of images."""
    read_bytes_all: int
    """By all ranks together."""
    sent_bytes: int
    """Passed on by this rank to others."""
    seconds: float


class IntervalChosen(Record, tag="interval"):
    """With `checkpoint.every_s = "auto"`: from now on so long from one save to the next, and why, in words."""

    every_s: float
    reason: str


class TrainingDone(Record, tag="training_done"):
    step: int
    updates_skipped: int
    attempt: int = 0
    """Which one finished: a later one that begins (somebody went back) makes the run unfinished. 0: not told."""


AnyRecord = (
    SegmentBegan | RecordsLost
    | RunCreated | AttemptBegan | AttemptEnded | AttemptReached | OrderGiven | ErrorSeen | RetentionDone
    | CarrierGivenUp | HomeBack | CoordinatorBegan | AgentStarted | WorldChosen | NodeLost | NodeBack | NodeSuspected
    | NodeCordoned | NodeDrained | SharedCauseSeen | SpecChanged | ReplayOrdered | StacksTaken | FaultInjected
    | FaultMissed | RunFinished
    | TrainerStarted | StepDone | GuardVerdict | PhaseTotals | EvalDone | SampleDone | ProfileDone | SaveDone
    | MirrorDone | BroughtBack | MemorySaved | IntervalChosen | RestoreDone | TrainingDone
)
