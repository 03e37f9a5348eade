"""What happened in a run, as a fold over its journal: facts only, no file and no clock.

`Facts.take` is given each entry once, in the order of the reading; reports and the live display read the fields.
Times are nanoseconds since a boot; they are only ever subtracted from others of the same boot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from packtrain.core.errors import EXIT_CONFIG, EXIT_DONE
from packtrain.core.journal import Entry
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    BroughtBack,
    CarrierGivenUp,
    CoordinatorBegan,
    ErrorSeen,
    EvalDone,
    GuardVerdict,
    HomeBack,
    IntervalChosen,
    MemorySaved,
    MirrorDone,
    OrderGiven,
    PhaseTotals,
    ProfileDone,
    RecordsLost,
    RestoreDone,
    RetentionDone,
    RunCreated,
    SampleDone,
    SaveDone,
    StepDone,
    TrainerStarted,
    TrainingDone,
)


@dataclass
class Attempt:
    """One start of all workers. `wall_ns` reaches from `begin` to the end, or to the last sign of life."""

    attempt: int
    restore_step: int
    note: str
    """Where that came from, where it is worth saying."""
    boot: str
    began_ns: int
    last_ns: int
    step: int = -1
    """Steps completed when it was last heard of."""
    asked_to_stop: bool = False
    ended: bool = False
    exit_code: int = 0
    reason: str = ""
    phases_ns: dict[str, int] = field(default_factory=dict)
    """Of rank 0: the cumulative nanoseconds it last wrote down."""
    restored: list[RestoreDone] = field(default_factory=list)
    """What each rank read at its beginning."""

    @property
    def wall_ns(self) -> int:
        return self.last_ns - self.began_ns

    @property
    def unreported_ns(self) -> int:
        """Before the worker's first beat, after its last, and between the last totals and a sudden end."""
        return self.wall_ns - sum(self.phases_ns.values())

    def seen(self, entry: Entry) -> None:
        if entry.boot == self.boot and not self.ended:
            self.last_ns = max(self.last_ns, entry.ns)


@dataclass
class Facts:
    """Everything a report or a display shows. Lists are in the order things happened."""

    run: str = ""
    version: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    started: TrainerStarted | None = None
    steps: list[StepDone] = field(default_factory=list)
    evals: list[EvalDone] = field(default_factory=list)
    samples: list[SampleDone] = field(default_factory=list)
    profiles: list[ProfileDone] = field(default_factory=list)
    saves: list[SaveDone] = field(default_factory=list)
    remembered: list[MemorySaved] = field(default_factory=list)
    interval: IntervalChosen | None = None
    """The last one of an interval that is chosen, not given."""
    orders: list[OrderGiven] = field(default_factory=list)
    errors: list[ErrorSeen] = field(default_factory=list)
    verdicts: list[GuardVerdict] = field(default_factory=list)
    retained: list[RetentionDone] = field(default_factory=list)
    mirrored: dict[str, MirrorDone] = field(default_factory=dict)
    """Of each mirror the last checkpoint that was brought there."""
    brought_back: list[BroughtBack] = field(default_factory=list)
    given_up: list[CarrierGivenUp] = field(default_factory=list)
    homes_back: list[HomeBack] = field(default_factory=list)
    records_lost: int = 0
    launched: CoordinatorBegan | None = None
    """The last one that told how its run was launched."""
    done: TrainingDone | None = None

    def take(self, entry: Entry) -> None:
        record = entry.record
        if isinstance(record, AttemptBegan):
            self.attempts.append(
                Attempt(record.attempt, record.restore_step, record.note, entry.boot, entry.ns, entry.ns)
            )
            if self.done is not None and self._is_over(self.done):
                self.done = None
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is not None:
            attempt.seen(entry)
        match record:
            case RunCreated():
                self.run, self.version = record.run, record.version
            case AttemptEnded():
                self._ended(record)
            case PhaseTotals() if record.rank == 0:
                self._phases(record)
            case TrainerStarted() if record.rank == 0:
                self.started = record
            case StepDone():
                self.steps.append(record)
                if attempt is not None:
                    attempt.step = record.step
            case RestoreDone() if attempt is not None:
                attempt.restored.append(record)
            case RecordsLost():
                self.records_lost += record.count
            case TrainingDone() if not self._is_over(record):
                self.done = record
            case _:
                self._keep(record)

    def _keep(self, record: object) -> None:
        match record:
            case EvalDone():
                self.evals.append(record)
            case SampleDone():
                self.samples.append(record)
            case ProfileDone():
                self.profiles.append(record)
            case MemorySaved():
                self.remembered.append(record)
            case SaveDone():
                self.saves.append(record)
            case IntervalChosen():
                self.interval = record
            case OrderGiven():
                self.orders.append(record)
                if record.word in ("stop", "drain") and self.attempts:
                    self.attempts[-1].asked_to_stop = True
            case ErrorSeen():
                self.errors.append(record)
            case GuardVerdict():
                self.verdicts.append(record)
            case RetentionDone():
                self.retained.append(record)
            case MirrorDone() if not record.error:
                self.mirrored[record.mirror] = record
            case BroughtBack():
                self.brought_back.append(record)
            case CarrierGivenUp():
                self.given_up.append(record)
            case HomeBack():
                self.homes_back.append(record)
            case CoordinatorBegan() if record.nodes:
                self.launched = record

    def _is_over(self, done: TrainingDone) -> bool:
        """Whether a later attempt began than the one that finished; writers' records come in any order."""
        return done.attempt > 0 and any(attempt.attempt > done.attempt for attempt in self.attempts)

    def _attempt(self, number: int) -> Attempt | None:
        return next((attempt for attempt in reversed(self.attempts) if attempt.attempt == number), None)

    def _ended(self, record: AttemptEnded) -> None:
        attempt = self._attempt(record.attempt)
        if attempt is not None:
            attempt.ended, attempt.exit_code, attempt.reason = True, record.exit_code, record.reason

    def _phases(self, record: PhaseTotals) -> None:
        attempt = self._attempt(record.attempt)
        if attempt is not None:
            attempt.phases_ns = dict(record.ns)

    # --- what follows from it ---

    @property
    def state(self) -> str:
        """done, or how the last attempt ended; `running` where it has not (or was cut off without a word).

        An attempt that was asked to stop is stopped, killed or not; one that ends with 75 unasked has failed.
        """
        if self.done is not None:
            return "done"
        if not self.attempts:
            return "new"
        last = self.attempts[-1]
        if not last.ended:
            return "running"
        if last.exit_code == EXIT_DONE:
            return "done"
        return "stopped" if last.asked_to_stop and last.exit_code != EXIT_CONFIG else "failed"

    @property
    def step(self) -> int:
        """Steps completed; 0 when none is known."""
        return self.done.step if self.done else self.steps[-1].step if self.steps else 0

    def published(self) -> list[SaveDone]:
        return [save for save in self.saves if save.commit]

    def final_evals(self) -> list[EvalDone]:
        """The last final evaluation of each store; where there is none, the last one in the loop."""
        chosen: dict[str, EvalDone] = {}
        for eval_done in self.evals:
            if eval_done.final or not (eval_done.store in chosen and chosen[eval_done.store].final):
                chosen[eval_done.store] = eval_done
        return list(chosen.values())


def failures(attempts: Sequence[Attempt]) -> tuple[int, int]:
    """Of attempts that are all over: how many ended unasked (a configuration that was refused is none), and their
    nanoseconds together. One without an end was cut off."""
    calm = (EXIT_DONE, EXIT_CONFIG)
    count = sum(not (one.ended and (one.asked_to_stop or one.exit_code in calm)) for one in attempts)
    return count, sum(one.wall_ns for one in attempts)


def fold(entries: list[Entry]) -> Facts:
    facts = Facts()
    for entry in entries:
        facts.take(entry)
    return facts
