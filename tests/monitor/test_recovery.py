"""What a recovery took, part by part, from journals."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.journal import Entry, Journal
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    AttemptReached,
    OrderGiven,
    Record,
    RunFinished,
    StepDone,
    TrainerStarted,
)
from packtrain.core.units import NS
from packtrain.monitor.recovery import PARTS, UNEXPLAINED, lines, recoveries
from packtrain.monitor.report import as_json, report

Told = tuple[float, str, Record]


def entry(at_s: float, writer: str, record: Record, boot: str = "b", wall_s: float | None = None) -> Entry:
    return Entry(record, writer, boot, round(at_s * NS), 1, wall_s)


def entries(*told: Told) -> list[Entry]:
    return [entry(*one) for one in told]


def step(n: int) -> StepDone:
    return StepDone(
        step=n, loss=1.0, bits_per_byte=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1, seconds=0.5, mfu=0.5
    )


def started(attempt: int, rank: int = 0) -> TrainerStarted:
    return TrainerStarted(
        attempt=attempt, rank=rank, parameters=1, mesh={}, attention="blockwise", precision="f32",
        peak_flops_per_s=1.0, digest_repeats=True,
    )


def began(attempt: int) -> AttemptBegan:
    return AttemptBegan(attempt=attempt, commit=attempt, parent=0, restore_step=-1)


def reached(attempt: int, point: Any, **more: Any) -> AttemptReached:
    return AttemptReached(attempt=attempt, point=point, **more)


FIRST: tuple[Told, ...] = (
    (1.0, "coordinator", began(1)), (1.5, "coordinator", reached(1, "started")), (3.0, "coordinator", reached(1, "go")),
    (4.0, "rank 0 of 1", started(1)), (5.0, "rank 0 of 1", step(1)), (10.0, "rank 0 of 1", step(2)),
)
END: tuple[Told, ...] = (
    (11.0, "coordinator", reached(1, "noticed")),
    (11.5, "coordinator", AttemptEnded(attempt=1, exit_code=-9, reason="killed by SIGKILL")),
)
SECOND: tuple[Told, ...] = (
    (11.75, "coordinator", began(2)), (12.0, "coordinator", reached(2, "started")),
    (14.0, "coordinator", reached(2, "go")), (14.5, "rank 0 of 2", reached(2, "state", rank=0)),
    (15.0, "rank 1 of 2", reached(2, "state", rank=1)), (17.0, "rank 0 of 2", started(2)),
    (17.5, "rank 1 of 2", started(2, rank=1)), (17.75, "rank 0 of 2", step(2)), (18.0, "rank 0 of 2", step(3)),
)


def test_each_part_has_its_time() -> None:
    """From the last step to the next one every part ends with its record, of the slowest rank where all write one; the
    parts are the whole, and nothing is left unexplained."""
    (row,) = recoveries(entries(*FIRST, *END, *SECOND))
    assert (row.attempt, row.next, row.cause, row.step, row.stepped) == (1, 2, "killed by SIGKILL", 2, True)
    assert row.seconds == dict(zip(PARTS, (1.0, 0.5, 0.5, 2.0, 1.0, 2.5, 0.25), strict=True))
    assert row.total_s == 7.75


def test_the_slowest_rank_counts_wherever_it_stands() -> None:
    """Ranks write journals of their own, and those of several machines may be out of order."""
    slow = SECOND[4]
    (row,) = recoveries(entries(*FIRST, *END, *SECOND[:3], slow, SECOND[3], *SECOND[5:]))
    assert (row.seconds["state"], row.seconds["executable"]) == (1.0, 2.5)


def test_a_late_step_belongs_to_its_writers_attempt() -> None:
    """A step has no number of its attempt: one that is written after the next attempt began is none of that."""
    late = (11.8, "rank 0 of 1", step(3))
    (row,) = recoveries(entries(*FIRST, *END, SECOND[0], late, *SECOND[1:]))
    assert (row.step, row.seconds["first step"]) == (3, 0.25)
    assert row.total_s == pytest.approx(18.0 - 0.25 - 11.8)


def test_steps_that_a_dead_rank_did_not_write_down_count() -> None:
    """A killed worker loses the steps of its last second: what its agent heard of the last one is nearer."""
    noticed = (11.0, "coordinator", reached(1, "noticed", since_step_s=0.25))
    (row,) = recoveries(entries(*FIRST, noticed, END[1], *SECOND))
    assert row.seconds["detection"] == 0.25 and row.total_s == 7.0
    for since_s, detection_s in ((9.0, 1.0), (0.0, 0.0)):  # the journal is nearer; at most a second is missing there
        told = (11.0, "coordinator", reached(1, "noticed", since_step_s=since_s))
        (row,) = recoveries(entries(*FIRST, told, END[1], *SECOND))
        assert row.seconds["detection"] == detection_s
    late = ((11.25, "coordinator", reached(1, "noticed", since_step_s=0.0)), END[1])
    (row,) = recoveries(entries(*FIRST, *late, *SECOND))
    assert row.seconds["detection"] == 0.25, "what was heard may have been long under way"


@pytest.mark.parametrize("missing", range(len(FIRST) + len(END) + len(SECOND)))
def test_what_is_missing_is_unexplained(missing: int) -> None:
    """Without one of its records a recovery is as long as before, and the part that cannot be told is named so."""
    records = [one for n, one in enumerate((*FIRST, *END, *SECOND)) if n != missing]
    kinds = [type(record).__name__ for _, _, record in records]
    rows = recoveries(entries(*records))
    if kinds.count("AttemptBegan") < 2 or "AttemptEnded" not in kinds:
        assert rows == []
        return
    (row,) = rows
    assert row.total_s == {5: 12.75, 15: 8.0}.get(missing, 7.75), "without a step its neighbour counts"
    assert set(row.seconds) <= {*PARTS, UNEXPLAINED}


def test_attempts_in_vain_add_up() -> None:
    """Where the second attempt ends before its first step its row ends with what it reached, and the next begins there:
    together they are the time without steps."""
    vain = [one for one in SECOND if one[0] < 17.0]
    third = [(at_s + 10, who.replace("of 2", "of 3"), again(record)) for at_s, who, record in SECOND]
    end = (
        (16.0, "coordinator", reached(2, "noticed")),
        (16.5, "coordinator", AttemptEnded(attempt=2, exit_code=1, reason="it crashed")),
    )
    first, second = recoveries(entries(*FIRST, *END, *vain, *end, *third))
    assert not first.stepped and second.stepped and second.step == -1
    assert first.total_s == 5.0 and second.seconds["detection"] == 1.0
    assert first.total_s + second.total_s == 27.75 - 10.0
    assert "executable" not in first.seconds and UNEXPLAINED not in first.seconds


def test_an_attempt_that_only_began_took_the_time_until_then() -> None:
    """It is the assignment that came no further."""
    end = ((12.5, "coordinator", AttemptEnded(attempt=2, exit_code=1, reason="node n1 was lost")),)
    third = [(at_s + 10, who.replace("of 2", "of 3"), again(record)) for at_s, who, record in SECOND]
    first, second = recoveries(entries(*FIRST, *END, SECOND[0], *end, *third))
    assert first.seconds == {"detection": 1.0, "stop": 0.5, "assignment": 0.25}
    assert first.total_s + second.total_s == 27.75 - 10.0


def again(record: Record) -> Any:
    """The same of the third attempt."""
    return type(record)(**{
        **{name: getattr(record, name) for name in record.__struct_fields__},
        **({"attempt": 3} if hasattr(record, "attempt") else {}),
    })


@pytest.mark.parametrize("over", [
    (12.0, "coordinator", RunFinished(exit_code=75, reason="stopped on request")),
    (0.0, "", OrderGiven(order=1, word="stop", reason="SIGINT")),
])
def test_a_run_that_was_stopped_does_not_recover(over: Told) -> None:
    """What a person stopped and started again days later is no recovery; nor in journals older than these records."""
    told = [*FIRST, *END, over] if over[0] else [*FIRST, (10.5, "foreground", over[2]), END[1]]
    assert recoveries(entries(*told, *SECOND)) == []


def test_a_planned_change_is_told_too() -> None:
    """Steps go on after a node's drain is known: nothing is detected, and the last save belongs to the stop."""
    noticed = (9.0, "coordinator", reached(1, "noticed"))
    ended = (11.5, "coordinator", AttemptEnded(attempt=1, exit_code=75, reason="node n1 is drained"))
    (row,) = recoveries(entries(*FIRST, noticed, ended, *SECOND))
    assert (row.seconds["detection"], row.seconds["stop"]) == (0.0, 1.5)
    drained = (8.5, "coordinator", OrderGiven(order=1, word="drain", reason="node n1 is drained"))
    assert recoveries(entries(*FIRST, drained, noticed, ended, *SECOND)) == [row], "an order that the run goes on after"


def test_a_program_that_tells_no_steps() -> None:
    """Of a program of anybody it is told how long its end and its next start took, from when the end was known."""
    told = [one for one in (*FIRST, *END, *SECOND) if "rank" not in one[1] and getattr(one[2], "point", "") != "go"]
    (row,) = recoveries(entries(*told))
    assert row.seconds == {"detection": 0.0, "stop": 0.5, "assignment": 0.5} and not row.stepped


def test_clocks_of_two_machines() -> None:
    """Boots of two machines are laid side by side by their dates; where these contradict each other nothing takes less
    than no time, and the sum stays whole."""
    for skew_s in (0.0, 0.75, -30.0):
        far = [
            entry(at_s + 1000, who, record, "far", 500.0 + at_s + skew_s) if "rank" in who
            else entry(at_s, who, record, "b", 500.0 + at_s)
            for at_s, who, record in (*FIRST, *END, *SECOND)
        ]
        (row,) = recoveries(far)
        assert min(row.seconds.values()) >= 0.0 and set(row.seconds) == set(PARTS)
        assert row.total_s == 7.75
        assert skew_s or row.seconds["init"] == 2.0


@given(st.permutations([*FIRST, *END, *SECOND]), st.integers(0, 17))
def test_any_part_of_a_journal_gives_rows(records: list[Told], count: int) -> None:
    """Whatever is missing or out of order: no part is negative, and the lines can be made."""
    for row in recoveries(entries(*records[:count])):
        assert min(row.seconds.values(), default=0.0) >= 0.0
        list(lines([row, row]))


def test_the_table() -> None:
    """A line for each of the last eight, how many are left out, and medians; a part that nobody knows is a dash."""
    (row,) = recoveries(entries(*FIRST, *END, *SECOND))
    (blind,) = recoveries(entries(*[one for one in (*FIRST, *END, *SECOND) if one[2] != SECOND[2][2]]))
    told = list(lines([row] * 9 + [blind]))
    assert told[1].split()[:3] == ["attempts", "detection", "stop"] and told[1].endswith("unexplained  together  why")
    assert len(told) == 2 + 8 + 2 and told[-2] == "  and 2 earlier"
    assert told[2].split()[3:12] == ["1.00", "0.50", "0.50", "2.00", "1.00", "2.50", "0.25", "-", "7.75"]
    assert "3.00" in told[-3] and "-" in told[-3].split() and told[-1].split()[0] == "median"
    assert list(lines([])) == []
    vain = dataclasses.replace(row, stepped=False)
    assert not [line for line in lines([row, vain]) if "median" in line], "of what led to a step"


def test_the_report_and_its_json(tmp_path: pathlib.Path) -> None:
    """From a journal on disk the text has the table and the JSON its rows, seconds by part and together."""
    platform = LocalPlatform()
    coordinator, first, second = (
        Journal(platform, str(tmp_path / "journal"), role=role) for role in ("coordinator", "trainer", "trainer")
    )
    writers = {"coordinator": coordinator, "rank 0 of 1": first, "rank 0 of 2": second}
    for _, who, record in (*FIRST, *END, *SECOND):
        if who in writers:
            writers[who].write(record, durable=True)
    assert "recoveries: seconds from the last step before an end to the next one\n" in report(platform, str(tmp_path))
    told = json.loads(as_json(platform, str(tmp_path)))
    (row,) = told["recoveries"]
    assert (told["state"], told["attempts"], row["cause"]) == ("running", 2, "killed by SIGKILL")
    assert list(row["seconds"]) == list(PARTS) and row["together_s"] == pytest.approx(sum(row["seconds"].values()))
