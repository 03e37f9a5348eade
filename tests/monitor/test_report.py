"""The fold over a journal and the text made of it."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.journal import Damage, Entry, Journal
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    BroughtBack,
    CarrierGivenUp,
    ErrorSeen,
    EvalDone,
    FaultInjected,
    FaultMissed,
    GuardVerdict,
    HomeBack,
    IntervalChosen,
    MemorySaved,
    MirrorDone,
    NodeDrained,
    OrderGiven,
    PhaseTotals,
    ProfileDone,
    Record,
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
from packtrain.core.units import NS
from packtrain.monitor import drains, incidents
from packtrain.monitor.fold import Facts, failures, fold
from packtrain.monitor.report import Kept, Sources, command_of, read_cards, render, report

GOLDEN = pathlib.Path(__file__).parent / "golden"
STORE = "/data/stores/first-light/held_out"
CARDS = {STORE: {
    "documents": 31, "bytes": 495_616, "xz_files_bits_per_byte": 2.031, "xz_stream_bits_per_byte": 1.512,
}}


def told(*records: tuple[float, Record], boot: str = "b0") -> list[Entry]:
    """Entries of one writer, each at so many seconds after boot."""
    return [Entry(record, "w", boot, round(s * NS), i + 1) for i, (s, record) in enumerate(records)]


def step(n: int, mfu: float = 0.4) -> StepDone:
    return StepDone(
        step=n, loss=5.0 - n / 100, bits_per_byte=2.5 - n / 200, grad_norm=1.0, learning_rate=3e-3, tokens=4096,
        seconds=0.25, mfu=mfu,
    )


def save(n: int, commit: int, error: str = "") -> SaveDone:
    return SaveDone(step=n, commit=commit, bytes=66 << 20, stall_s=0.04, write_s=0.61, error=error)


STARTED = TrainerStarted(
    attempt=1, rank=0, parameters=5_476_352, mesh={}, attention="reference", precision="f32", peak_flops_per_s=2.8e11,
    digest_repeats=True,
)
FIRST = (
    (10.0, RunCreated(run="first-light", spec=1, version="0.1.0")),
    (10.0, AttemptBegan(attempt=1, commit=1, parent=0, restore_step=-1)),
    (22.0, STARTED),
    *((23.0 + n / 4, step(n)) for n in range(1, 101)),
    (48.5, save(100, 2)),
    (48.7, ProfileDone(
        step=60, steps=2, ns={"matmul": 300_000_000, "attention": 120_000_000, "host": 80_000_000, "loss": 0},
        folder="/data/runs/first-light/profile/0001-rank0",
    )),
    (49.0, EvalDone(step=100, store=STORE, loss=3.1, bits_per_byte=1.98, tokens=10_000)),
    (49.5, SampleDone(step=100, prompt="def ", text="f(x):\n\treturn\x1b[31m x", final=False)),
    (50.0, ErrorSeen(severity="error", name="run.stopped_on_request", what="stopped")),
    (50.0, OrderGiven(order=1, word="stop", reason="SIGINT")),
    (50.5, PhaseTotals(attempt=1, rank=0, ns={"init": 6 * NS, "compile": 5 * NS, "step": 25 * NS, "save": NS})),
    (51.0, AttemptEnded(attempt=1, exit_code=75, reason="stopped on request")),
)
SECOND = (
    (60.0, AttemptBegan(attempt=2, commit=3, parent=2, restore_step=100)),
    (69.0, RestoreDone(
        step=100, commit=2, rank=0, ranks=1, source="/data/runs/first-light/checkpoints/step-00000100.a0001.t1",
        reason="the save this attempt begins from", read_bytes=66 << 20, read_bytes_all=66 << 20, sent_bytes=0,
        seconds=0.62,
    )),
    (70.0, STARTED),
    *((70.0 + n / 4, step(100 + n, 0.42)) for n in range(1, 101)),
    (80.0, GuardVerdict(step=150, reason="spike", rerun="same", policy="skip", digest=1, rerun_digest=1)),
    (81.0, ErrorSeen(severity="warning", name="checkpoint.carrier_lost", what="the carrier ended (killed by SIGKILL)")),
    (90.0, save(150, 0, "checkpoint.save_failed")),
    (96.0, save(200, 4)),
    (96.5, RetentionDone(action="purge", folder="step-00000050.a0001.t1", reason="beyond the last 3")),
    (96.6, MirrorDone(mirror="b2", step=150, commit=3, bytes=3_000_000, verified="r")),
    (96.7, MirrorDone(mirror="b2", step=200, commit=4, error="the store hangs")),
    (96.8, BroughtBack(
        mirror="b2", step=150, commit=3, folder="step-00000150.a0002.t1", bytes=3_000_000, seconds=1.0,
    )),
    (96.8, CarrierGivenUp(reason="has a thread that hung in /data for 30 s", quarantine=["/data"])),
    (96.9, HomeBack(path="/data")),
    (97.0, EvalDone(step=200, store=STORE, loss=2.6, bits_per_byte=1.587, tokens=120_000, final=True)),
    (97.0, EvalDone(step=200, store="/stores/news/held_out", loss=3.2, bits_per_byte=1.9, tokens=9_000, final=True)),
    (97.0, SampleDone(step=200, prompt="def ", text="main():\n    pass\n" * 6, final=True)),
    (97.5, SampleDone(step=200, prompt="class ", text="Node:\n    pass", final=True)),
    (98.0, TrainingDone(step=200, updates_skipped=1)),
    (98.0, PhaseTotals(attempt=2, rank=0, ns={"init": 5 * NS, "step": 25 * NS, "eval": 4 * NS, "save": NS // 2})),
    (99.0, AttemptEnded(attempt=2, exit_code=0, reason="done")),
)


def sources(*records: tuple[float, Record], damage: tuple[Damage, ...] = ()) -> Sources:
    return Sources(
        name="first-light", folder="/data/runs/first-light", facts=fold(told(*records)), damage=damage, cards=CARDS,
        recipe="first-light", incidents=incidents.fold(told(*records)),
    )


BROKEN = (
    (24.1, FaultInjected(fault="kill", attempt=1, node="n1", rank=3, seconds=0.0, factor=0.0, by="operator")),
    (24.2, FaultInjected(fault="slow", attempt=1, node="n0", rank=0, seconds=60.0, factor=1 / 0.7, by="storm")),
    (24.3, FaultInjected(fault="cut", attempt=1, node="n\x1b1", rank=-1, seconds=30.0, factor=0.0, by="operator")),
    (24.4, FaultInjected(fault="kill-coordinator", attempt=1, node="", rank=-1, seconds=0.0, factor=0.0, by="storm")),
    (24.5, FaultMissed(fault="corrupt", node="n1", rank=-1, why="there is no\ncheckpoint yet")),
)
CASES = {
    "broken": sources(*FIRST[:8], *BROKEN),
    "done": sources(*FIRST, *SECOND),
    "stopped": sources(*FIRST),
    "cut_off": sources(*FIRST, *SECOND[:41], damage=(Damage("w.0001.jsonl", 4096, 17, "torn_tail"),)),
    "new": sources(),
    "damaged": sources(
        *FIRST[:20], (49.0, RecordsLost(count=3, error="disk full")),
        damage=(Damage("trainer0-n-b0-1.0001.jsonl", 512, 80, "damaged"), Damage("x", 0, 0, "foreign", "not ours")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_report_text(case: str) -> None:
    """The text is the one on record; PACKTRAIN_UPDATE_GOLDEN=1 records what it is now."""
    path, text = GOLDEN / f"{case}.txt", render(CASES[case])
    if os.environ.get("PACKTRAIN_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_seconds_sum_to_the_wall_time() -> None:
    """Phases and what is unreported together are, to the nanosecond, the wall time of the attempts."""
    attempts = fold(told(*FIRST, *SECOND)).attempts
    assert [attempt.wall_ns for attempt in attempts] == [41 * NS, 39 * NS]
    assert sum(sum(a.phases_ns.values()) + a.unreported_ns for a in attempts) == 80 * NS


@given(st.lists(st.sampled_from([*FIRST, *SECOND]), max_size=80))
def test_any_part_of_a_journal_can_be_told(records: list[tuple[float, Record]]) -> None:
    """Whatever is missing from a journal or out of order, a report is made of the rest."""
    text = render(sources(*records))
    assert text.startswith("first-light: ") and text.endswith("\n")


def test_a_sample_cannot_draw_on_the_terminal() -> None:
    """Control characters that a model writes do not reach the terminal."""
    assert "\x1b" not in render(CASES["stopped"])


def test_names_and_reasons_cannot_draw_on_the_terminal() -> None:
    """Neither the reason an attempt ended nor the name of a damaged file brings control characters or lines."""
    ended = (52.0, AttemptEnded(attempt=1, exit_code=1, reason="exit\x1b[2J\ncode"))
    text = render(sources(*FIRST[:-1], ended, damage=(Damage("x\x1b[31m\ny", 0, 0, "foreign", "\x07not\nours"),)))
    assert "\x1b" not in text and "\x07" not in text
    assert "exit[2J code (1)" in text and "x[31m y at 0: foreign, 0 bytes not ours" in text


@pytest.mark.parametrize("card", ["[]", "7", '{"bytes": "many", "xz_files_bits_per_byte": [], "documents": null}'])
def test_a_card_that_is_none_is_left_out(tmp_path: pathlib.Path, card: str) -> None:
    """A card.json with anything else in it costs its own lines only; nor does a journal that cannot be listed raise."""
    (tmp_path / "card.json").write_text(card)
    cards = read_cards(LocalPlatform(), {str(tmp_path)})
    done = EvalDone(step=1, store=str(tmp_path), loss=1.0, bits_per_byte=1.5, tokens=10, final=True)
    text = render(Sources(name="r", folder="/r", facts=fold(told((1.0, done))), cards=cards))
    assert "this model" in text and "xz" not in text
    (tmp_path / "journal").write_text("no folder")
    assert "unreadable" in report(LocalPlatform(), str(tmp_path))


@pytest.mark.parametrize(
    ("asked", "exit_code", "state"),
    [(True, None, "running"), (True, 75, "stopped"), (True, -9, "stopped"), (True, 78, "failed"), (True, 0, "done"),
     (False, 75, "failed"), (False, -9, "failed")],
)
def test_state_of_a_run(asked: bool, exit_code: int | None, state: str) -> None:
    """The state is that of the last attempt: without an end running, stopped where that was asked, else failed."""
    ended = [] if exit_code is None else [(12.0, AttemptEnded(attempt=2, exit_code=exit_code, reason="over"))]
    order = (11.0, OrderGiven(order=1, word="stop", reason="SIGINT"))
    began = [(float(n), AttemptBegan(attempt=n, commit=n, parent=0, restore_step=-1)) for n in (1, 2)]
    first = [began[0], (1.5, order[1]), (1.8, AttemptEnded(attempt=1, exit_code=75, reason="stopped"))]
    assert fold(told(*first, began[1], *([order] if asked else []), *ended)).state == state


def test_a_run_that_goes_back_is_not_done() -> None:
    """A finished run is done until a later attempt than the one that finished begins, in whatever order that is read;
    an older record, which tells of no attempt, stays."""
    done = (20.0, TrainingDone(step=9, updates_skipped=0, attempt=1))
    began = [(n * 10.0, AttemptBegan(attempt=n, commit=n, parent=0, restore_step=-1)) for n in (1, 2, 3)]
    assert fold(told(began[0], done)).state == "done"
    assert fold(told(began[0], done, began[1])).done is None and fold(told(*began[:2], done)).state == "running"
    again = (40.0, TrainingDone(step=9, updates_skipped=0, attempt=2))
    assert fold(told(began[0], done, began[1], again)).done == again[1]
    assert fold(told(began[0], (20.0, TrainingDone(step=9, updates_skipped=0)), began[1])).done is not None


@pytest.mark.parametrize(
    ("asked", "exit_code", "count"),
    [(False, None, 1), (False, 1, 1), (False, 75, 1), (True, 75, 0), (True, -9, 0), (False, 0, 0), (False, 78, 0)],
)
@pytest.mark.parametrize("word", ["stop", "drain"])
def test_what_counts_as_a_failure(word: str, asked: bool, exit_code: int | None, count: int) -> None:
    """An attempt that ended unasked, or has no end, is a failure; one that is done, stopped, drained or refused is
    none. The time of all of them counts."""
    order = [(15.0, OrderGiven(order=1, word=word, reason="SIGINT"))] if asked else []
    end = [] if exit_code is None else [(20.0, AttemptEnded(attempt=1, exit_code=exit_code, reason="over"))]
    began = (10.0, AttemptBegan(attempt=1, commit=1, parent=0, restore_step=-1))
    alive = (20.0, PhaseTotals(attempt=1, rank=0, ns={}))
    assert failures(fold(told(began, *order, alive, *end)).attempts) == (count, 10 * NS)
    assert failures([]) == (0, 0)


def test_the_chosen_interval_is_shown() -> None:
    """The last chosen interval and its reason stand under the saves; without one nothing is said."""
    chosen = [(60.0 + n, IntervalChosen(every_s=n * 600.0, reason=f"reason {n}")) for n in (1, 2)]
    text = render(sources(*FIRST, *chosen))
    assert "  every 20m00s: reason 2\n" in text and "reason 1" not in text
    assert "  every " not in render(sources(*FIRST))


def test_an_attempt_before_another_is_cut_off() -> None:
    """Without a written end an attempt may be running only while none began after it."""
    began = [(n * 10.0, AttemptBegan(attempt=n, commit=n, parent=0, restore_step=-1)) for n in (1, 2)]
    first, second = (line for line in render(sources(*began)).splitlines() if "no end is written" in line)
    assert first.endswith(": cut off") and second.endswith("running, or cut off")


def test_seconds_of_another_boot_are_not_mixed_in() -> None:
    """An attempt whose coordinator died with the machine ends where it was last heard of on its own boot."""
    before = told((10.0, AttemptBegan(attempt=1, commit=1, parent=0, restore_step=-1)), (15.0, step(1)))
    after = told((99.0, step(2)), boot="b1")
    assert fold(before + after).attempts[0].wall_ns == 5 * NS


def test_a_run_folder_is_read(tmp_path: pathlib.Path) -> None:
    """From a real journal, spec and card on disk the report tells recipe, figures, samples and drained nodes."""
    platform = LocalPlatform()
    store = tmp_path / "held_out"
    store.mkdir()
    (store / "card.json").write_text('{"bytes": 1000, "documents": 2, "xz_files_bits_per_byte": 2.0}')
    (tmp_path / "spec").mkdir()
    (tmp_path / "spec" / "0001.toml").write_text('recipe = "rung:10m"\n')
    journal = Journal(platform, str(tmp_path / "journal"))
    for record in (
        AttemptBegan(attempt=1, commit=1, parent=0, restore_step=-1), STARTED, step(1),
        EvalDone(step=1, store=str(store), loss=1.0, bits_per_byte=1.5, tokens=10, final=True),
        NodeDrained(node="n1", by="me", in_world=True),
    ):
        journal.write(record)
    journal.close()
    text = report(platform, str(tmp_path))
    assert "recipe rung:10m" in text and "the model is 25.0% below" in text and "journal: whole" in text
    assert "nodes that were drained\n  n1 (me)" in text


def test_a_folder_with_nothing_in_it_is_told(tmp_path: pathlib.Path) -> None:
    """A run that never began is reported as new."""
    assert ": new, 0 steps" in report(LocalPlatform(), str(tmp_path))


def test_facts_start_empty() -> None:
    """No facts without entries: nothing is made up."""
    assert fold([]) == Facts()


def test_updates_beside_the_weights() -> None:
    """The report tells how far updates go, from the steps that measured it; a run without such steps says nothing."""
    records = [step(n) for n in range(1, 4)]
    entries = told(*((float(n), record) for n, record in enumerate(records)))
    measured = msgspec.structs.replace(records[0], update_norm=0.5, param_norm=200.0)
    line = "an update changes the weights by 0.25% of their norm"
    assert line in render(Sources("n", "f", fold([*told((0.0, measured)), *entries])))
    assert "an update" not in render(Sources("n", "f", fold(entries)))
    endless = msgspec.structs.replace(measured, param_norm=math.inf, update_norm=math.inf)
    assert line in render(Sources("n", "f", fold(told((0.0, endless), (1.0, measured)))))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_result_that_is_no_number(value: float) -> None:
    """Is said to be none: no part of it is shown as a percentage, and what xz reaches still is."""
    done = EvalDone(step=1, store=STORE, loss=value, bits_per_byte=value, tokens=10, final=True)
    text = render(sources((1.0, done)))
    assert "the result is not a number" in text and "2.031" in text
    assert not re.search(r"\b(nan|inf)\b", text)


def test_lists_say_what_they_leave_out() -> None:
    """Of more than eight bad steps, or errors, the last eight are listed and the others are counted."""
    verdicts = [
        GuardVerdict(step=n, reason="nan", rerun="same", policy="skip", digest=1, rerun_digest=1) for n in range(20)
    ]
    for records in (verdicts, [ErrorSeen(severity="warning", name="x", what=f"y{n}") for n in range(20)]):
        assert "  and 12 earlier\n" in render(sources(*((float(n), record) for n, record in enumerate(records))))
        assert "earlier" not in render(sources(*((float(n), record) for n, record in enumerate(records[:8]))))


def test_an_error_is_told_once() -> None:
    """A worker's, and the word of the coordinator that starts it again, are one; how often it came is told with it."""
    first, again, other = (
        ErrorSeen(severity=severity, name="data.damaged", what=what, where="/s")
        for severity, what in (("error", "block 7"), ("warning", "block 7"), ("warning", "block 8"))
    )
    for times, told in ((1, ""), (2, " (2 times)")):
        text = render(sources(*((float(n), record) for n, record in enumerate([*[first, again] * times, other]))))
        told = f"  error [data.damaged] block 7{told}\n  warning [data.damaged] block 8\n"
        assert f"errors and warnings: 2\n{told}" in text


def test_what_is_kept_is_told_by_reason() -> None:
    """A line each, the last twelve steps, the first twelve reasons; nothing where nobody said what is kept."""
    kept = [Kept(90, "one of the\nlast 1"), *(Kept(n, "every step") for n in range(15))]
    text = render(dataclasses.replace(sources(*FIRST), kept=kept))
    assert "checkpoints that are kept\n  one of the last 1: step 90\n"\
        "  every step: steps 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 3 earlier\n\n" in text
    best = [Kept(n, f"number {n} of the 14 best") for n in range(1, 15)]
    text = render(dataclasses.replace(sources(*FIRST), kept=best))
    assert "  number 12 of the 14 best: step 12\n  and for 2 more reasons: packtrain ckpt ls\n\n" in text
    assert "kept" not in render(sources(*FIRST))


def test_a_drained_node_is_told() -> None:
    """Between the attempts and what broke, on one line whatever its name is."""
    records = (*FIRST[:3], (24.0, NodeDrained(node="n\x1b1", by="me\nhere", in_world=True)))
    text = render(dataclasses.replace(sources(*records), drained=drains.fold(told(*records))))
    assert "\n\nnodes that were drained\n  n1 (me here), 14s into attempt 1: nothing followed yet\n\n" in text


def test_memory_is_told() -> None:
    """How often the state was copied into memory and what that cost; and where an attempt began that took it."""
    note = "step 120 from memory: 20 steps newer than the newest on disk"
    copies = [
        (24.0 + n, MemorySaved(
            step=10 * n, bytes=n and 66 << 20, stall_s=n * 0.01, at_peer=n, not_at_peer=n // 3,
        )) for n in range(4)
    ]
    began = (60.0, AttemptBegan(attempt=2, commit=3, parent=2, restore_step=120, note=note))
    text = render(sources(*FIRST[:3], *copies, *FIRST[3:], began))
    assert "  2  from step 120" in text and f"\n       {note}\n" in text
    assert "  3 in memory, 1 skipped; median: the loop waited 0.020 s for 66.0 MiB; 6 went to "\
        "another node, 1 did not arrive\n" in text


def test_a_program_is_told_by_its_command() -> None:
    """Of a program of anybody there are attempts and seconds, and nothing that only a recipe has."""
    entries = told(
        (0.0, RunCreated(run="ddp", spec=1, version="1")),
        (1.0, AttemptBegan(attempt=1, commit=1, parent=0, restore_step=-1)),
        (61.0, AttemptEnded(attempt=1, exit_code=-9, reason="killed")),
        (62.0, AttemptBegan(attempt=2, commit=2, parent=0, restore_step=-1)),
        (92.0, AttemptEnded(attempt=2, exit_code=0, reason="done")),
    )
    text = render(Sources("ddp", "/runs/ddp", fold(entries), command="python ddp.py\x1b[2J out"))
    assert text.startswith("ddp: done, 1m30s over 2 attempts\n  command python ddp.py[2J out")
    assert "\n    1    1m00s  killed (-9)\n    2      30s  done (0)\n" in text
    assert "all attempts" in text
    assert not any(word in text for word in ("recipe", "guard", "step", "fresh", "saves"))


def test_the_command_of_a_spec() -> None:
    """A command is told as a shell takes it; what is no command of a program is none."""
    assert command_of({"kind": "program", "command": ["python", "a b.py"]}) == "python 'a b.py'"
    assert command_of({"recipe": "first-light"}) == command_of({"command": 5}) == ""
