"""`packtrain report RUN`: what happened in a run, as a short text. A pure function of facts and cards.

In: the journal's facts and damage, the held-out stores' cards, the spec's recipe.     Out: text.
What is not known is said to be so; seconds that nobody reported are shown, so that the sum is the wall time.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import statistics
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.core.errors import StoppedOnRequest
from packtrain.core.journal import UNREADABLE, Damage, Reading, read_folder
from packtrain.core.platform import Platform
from packtrain.core.records import ErrorSeen, EvalDone, ProfileDone, RestoreDone, StepDone
from packtrain.core.units import NS, bytes_text, count_text, duration_text
from packtrain.monitor import drains, incidents, recovery
from packtrain.monitor.drains import Drain
from packtrain.monitor.fold import Attempt, Facts, fold
from packtrain.monitor.incidents import Incident
from packtrain.monitor.recovery import Recovery, recoveries

ERRORS_SHOWN = 8
KEPT_SHOWN = 12
SAMPLES_SHOWN = 3
SAMPLE_LINES_MAX = 8
XZ = (("xz -9e, file by file", "xz_files_bits_per_byte"), ("xz -9e, one stream", "xz_stream_bits_per_byte"))
FIGURES = ("bytes", "documents", *(key for _, key in XZ))
Cards = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Kept:
    """A checkpoint that stays, and one of the reasons why, in words."""

    step: int
    why: str


@dataclass(frozen=True)
class Sources:
    """Everything a report is made of."""

    name: str
    folder: str
    facts: Facts
    damage: tuple[Damage, ...] = ()
    recovered: tuple[Recovery, ...] = ()
    cards: Cards | None = None
    """Held-out store -> its card; absent where it cannot be read."""
    recipe: str = ""
    command: str = ""
    """Of a run that keeps a program of anybody alive; it has no recipe."""
    incidents: Sequence[Incident] = ()
    drained: Sequence[Drain] = ()
    kept: Sequence[Kept] = ()


def report(platform: Platform, run_folder: str, kept: Sequence[Kept] = ()) -> str:
    """Read the run folder and tell. Unreadable cards are left out; a damaged journal is read as far as it goes. `kept`:
    what retention keeps, from whoever may ask it."""
    return render(dataclasses.replace(gather(platform, run_folder), kept=kept))


def as_json(platform: Platform, run_folder: str) -> str:
    """For programs: how the run stands, and what each recovery took; seconds by part, and their sum."""
    sources = gather(platform, run_folder)
    rows = [
        {**dataclasses.asdict(row), "together_s": row.total_s} for row in sources.recovered
    ]
    told = {
        "run": sources.name, "folder": sources.folder, "state": sources.facts.state, "step": sources.facts.step,
        "attempts": len(sources.facts.attempts), "recoveries": rows,
    }
    return json.dumps(told, indent=2) + "\n"


def gather(platform: Platform, run_folder: str) -> Sources:
    reading = read_journal(platform, f"{run_folder}/journal")
    facts = fold(reading.entries)
    spec = read_spec(platform, run_folder)
    return Sources(
        name=os.path.basename(run_folder.rstrip("/")), folder=run_folder, facts=facts, damage=tuple(reading.damage),
        recovered=tuple(recoveries(reading.entries)),
        cards=read_cards(platform, {record.store for record in facts.evals}),
        recipe=str(spec.get("recipe", "unknown")), command=command_of(spec),
        incidents=incidents.fold(reading.entries), drained=drains.fold(reading.entries),
    )


def read_journal(platform: Platform, folder: str) -> Reading:
    """All there is; a folder that cannot be listed is damage, and no reason to tell nothing."""
    try:
        return read_folder(platform, folder)
    except OSError as error:
        return Reading([], [Damage("journal", 0, 0, UNREADABLE, str(error))])


def read_spec(platform: Platform, run_folder: str) -> dict[str, Any]:
    """The run's first spec as plain values; empty where it cannot be read (a report must not fail for it)."""
    try:
        return tomllib.loads(platform.read(f"{run_folder}/spec/0001.toml").decode())
    except (OSError, ValueError):
        return {}


def command_of(spec: Mapping[str, Any]) -> str:
    """The command that a spec keeps alive, as a shell takes it; empty: it trains a recipe."""
    words = spec.get("command", ())
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def read_cards(platform: Platform, stores: set[str]) -> dict[str, Any]:
    """Cards as plain values; what is no card, and figures in it that are no numbers, are left out."""
    cards = {}
    for store in stores:
        try:
            card = json.loads(platform.read(f"{store}/card.json"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(card, dict):
            cards[store] = {key: value for key, value in card.items() if key not in FIGURES or _is_number(value)}
    return cards


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 60


def render(sources: Sources) -> str:
    """The whole text, sections separated by blank lines."""
    facts, command = sources.facts, sources.command
    sections = [
        _outcome(sources), list(held_out(facts, sources.cards or {})), _speed(facts),
        *(profile(record) for record in facts.profiles[-1:]), _attempts(facts, command),
        [one_line(line) for line in drains.lines(sources.drained)],
        [one_line(line) for line in incidents.lines(sources.incidents)],
        [one_line(line) for line in recovery.lines(sources.recovered)], seconds(facts),
        _saves(facts, command), list(_kept(sources.kept)), _trouble(facts, command), _journal(sources.damage, facts),
        list(samples(facts)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _outcome(sources: Sources) -> list[str]:
    facts = sources.facts
    wall_s = sum(attempt.wall_ns for attempt in facts.attempts) / NS
    about = [f"command {one_line(sources.command)}" if sources.command else f"recipe {sources.recipe}"]
    if facts.started is not None:
        about.append(f"{count_text(facts.started.parameters)} parameters, {facts.started.precision}")
        about.append(f"{facts.started.attention} attention")
    if facts.version:
        about.append(f"packtrain {facts.version}")
    over = counted(len(facts.attempts), "attempt")
    steps = "" if sources.command else f"{facts.step} steps in "
    return [
        f"{sources.name}: {facts.state}, {steps}{duration_text(wall_s)} over {over}",
        f"  {' · '.join(about)}", f"  {sources.folder}",
    ]


# --- how good it is --------------------------------------------------------------------------------


def held_out(facts: Facts, cards: Cards) -> Iterator[str]:
    """Bits per byte of each held-out store beside xz on the same bytes, and perplexity; lower is better."""
    for record in facts.final_evals():
        card = cards.get(record.store, {})
        partly = "" if record.final else f", partly, at step {record.step}"
        yield f"held out {store_name(record.store)}{partly}: bits per byte, lower is better"
        yield _this_model(record)
        for label, key in XZ:
            yield from _beside(label, card.get(key), record)
        if "bytes" in card:
            yield f"  {bytes_text(card['bytes'])} in {card.get('documents', '?')} documents that training never saw"


def _this_model(record: EvalDone) -> str:
    if not math.isfinite(record.bits_per_byte):
        return f"  {'this model':<24}{bits_text(record)}: its weights or its scores are NaN or infinite"
    return f"  {'this model':<24}{record.bits_per_byte:7.3f}  perplexity {perplexity(record.loss):.4g} a token"


def bits_text(record: EvalDone) -> str:
    """As in `1.587 bits/byte`; a result that is none is said to be so."""
    finite = math.isfinite(record.bits_per_byte)
    return f"{record.bits_per_byte:.3f} bits/byte" if finite else "the result is not a number"


def store_name(path: str) -> str:
    """The last two parts of a store's path: of `.../first-light/held_out` the second alone would name every store."""
    return one_line("/".join(path.rstrip("/").split("/")[-2:]))


def perplexity(loss: float) -> float:
    """exp of nats a token; infinity where that is more than a float holds."""
    return math.exp(loss) if loss < 700 else math.inf


def _beside(label: str, theirs: float | None, record: EvalDone) -> Iterator[str]:
    if theirs:
        part = record.bits_per_byte / theirs - 1
        yield f"  {label:<24}{theirs:7.3f}  {_relation(part) if math.isfinite(part) else ''}".rstrip()


def _relation(part: float) -> str:
    return f"the model is {abs(part):.1%} {'below' if part < 0 else 'above'}"


def samples(facts: Facts) -> Iterator[str]:
    """The last samples, whole lines only up to a bound; model text is hostile text, so only what prints is shown."""
    chosen = [sample for sample in facts.samples if sample.final][-SAMPLES_SHOWN:] or facts.samples[-1:]
    for n, sample in enumerate(chosen):
        same = n > 0 and sample.step == chosen[n - 1].step
        yield "" if same else f"text it writes at step {sample.step}"
        lines = printable(sample.prompt + sample.text).splitlines() or [""]
        yield from (f"  | {line}" for line in lines[:SAMPLE_LINES_MAX])
        if len(lines) > SAMPLE_LINES_MAX:
            yield "  | ..."


def counted(n: int, noun: str) -> str:
    """`0` -> `no attempts`, `1` -> `1 attempt`, `2` -> `2 attempts`."""
    return f"{n or 'no'} {noun}{'' if n == 1 else 's'}"


def one_line(text: str) -> str:
    """What prints of a foreign text, on one line."""
    return printable(text).replace("\n", " ")


def printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else "" for c in text)


# --- how it went -----------------------------------------------------------------------------------


def tokens_per_s(steps: list[StepDone]) -> float:
    """Median over steps; 0 when there are none."""
    rates = [step.tokens / step.seconds for step in steps if step.seconds > 0]
    return statistics.median(rates) if rates else 0.0


def _speed(facts: Facts) -> list[str]:
    if not facts.steps:
        return []
    peak = facts.started.peak_flops_per_s if facts.started else 0.0
    of = f" of a measured {count_text(peak / 1e9)} GFLOP/s" if peak else ""
    mfu = statistics.median(step.mfu for step in facts.steps)
    return [
        "speed, medians over steps",
        f"  {tokens_per_s(facts.steps):,.0f} tokens/s · MFU {mfu:.1%}{of} · "
        f"{count_text(sum(step.tokens for step in facts.steps))} tokens", *_movement(facts.steps),
    ]


def _movement(steps: list[StepDone]) -> list[str]:
    """How far updates go beside the weights they change."""
    shares = [step.update_norm / step.param_norm for step in steps if step.update_norm > 0 and step.param_norm > 0]
    percents = [100 * share for share in shares if math.isfinite(share)]
    return [f"  an update changes the weights by {statistics.median(percents):.2g}% of their norm"] if percents else []


def profile(record: ProfileDone) -> list[str]:
    """Where a step's time went, the largest part first; the parts are the whole."""
    total_ns = sum(record.ns.values()) or 1
    steps = max(record.steps, 1)
    rows = sorted(((kind, ns) for kind, ns in record.ns.items() if ns), key=lambda row: -row[1])
    return [
        f"where a step's time went: mean of {counted(record.steps, 'traced step')} up to step {record.step}",
        *(f"  {kind:<12}{ns / steps / NS:>10.4f} s {ns / total_ns:>6.1%}" for kind, ns in rows),
        f"  {'a step':<12}{total_ns / steps / NS:>10.4f} s",
        f"  trace for TensorBoard and Perfetto: {one_line(record.folder)}",
    ]


def _attempts(facts: Facts, command: str) -> list[str]:
    """What a program restores, and how far it gets, is its own affair."""
    if not facts.attempts:
        return []
    lines = ["attempts"]
    for one in facts.attempts:
        where = f"{one.attempt:>3}  " if command else _way(one)
        lines.append(f"  {where}{_end(one, one is facts.attempts[-1])}")
        lines += [f"       {one_line(one.note)}"] if one.note else []
        lines += [f"       {_restored(one.restored)}"] if one.restored else []
    return lines


def _restored(ranks: Sequence[RestoreDone]) -> str:
    """What the ranks of an attempt read together, from where, and how long the slowest of them took."""
    first = ranks[0]
    seconds, read = max(rank.seconds for rank in ranks), bytes_text(first.read_bytes_all)
    return f"read {read} in {seconds:.1f} s from {one_line(first.source)}: {one_line(first.reason)}"


def _way(attempt: Attempt) -> str:
    """From where to where it got."""
    start = "fresh" if attempt.restore_step < 0 else f"from step {attempt.restore_step}"
    reached = f"to step {attempt.step}" if attempt.step >= 0 else "no step"
    return f"{attempt.attempt:>3}  {start:<14} {reached:<13} "


def _end(attempt: Attempt, last: bool) -> str:
    """How long it took and how it ended. Where another attempt began after it, it is over, written down or not."""
    end = "no end is written: running, or cut off" if last else "no end is written: cut off"
    if attempt.ended:
        end = f"{one_line(attempt.reason)} ({attempt.exit_code})"
    return f"{duration_text(attempt.wall_ns / NS):>7}  {end}"


def seconds(facts: Facts) -> list[str]:
    """Phases of rank 0 over all attempts, and what no phase accounts for: together the attempts' wall time."""
    wall_ns = sum(attempt.wall_ns for attempt in facts.attempts)
    if not wall_ns:
        return []
    phases: dict[str, int] = {}
    for attempt in facts.attempts:
        for phase, ns in attempt.phases_ns.items():
            phases[phase] = phases.get(phase, 0) + ns
    rows = sorted(phases.items(), key=lambda item: -item[1])
    rows.append(("unreported", sum(attempt.unreported_ns for attempt in facts.attempts)))
    lines = [f"  {name:<12}{ns / NS:>10.1f}  {ns / wall_ns:>6.1%}" for name, ns in rows if ns]
    return ["seconds by phase", *lines, f"  {'all attempts':<12}{wall_ns / NS:>10.1f}"]


def _saves(facts: Facts, command: str) -> list[str]:
    """Those of a program that keeps its own are not ours to count."""
    if not facts.saves and command:
        return []
    if not facts.saves:
        return ["saves", "  none", *_remembered(facts)]
    published, failed = facts.published(), len(facts.saves) - len(facts.published())
    lines = [f"  {len(published)} published, {failed} failed"]
    if published:
        last = published[-1]
        stall_s = statistics.median(save.stall_s for save in published)
        write_s = statistics.median(save.write_s for save in published)
        lines.append(f"  last: step {last.step}, commit {last.commit}, {bytes_text(last.bytes)}")
        lines.append(f"  medians: the loop waited {stall_s:.3f} s, written in {write_s:.2f} s")
    lines += _remembered(facts)
    if facts.interval is not None:
        lines.append(f"  every {duration_text(facts.interval.every_s)}: {one_line(facts.interval.reason)}")
    purged = sum(record.action == "purge" for record in facts.retained)
    if purged:
        lines.append(f"  {counted(purged, 'older one')} purged")
    for name, done in sorted(facts.mirrored.items()):
        lines.append(f"  on mirror {printable(name)}: step {done.step}, {bytes_text(done.bytes)} verified there")
    for back in facts.brought_back[-ERRORS_SHOWN:]:
        lines.append(f"  step {back.step} was deleted from outside and is back, from mirror {printable(back.mirror)}")
    return ["saves", *lines, *_hung(facts)]


def _kept(kept: Sequence[Kept]) -> Iterator[str]:
    """A line for each reason, with the last steps it keeps."""
    steps: dict[str, list[int]] = {}
    for one in kept:
        steps.setdefault(one.why, []).append(one.step)
    if steps:
        yield "checkpoints that are kept"
    for why, of_it in [*steps.items()][:KEPT_SHOWN]:
        told = ", ".join(map(str, of_it[-KEPT_SHOWN:]))
        more = f" and {len(of_it) - KEPT_SHOWN} earlier" if len(of_it) > KEPT_SHOWN else ""
        yield f"  {one_line(why)}: {'step' if len(of_it) == 1 else 'steps'} {told}{more}"
    if len(steps) > KEPT_SHOWN:
        yield f"  and for {counted(len(steps) - KEPT_SHOWN, 'more reason')}: packtrain ckpt ls"


def _hung(facts: Facts) -> Iterator[str]:
    """Carriers that were given up, and the homes of saves they hung in."""
    for one in facts.given_up[-ERRORS_SHOWN:]:
        left = f"; left alone: {one_line(', '.join(one.quarantine))}" if one.quarantine else ""
        whose = f" of node {one_line(one.node)}" if one.node else ""
        yield f"  a carrier{whose} was given up, it {one_line(one.reason)}{left}"
    for home in facts.homes_back[-ERRORS_SHOWN:]:
        yield f"  saves may go to {one_line(home.path)} again, it answers"


def _remembered(facts: Facts) -> list[str]:
    """Of the copies in memory."""
    copies = [copy for copy in facts.remembered if copy.bytes]
    if not facts.remembered:
        return []
    told = f"{len(copies)} in memory, {len(facts.remembered) - len(copies)} skipped"
    if copies:
        stall_s = statistics.median(copy.stall_s for copy in copies)
        told += f"; median: the loop waited {stall_s:.3f} s for {bytes_text(copies[-1].bytes)}"
    sent, lost = (sum(getattr(copy, name) for copy in facts.remembered) for name in ("at_peer", "not_at_peer"))
    if sent or lost:
        told += f"; {sent} went to another node, {lost} did not arrive"
    return [f"  {told}"]


def _trouble(facts: Facts, command: str) -> list[str]:
    """A program of anybody has no guard."""
    lines = [] if command else [f"guard: {counted(len(facts.verdicts), 'bad step')}"]
    for verdict in facts.verdicts[-ERRORS_SHOWN:]:
        lines.append(f"  step {verdict.step}: {verdict.reason}, rerun {verdict.rerun}, {verdict.policy}")
    lines += _earlier(len(facts.verdicts))
    errors = _distinct([error for error in facts.errors if error.name != StoppedOnRequest.name])
    lines.append(f"errors and warnings: {len(errors) or 'none'}")
    for error, times in errors[-ERRORS_SHOWN:]:
        again = f" ({times} times)" if times > 1 else ""
        lines.append(f"  {error.severity} [{error.name}] {printable(error.what)}{again}")
    return lines + _earlier(len(errors))


def _distinct(errors: Sequence[ErrorSeen]) -> list[tuple[ErrorSeen, int]]:
    """Each once, at its last place, and how often it was seen. What a worker ended with is told as a warning once more
    by the coordinator, which starts it again: that is no second time."""
    times = Counter(errors)
    found: dict[tuple[str, str, str], tuple[ErrorSeen, int]] = {}
    for error in errors:
        key = error.name, error.what, error.where
        last, most = found.pop(key, (error, 0))
        found[key] = (last if last.severity == "error" else error), max(most, times[error])
    return list(found.values())


def _earlier(count: int) -> list[str]:
    """How many the list leaves out, where it does."""
    return [f"  and {count - ERRORS_SHOWN} earlier"] if count > ERRORS_SHOWN else []


def _journal(damage: tuple[Damage, ...], facts: Facts) -> list[str]:
    alarming = [item for item in damage if item.alarming]
    torn = len(damage) - len(alarming)
    if not alarming and not facts.records_lost:
        return ["journal: whole" + (f", {counted(torn, 'torn last line')} of killed writers" if torn else "")]
    lost = counted(facts.records_lost, "record")
    lines = [f"journal: DAMAGED in {counted(len(alarming), 'place')}, {lost} lost by writers"]
    for item in alarming[:ERRORS_SHOWN]:
        where = f"{one_line(item.file)} at {item.offset}"
        lines.append(f"  {where}: {item.reason}, {item.length} bytes {one_line(item.detail)}".rstrip())
    return lines
