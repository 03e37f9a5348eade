"""What a person sees while a run goes on: a few live lines on a terminal, a plain line every ten seconds elsewhere.

The same facts that a report folds feed it, and beats for what is happening right now. It only ever shows.
"""

from __future__ import annotations

import math
import statistics
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from packtrain.cli.screens import Paper, Screen
from packtrain.core.contract import Beat
from packtrain.core.journal import Entry
from packtrain.core.records import AttemptBegan, ProfileDone, SaveDone, StepDone
from packtrain.core.units import NS, bytes_text, duration_text
from packtrain.monitor.fold import Facts
from packtrain.monitor.report import profile

if TYPE_CHECKING:
    from rich.console import RenderableType

SPARK_FROM_WIDTH = 100
"""Columns a terminal needs before the curve of the loss has room."""
RECENT_STEPS = 20
"""Rates are means over this many steps."""
SPARK_WIDTH = 32
SPARKS = "▁▂▃▄▅▆▇█"
DOING = {
    "init": "starting", "compile": "compiling", "restore": "restoring", "data": "waiting for data", "step": "training",
    "rerun": "running a batch again", "save": "saving", "eval": "evaluating", "pause": "paused",
    "other": "between steps",
}


class Progress:
    """What is shown, as values; both displays draw from it."""

    def __init__(self, name: str, steps: int, minutes_max: float) -> None:
        self.name, self.steps, self.minutes_max = name, steps, minutes_max
        self.facts = Facts()
        self.beat: Beat | None = None
        self.losses: deque[float] = deque(maxlen=2048)
        self.recent: deque[StepDone] = deque(maxlen=RECENT_STEPS)
        self.trained_s = 0.0
        self.saved_ns = 0

    def take(self, entry: Entry) -> None:
        self.facts.take(entry)
        record = entry.record
        if isinstance(record, StepDone):
            self.losses.append(record.loss)
            self.recent.append(record)
            self.trained_s += record.seconds
            self.facts.steps = self.facts.steps[-1:]  # a display needs the last one; the report reads them all
            self.facts.remembered.clear()
        elif isinstance(record, AttemptBegan):
            self.recent.clear()
        elif isinstance(record, SaveDone) and record.commit:
            self.saved_ns = entry.ns

    @property
    def step(self) -> int:
        return self.recent[-1].step if self.recent else max(self.facts.step, self.beat.step if self.beat else 0)

    @property
    def step_s(self) -> float:
        return statistics.fmean(step.seconds for step in self.recent) if self.recent else 0.0

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(step.seconds for step in self.recent)
        return sum(step.tokens for step in self.recent) / seconds if seconds else 0.0

    @property
    def mfu(self) -> float:
        return statistics.fmean(step.mfu for step in self.recent) if self.recent else 0.0

    @property
    def left_s(self) -> float | None:
        """By the pace of the last steps, or until the run's time is up; None: not known yet."""
        if not self.recent:
            return None
        left_s = (self.steps - self.step) * self.step_s
        return max(0.0, min(left_s, self.minutes_max * 60 - self.trained_s) if self.minutes_max else left_s)

    @property
    def fraction(self) -> float:
        """Of the steps, or of the time the run may take, whichever is further."""
        by_time = self.trained_s / (self.minutes_max * 60) if self.minutes_max else 0.0
        return min(1.0, max(self.step / self.steps, by_time))

    @property
    def doing(self) -> str:
        return DOING[self.beat.phase] if self.beat else "starting"

    def measures(self) -> list[str]:
        """loss, bits per byte, speed: what is known of them."""
        if not self.recent:
            return []
        last, parts = self.recent[-1], []
        parts.append(f"loss {_mean(step.loss for step in self.recent):.3f}")
        parts.append(f"{_mean(step.bits_per_byte for step in self.recent):.3f} bits/byte")
        parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        parts.append(f"MFU {self.mfu:.1%}" if self.mfu else "MFU unknown")
        parts.append(f"lr {last.learning_rate:.2e}")
        return parts

    def status(self, now_ns: int) -> list[str]:
        """What happens now, the last held-out figure, the last save."""
        parts = [self.doing]
        held_out = self.facts.final_evals()
        if held_out:
            figures = ", ".join(f"{record.bits_per_byte:.3f}" for record in held_out)  # one for each store
            parts.append(f"held out {figures} at step {held_out[-1].step}")
        saves = self.facts.published()
        if saves:
            ago = f", {duration_text((now_ns - self.saved_ns) / NS)} ago" if now_ns > self.saved_ns else ""
            parts.append(f"saved step {saves[-1].step} ({bytes_text(saves[-1].bytes)}{ago})")
        parts += [f"{name} has step {done.step}" for name, done in sorted(self.facts.mirrored.items())]
        return parts

    def left(self) -> str:
        left_s = self.left_s
        return f"{duration_text(left_s)} left" if left_s else ""


def _mean(values: Iterable[float]) -> float:
    """Of the finite ones; NaN where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The shape of a series in `width` characters, each the mean of its share; NaN and infinity have no height."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


class _Fed(ABC):
    """What both displays are fed with."""

    progress: Progress

    def entries(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.progress.take(entry)
            if isinstance(entry.record, ProfileDone):
                self.say("\n".join(profile(entry.record)))

    @abstractmethod
    def say(self, text: str) -> None: ...

    def beat(self, beat: Beat) -> None:
        self.progress.beat = beat


class Plain(Paper, _Fed):
    """A line every ten seconds and one for each thing said."""

    def __init__(self, progress: Progress, out: Any = None) -> None:
        super().__init__(out)
        self.progress = progress

    def tick(self, now_ns: int) -> None:
        if self.due(now_ns):
            self.say(self.line(now_ns))

    def line(self, now_ns: int) -> str:
        shown = self.progress
        parts = [f"step {shown.step}/{shown.steps}", *shown.measures(), *shown.status(now_ns), shown.left()]
        return " | ".join(part for part in parts if part)


class Live(Screen, _Fed):
    """A bar and two lines."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def tick(self, now_ns: int) -> None:
        if self.due(now_ns):
            self.draw(self.picture(now_ns, self._console.width))

    def picture(self, now_ns: int, width: int) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        shown = self.progress
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(shown.name, style="bold"),
            ProgressBar(total=1.0, completed=shown.fraction, width=36, complete_style="cyan", finished_style="green"),
            Text(f"{shown.step:,} of {shown.steps:,} steps"), Text(shown.left(), style="bold"),
        )
        spark = sparkline(list(shown.losses)) if width >= SPARK_FROM_WIDTH else ""
        measures = Text("  ".join(part for part in (spark, *shown.measures()) if part))
        measures.stylize("cyan", 0, len(spark))
        status = Text("  ".join(shown.status(now_ns)), style="dim")
        return Group(head, *(line for line in (measures, status) if line.plain))


@contextmanager
def watching(name: str, steps: int, minutes_max: float) -> Iterator[Plain | Live]:
    """A live display on a terminal, plain lines elsewhere."""
    progress = Progress(name, steps, minutes_max)
    if sys.stdout.isatty():
        live = Live(progress)
        with live.rich:
            yield live
    else:
        yield Plain(progress)
