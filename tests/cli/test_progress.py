"""What is shown while a run goes on."""

from __future__ import annotations

import io
import math
import pathlib

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from packtrain.cli.bars import Bars
from packtrain.cli.progress import SPARKS, Live, Plain, Progress, sparkline
from packtrain.cli.screens import PLAIN_LINE_NS
from packtrain.core.contract import Beat
from packtrain.core.journal import Entry
from packtrain.core.records import AttemptBegan, EvalDone, Record, SaveDone, StepDone
from packtrain.core.units import NS


def entry(record: Record, s: float = 0.0) -> Entry:
    return Entry(record, "w", "b", round(s * NS), 1)


def step(n: int, seconds: float = 0.1, loss: float = 2.0) -> StepDone:
    return StepDone(
        step=n, loss=loss, bits_per_byte=1.5, grad_norm=1.0, learning_rate=3e-3, tokens=4096, seconds=seconds, mfu=0.41
    )


def trained(steps: int = 900, minutes_max: float = 6.0) -> Progress:
    progress = Progress("first-light", 3400, minutes_max)
    for n in range(1, steps + 1):
        progress.take(entry(step(n, loss=6.0 - n / 300), n / 10))
    progress.take(entry(EvalDone(step=750, store="x", loss=2.0, bits_per_byte=1.71, tokens=5), 80.0))
    progress.take(entry(SaveDone(step=700, commit=3, bytes=66 << 20, stall_s=0.1, write_s=0.1), 82.0))
    progress.beat = Beat(1, 1, 0, 1, "step", steps, {})
    return progress


def test_plain_line() -> None:
    """One line tells step, loss, bits per byte, tokens/s, MFU, phase, held-out figure, last save and time left."""
    assert Plain(trained()).line(90 * NS) == (
        "step 900/3400 | loss 3.032 | 1.500 bits/byte | 40,960 tokens/s | MFU 41.0% | lr 3.00e-03 | training | "
        "held out 1.710 at step 750 | saved step 700 (66.0 MiB, 8.0s ago) | 4m10s left"
    )


def test_plain_line_of_a_run_that_just_began() -> None:
    """What is not known yet is not shown."""
    assert Plain(Progress("x", 10, 0.0)).line(0) == "step 0/10 | starting"


def test_plain_lines_come_every_ten_seconds() -> None:
    """However often it is asked, a log gets a line at most every ten seconds."""
    out = io.StringIO()
    plain = Plain(Progress("x", 10, 0.0), out)
    for second in range(41):
        plain.tick((100 + second) * NS)
    assert out.getvalue().count("\n") == 5 and PLAIN_LINE_NS == 10 * NS


def picture(progress: Progress, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(Live(progress).picture(90 * NS, width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_live_picture() -> None:
    """On a terminal: name, bar, steps and time left; the curve and the measures; what happens now."""
    head, measures, status = picture(trained(), 120)
    assert head.startswith("first-light  ━") and head.endswith("900 of 3,400 steps  4m10s left")
    assert measures.startswith("█") and measures.endswith("MFU 41.0%  lr 3.00e-03")
    assert status == "training  held out 1.710 at step 750  saved step 700 (66.0 MiB, 8.0s ago)"


def test_a_narrow_terminal_has_no_curve() -> None:
    """Where there is no room the curve goes, not the figures."""
    lines = picture(trained(), 90)
    assert len(lines) == 3 and not set(SPARKS) & set("".join(lines))


def test_time_left_is_bounded_by_the_time_the_run_may_take() -> None:
    """The estimate is the pace of the last steps, or the rest of minutes_max where that is less."""
    assert trained(minutes_max=0.0).left_s == 250.0
    assert abs((trained(minutes_max=2.0).left_s or 0.0) - 30.0) < 1e-6


def test_a_new_attempt_starts_with_no_pace() -> None:
    """The pace of the attempt before says nothing about the next one's."""
    progress = trained()
    progress.take(entry(AttemptBegan(attempt=2, commit=4, parent=3, restore_step=700)))
    assert progress.left_s is None and progress.step == 900


def test_a_loss_that_is_no_number_ends_no_display() -> None:
    """NaN and infinity are left out of the curve and of the means; all else is shown as before."""
    assert sparkline([1.0, 2.0, math.nan, math.inf, -math.inf]) == sparkline([1.0, 2.0]) == SPARKS[0] + SPARKS[-1]
    progress = trained()
    shown = picture(progress, 120)[1]
    for n, loss in ((901, math.nan), (902, math.inf), (903, -math.inf)):
        progress.take(entry(step(n, loss=loss)))
    measures = picture(progress, 120)[1]
    assert measures.split()[0] == shown.split()[0] and "loss 3.027" in measures


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 40))
def test_sparkline_fits(values: list[float], width: int) -> None:
    """Whatever the values, the curve is at most as wide as asked and made of its eight marks."""
    line = sparkline(values, width)
    assert len(line) <= width and set(line) <= set(SPARKS)
    assert not line or (len(line) == 1 or line == SPARKS[0] * len(line) or {SPARKS[0], SPARKS[-1]} <= set(line))


def test_bars_without_a_terminal(tmp_path: pathlib.Path) -> None:
    """A stage of a build gives a log a line for each tenth, however often it is reported."""
    out = io.StringIO()
    with Bars(out) as bars:
        bars("list", 0, 0)
        for done in range(1001):
            bars("encode", done, 1000)
    lines = out.getvalue().splitlines()
    assert lines[0] == "encode: 0 of 1k" and lines[-1] == "encode: 1k of 1k" and len(lines) == 11


def test_bars_on_a_terminal() -> None:
    """On a terminal a stage is a bar with its name and count."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with Bars(out) as bars:
        bars("encode", 500, 1000)
    assert "encode" in out.getvalue() and "50%" in out.getvalue()
