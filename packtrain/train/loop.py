"""The training loop as one story: dispatch a batch, read what is ORDER_LAG calls old, obey, evaluate, save.

Every branch is taken from values that are the same on all ranks (outputs of the jitted step, the step number, orders
that all have heard), so all ranks make the same calls in the same order and none waits for one that went another way.

A bad verdict leaves the state as it was before its batch, and the calls dispatched behind it are no-ops; so the loop
goes back to that batch, runs it again, and dispatches the later ones anew. What only one rank can know (its clock, a
signal, its agent's order) travels as a row of orders and is obeyed by all at once; see orders.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from packtrain.checkpoint.interval import History
from packtrain.checkpoint.rounds import Rounds
from packtrain.core.contract import ORDER_LAG, Beats, Order, Word
from packtrain.core.errors import GuardRollback, GuardStopped, StoppedOnRequest, StoreDamaged
from packtrain.core.journal import Journal
from packtrain.core.platform import Platform
from packtrain.core.records import GuardVerdict, PhaseTotals, StepDone, TrainerStarted, TrainingDone
from packtrain.core.units import NS
from packtrain.data.loader import Batch
from packtrain.train.cadence import Cadence
from packtrain.train.config import GRACE_SHARE
from packtrain.train.flops import step_flops
from packtrain.train.guard import Verdict
from packtrain.train.heldout import HeldOut, bits_per_byte
from packtrain.train.orders import SILENCE, Orders, Row, Wire
from packtrain.train.profile import Profiler
from packtrain.train.sample import Sampler
from packtrain.train.saving import Saves, Standing, warning
from packtrain.train.sections import Sections
from packtrain.train.state import State, count_parameters
from packtrain.train.step import Command, Out, Step, place_batch

PHASES_NS = 10 * NS
"""How often the totals per phase go to the journal."""
PAUSE_POLL_S = 0.2
REASONS: dict[Verdict, Literal["non_finite", "spike", "copies_differ"]] = {
    Verdict.NON_FINITE: "non_finite", Verdict.SPIKE: "spike", Verdict.COPIES_DIFFER: "copies_differ",
}


class Feed(Protocol):
    """Batches by index, in any order; asked again for the same index it fetches again."""

    def get(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class Parts:
    """What the loop is made of; tests hand in others."""

    spec: Sections
    mesh: Mesh
    platform: Platform
    journal: Journal
    beats: Beats
    orders: Orders
    wire: Wire
    feed: Feed
    step: Step
    held_out: HeldOut
    sampler: Sampler
    saves: Saves
    attempt: int = 1
    rank: int = 0
    grace_s: float = 60.0
    peak_flops_per_s: float = 0.0
    attention_reason: str = ""
    profiler: Profiler | None = None
    history: History = History()
    """Of the run before this attempt."""
    nodes: int = 1
    peer_every: int = 0
    """Rounds of copies to other nodes begin at steps divisible by this; 0: never. The same on all ranks."""

    @property
    def speaks(self) -> bool:
        """Rank 0 writes down what all ranks know, and its clock speaks for all."""
        return self.rank == 0


@dataclass(frozen=True)
class Flight:
    """A call that was dispatched and not read yet."""

    call: int
    index: int
    command: Command
    batch: Batch
    out: Out


class Loop:
    """One attempt of one rank, from a restored or fresh state to its end."""

    def __init__(self, parts: Parts, state: State, start: Standing) -> None:
        self.parts, self.state = parts, state
        self.index = start.index
        """Next batch to dispatch; equals `step` of the state whenever nothing is in flight."""
        self.end = parts.spec.train.steps
        self.calls = 0
        self.flights: deque[Flight] = deque()
        self.windows = start.windows
        self.skips_in_a_row = start.skips_in_a_row
        self.paused = False
        self.held_until = 0
        """Step before which nothing is saved by the cadence."""
        self.digest_repeats = False
        now = parts.platform.boot_ns()
        self._trained_ns, self._since_ns = start.trained_ns, now
        self._step_end_ns = self._phases_ns = now
        self._rounds = Rounds(parts.peer_every)
        self._cadence = Cadence(parts.spec.checkpoint.every_s, parts.history, parts.nodes, now)

    # --- the story ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Returns when training is done; a stop on request and all else that ends it early is raised."""
        try:
            self._begin()
            while not self._complete():
                if self.paused:
                    self._rest()
                    continue
                self._advance()
                self._obey()
                self._keep_cadence()
                self._profile()
            self._finish()
        finally:
            if self.parts.profiler is not None:
                self.parts.profiler.close()
            self._report_phases()

    def _begin(self) -> None:
        if self.index < self.end:
            with self.parts.beats.during("compile"):
                self.digest_repeats = self._probe() == self._probe()
        self._report_start()
        self._since_ns = self._step_end_ns = self.parts.saves.began_ns = self.parts.platform.boot_ns()
        self._listen()

    def _complete(self) -> bool:
        if self.index < self.end:
            return False
        self._settle()
        return self.index >= self.end

    def _advance(self) -> None:
        """Dispatch the next batch, then read the call that is ORDER_LAG older."""
        if self._in_window():
            self._settle()  # SKIP clears `tripped`, so no verdict may be open
        first = self.calls == 0  # a state saved by policy `stop` is still tripped; RERUN clears that
        command = Command.SKIP if self._in_window() else Command.RERUN if first else Command.RUN
        self.flights.append(self._dispatch(command, "step"))
        while len(self.flights) > ORDER_LAG:
            self._read(self.flights.popleft())
        self._watch_clock()

    def _in_window(self) -> bool:
        return any(first <= self.index < first + count for first, count in self.windows)

    def _keep_cadence(self) -> None:
        """What the step number alone decides. A rerun found while settling comes by here again.

        All ranks settle where one may copy into memory, room or not: a rerun must come to all at the same call.
        """
        step, spec = self.index, self.parts.spec
        evaluate = _divides(spec.train.eval_every_steps, step)
        judged = evaluate and spec.checkpoint.keep_best > 0  # the figure is of this very state
        save = (judged or _divides(spec.checkpoint.every_steps, step)) and step >= self.held_until
        remember = _divides(spec.checkpoint.memory_every_steps, step)
        if step >= self.end or not (evaluate or save or remember):
            return
        self._settle()
        if self.index != step:
            return
        if remember:
            self._remember()
        if evaluate:
            self._evaluate()
        if save:
            self._save()

    def _profile(self) -> None:
        """Begin or end the trace. All ranks settle at the same steps, and each traces its own."""
        profiler = self.parts.profiler
        if profiler is None or not profiler.turns(self.calls, self.index, self.end):
            return
        self._settle()
        if profiler.state == "waiting":
            profiler.begin(self.index)
        else:
            with self._aside("other"):
                record = profiler.end(self.index)
                if self.parts.speaks:
                    self.parts.journal.write(record)

    def _finish(self) -> None:
        """The state is safe before the long evaluation begins."""
        parts = self.parts
        self._save_last(parts.spec.checkpoint.deadline_s)
        self._hear_stop()
        self._evaluate(final=True)
        if parts.speaks:
            skipped = int(jax.device_get(self.state.updates_skipped))
            done = TrainingDone(step=self.index, updates_skipped=skipped, attempt=parts.attempt)
            parts.journal.write(done, durable=True)

    # --- calls and verdicts ------------------------------------------------------------------------

    def _dispatch(self, command: Command, phase: str) -> Flight:
        parts, index = self.parts, self.index
        parts.beats.enter("data")
        batch = parts.feed.get(index)
        parts.beats.enter(phase)
        placed = place_batch(batch, parts.mesh, parts.spec.train.microbatches)
        self.state, out = parts.step(self.state, placed, parts.wire.place(self._row()), int(command))
        self.calls += 1
        self.index += 1
        return Flight(self.calls, index, command, batch, out)

    def _fetch(self, flight: Flight) -> Out:
        """Wait for a call; its orders count whether it ran or not."""
        out: Out = jax.device_get(flight.out)
        self.parts.orders.hear(flight.call, np.asarray(out.orders_R5))
        return out

    def _read(self, flight: Flight) -> None:
        out = self._fetch(flight)
        if flight.command != Command.SKIP and out.verdict != Verdict.OK:
            self._rerun(flight, out)
        elif out.ran:
            self._count(flight, out)

    def _settle(self) -> None:
        """Read every call in flight; afterwards `index` is the state's step."""
        while self.flights:
            self._read(self.flights.popleft())

    def _rerun(self, flight: Flight, bad: Out) -> None:
        """The batch again from the unchanged state; what was dispatched behind it did nothing."""
        with self.parts.beats.during("rerun"):
            while self.flights:
                self._fetch(self.flights.popleft())
            self.index = flight.index
            again = self._dispatch(Command.RERUN, "rerun")
            out = self._fetch(again)
        used = int(out.verdict) == Verdict.OK
        self._report_verdict(bad, out, used)
        if used:
            self._count(again, out)
        else:
            self.index = flight.index
            self._apply_policy(bad)

    def _apply_policy(self, bad: Out) -> None:
        """The batch is bad, not the moment. One decision for all ranks: all saw the same two outputs."""
        policy, where = self.parts.spec.guard.policy, f"data index {self.index}"
        what = f"batch {self.index} gave a {REASONS[Verdict(int(bad.verdict))]} step, and again when it was rerun"
        if policy == "rollback":
            self.parts.saves.forget()  # newer than where it goes back to, whoever begins the next attempt
            raise GuardRollback(what, where=where, fix="none: the run goes back to its last published step")
        if policy == "stop":
            self._save_last(self.parts.spec.checkpoint.deadline_s)
            raise GuardStopped(what, where=where, fix="look at the batch; guard.policy=skip goes on without it")
        if self.skips_in_a_row >= self.parts.spec.guard.skips_in_a_row_max:
            self._save_last(self.parts.spec.checkpoint.deadline_s)
            raise GuardStopped(
                f"{what}; {self.skips_in_a_row} batches before it were skipped, so it is not the batches", where=where,
                fix="look at loss and gradient norm before them; go back to an older checkpoint or lower the rate",
            )
        self.skips_in_a_row += 1
        skipped = self._dispatch(Command.SKIP, "rerun")
        self._count(skipped, self._fetch(skipped))

    def _probe(self) -> int:
        """The gradient digest of the next batch; the state stays bit for bit. Compiles the step."""
        parts = self.parts
        batch = place_batch(parts.feed.get(self.index), parts.mesh, parts.spec.train.microbatches)
        self.state, out = parts.step(self.state, batch, parts.wire.place(SILENCE), int(Command.PROBE))
        return int(jax.device_get(out.digest))

    # --- orders ------------------------------------------------------------------------------------

    def _row(self) -> Row:
        return self.parts.orders.row(self.parts.saves.round_ended)

    def _obey(self) -> None:
        while (order := self.parts.orders.due(self.calls)) is not None:
            self._carry_out(order)

    def _listen(self) -> None:
        """Exchange orders outside a step and obey at once."""
        self._watch_clock()
        order = self.parts.orders.heard_now(self.parts.wire.pulse(self._row()))
        if order is not None:
            self._carry_out(order)

    def _hear_stop(self) -> None:
        """While the last evaluation runs a stop is the only order with a meaning; the state is published already."""
        self._report_phases_in_time()
        order = self.parts.orders.heard_now(self.parts.wire.pulse(self._row()))
        if order is not None and order.word in (Word.STOP, Word.DRAIN):
            self._stop()

    def _carry_out(self, order: Order) -> None:
        self._settle()
        match order.word:
            case Word.SAVE:
                self._save()
            case Word.STOP | Word.DRAIN:
                self._stop()
            case Word.PAUSE | Word.RESUME:
                self._clock_stops(order.word is Word.PAUSE)
            case Word.SKIP:
                self.windows = (*self.windows, (order.a, order.b))
                self._save()  # the order lasts from the next published save on
            case Word.FINISH:
                self._clock_stops(False)
                self.end = self.index
            case Word.HOLD:
                self.held_until = order.a
            case Word.NONE:
                pass

    def _stop(self) -> None:
        spec = self.parts.spec
        commit = self._save_last(min(spec.checkpoint.deadline_s, GRACE_SHARE * self.parts.grace_s))
        saved = f"saved as commit {commit}" if commit else "nothing to save yet"
        raise StoppedOnRequest(
            f"stopped after step {self.index} as ordered, {saved}", fix="the same command goes on from there"
        )

    def _clock_stops(self, paused: bool) -> None:
        self._trained_ns, self._since_ns = self._trained(), self.parts.platform.boot_ns()
        self.paused = paused
        self.parts.beats.enter("pause" if paused else "other")

    def _rest(self) -> None:
        self._listen()
        if self.paused:
            self.parts.platform.sleep(PAUSE_POLL_S)
        self._step_end_ns = self.parts.platform.boot_ns()

    def _trained(self) -> int:
        return self._trained_ns + (0 if self.paused else self.parts.platform.boot_ns() - self._since_ns)

    def _watch_clock(self) -> None:
        """What time alone decides: rank 0's clock asks, all obey at one step."""
        parts, spec = self.parts, self.parts.spec
        parts.saves.poll()
        self._report_phases_in_time()
        now = parts.platform.boot_ns()
        if not parts.speaks or self.paused:
            return
        if spec.train.minutes_max and self._trained() >= spec.train.minutes_max * 60 * NS:
            parts.orders.wish(Word.FINISH)
        elif self.index >= self.held_until:
            every_s = self._cadence.every_s(parts.saves.costs, now, parts.journal)
            if every_s and now - parts.saves.began_ns >= every_s * NS:
                parts.orders.wish(Word.SAVE)

    # --- saves, evaluations, samples ---------------------------------------------------------------

    def _save(self) -> None:
        with self._aside("save"):
            self.parts.saves.begin(self.state, self._standing())

    def _remember(self) -> None:
        """All ranks have read the same calls by now, so they agree on whether a round begins."""
        begins = self._rounds.begins(self.index, self.parts.orders.ended)
        with self._aside("save"):
            self.parts.saves.remember(self.state, self._standing(), begins)

    def _save_last(self, deadline_s: float) -> int:
        """Waits for the commit of this step. 0: no batch was consumed yet. Raises SaveFailed at the deadline."""
        with self._aside("save"):
            return self.parts.saves.finish(self.state, self._standing(), deadline_s)

    def _standing(self) -> Standing:
        return Standing(self.index, self._trained(), self.windows, self.skips_in_a_row)

    def _evaluate(self, final: bool = False) -> None:
        """Held-out loss and samples: some rows and one sample in the loop, all of them at the end."""
        parts, train = self.parts, self.parts.spec.train
        between: Callable[[], None] = self._hear_stop if final else self._report_phases_in_time
        rows_max, prompts = (0, train.sample_prompts) if final else (train.eval_rows_max, train.sample_prompts[:1])
        with self._aside("eval"):
            records: list[Any] = []
            for store in parts.held_out.stores:
                sums = parts.held_out.sums(self.state.params, store, rows_max, between)
                records.append(sums.record(self.index, store, final))
            records += parts.sampler.records(self.state.params, prompts, self.index, final)
        if parts.speaks:
            for record in records:  # before anything of a later step: retention believes no silence without that
                parts.journal.write(record, durable=record is records[-1])

    @contextmanager
    def _aside(self, phase: str) -> Iterator[None]:
        """Time that belongs to no step: neither to its phase nor to its metrics."""
        with self.parts.beats.during(phase):
            yield
        self._step_end_ns = self.parts.platform.boot_ns()

    # --- records -----------------------------------------------------------------------------------

    def _count(self, flight: Flight, out: Out) -> None:
        """A batch was consumed."""
        parts, now = self.parts, self.parts.platform.boot_ns()
        if flight.command != Command.SKIP:
            self.skips_in_a_row = 0
        seconds, self._step_end_ns = (now - self._step_end_ns) / NS, now
        parts.beats.step_done(int(out.step))
        if parts.speaks:
            parts.journal.write(_step_record(flight.batch, out, seconds, parts))
            self._report_damage(flight)

    def _report_start(self) -> None:
        parts, spec = self.parts, self.parts.spec
        parts.journal.write(TrainerStarted(
            attempt=parts.attempt, rank=parts.rank, parameters=count_parameters(spec.model),
            mesh={axis: size for axis, size in parts.mesh.shape.items() if size > 1},
            attention=spec.train.attention, attention_reason=parts.attention_reason, precision=spec.train.precision,
            peak_flops_per_s=parts.peak_flops_per_s, digest_repeats=self.digest_repeats,
        ))

    def _report_verdict(self, bad: Out, again: Out, used: bool) -> None:
        if self.parts.speaks:
            self.parts.journal.write(GuardVerdict(
                step=self.index, reason=REASONS[Verdict(int(bad.verdict))],
                rerun=rerun_outcome(self.digest_repeats, bad, again),
                policy="used" if used else self.parts.spec.guard.policy,
                digest=int(bad.digest), rerun_digest=int(again.digest), attempt=self.parts.attempt,
            ))

    def _report_damage(self, flight: Flight) -> None:
        for text in flight.batch.damaged:
            self.parts.journal.write(warning({
                "name": StoreDamaged.name, "what": f"a row of batch {flight.index} was passed over", "where": text,
                "fix": "build the store again, or copy it anew; the run counts on with weight 0 in its place",
            }))

    def _report_phases_in_time(self) -> None:
        if self.parts.platform.boot_ns() - self._phases_ns >= PHASES_NS:
            self._report_phases()

    def _report_phases(self) -> None:
        """Into the journal; and a line into the log, so that it grows while all is well."""
        parts = self.parts
        self._phases_ns = parts.platform.boot_ns()
        parts.journal.write(PhaseTotals(attempt=parts.attempt, rank=parts.rank, ns=parts.beats.totals()))
        parts.journal.flush()
        print(f"step {self.index} of {self.end}, {parts.beats.phase}", flush=True)


def _divides(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def rerun_outcome(digest_repeats: bool, bad: Out, again: Out) -> Literal["clean", "same", "different", "unknown"]:
    """What a rerun says. `same`: it is the batch. `clean` (its result is used), `different`: the hardware is suspect.

    `unknown`: this executable does not give one digest twice for one batch, so nothing follows from two.
    """
    if not digest_repeats:
        return "unknown"
    if bad.digest == again.digest:
        return "same"
    return "clean" if again.verdict == Verdict.OK else "different"


def _step_record(batch: Batch, out: Out, seconds: float, parts: Parts) -> StepDone:
    peak = parts.peak_flops_per_s * seconds
    return StepDone(
        step=int(out.step), loss=float(out.loss), bits_per_byte=bits_per_byte(float(out.nll_sum), batch.n_bytes),
        grad_norm=float(out.grad_norm), learning_rate=float(out.learning_rate), tokens=batch.n_tokens, seconds=seconds,
        mfu=step_flops(parts.spec.model, batch) / peak if peak else 0.0,
        update_norm=float(out.update_norm), param_norm=float(out.param_norm),
    )
