"""What a person sees of `packtrain storm-demo`: two runs, and what is done to the second.

`Storm` is what is known, as values; a terminal gets a picture that is redrawn in place, anything else plain lines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packtrain.cli.progress import Progress
from packtrain.cli.screens import Paper, Screen
from packtrain.core.journal import Entry
from packtrain.core.units import NS, duration_text
from packtrain.monitor.incidents import FAULTS, WORLD, Incident, Incidents

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BAR_WIDTH = 36
WAITS, OPEN, HEALED = "·", "●", "✓"
STYLES = {WAITS: "dim", OPEN: "yellow", HEALED: "green"}


@dataclass(frozen=True)
class Blow:
    """What is to break, once this many steps are done."""

    fault: str
    step: int


class Run:
    """One of the two runs. `began_ns`, `ended_ns`: 0: not yet."""

    def __init__(self, name: str, steps: int) -> None:
        self.progress = Progress(name, steps, 0.0)
        self.began_ns = self.ended_ns = 0

    def doing(self, now_ns: int) -> str:
        """In a few words."""
        if not self.began_ns:
            return "waits"
        if self.ended_ns:
            return f"done in {duration_text((self.ended_ns - self.began_ns) / NS)}"
        attempts, measures = self.progress.facts.attempts, self.progress.measures()
        if not attempts:
            return "starting"
        last = attempts[-1]
        if last.ended:
            return f"attempt {last.attempt} ended"
        return f"attempt {last.attempt}, {measures[0]}" if measures else f"attempt {last.attempt} begins"


@dataclass(frozen=True)
class Row:
    """Of the table of blows, as text. `found` and `healed` in brackets: so long so far."""

    mark: str
    step: str
    what: str
    found: str = ""
    healed: str = ""
    remedy: str = ""


class Storm:
    """Everything that is shown."""

    def __init__(self, steps: int, blows: Sequence[Blow]) -> None:
        self.quiet, self.broken = Run("quiet run", steps), Run("storm", steps)
        self.blows, self.incidents = tuple(blows), Incidents()
        self.dealt = 0
        """How many blows were struck; the journal tells of each a moment later."""

    def take(self, run: Run, entries: Sequence[Entry]) -> None:
        for entry in entries:
            run.progress.take(entry)
            if run is self.broken:
                self.incidents.take(entry)

    @property
    def told(self) -> int:
        """Of how many blows that were dealt the journal tells, those that hit nothing included."""
        return sum(one.struck is not None for one in self.incidents.all)

    @property
    def struck(self) -> list[Incident]:
        """What came of the blows that hit something, in their order."""
        return [one for one in self.incidents.all if one.struck is not None and not one.missed]

    @property
    def unplanned(self) -> list[Incident]:
        """Trouble that nobody made here: a machine has its own."""
        return [one for one in self.incidents.all if one.struck is None]

    @property
    def due(self) -> Blow | None:
        """The next blow, when its step is reached and all that came before it is healed."""
        struck = self.struck
        hurt = any(one.healed is None for one in (*struck, *(one for one in self.unplanned if one.part == WORLD)))
        if hurt or len(struck) == len(self.blows) or self.dealt > self.told:
            return None
        blow = self.blows[len(struck)]
        return blow if self.broken.progress.recent and self.broken.progress.step >= blow.step else None

    def rows(self, now_ns: int) -> list[Row]:
        struck = self.struck
        rows = [_row(str(blow.step), one, now_ns) for blow, one in zip(self.blows, struck)]
        rows += [Row(WAITS, str(blow.step), FAULTS[blow.fault]) for blow in self.blows[len(struck):]]
        return rows + [_row("", one, now_ns) for one in self.unplanned]


def _row(step: str, one: Incident, now_ns: int) -> Row:
    start = one.struck or one.found
    so_far = f"({duration_text((now_ns - start.ns) // NS)})" if start is not None and now_ns > start.ns else ""
    found, healed = one.found_s, one.healed_s
    return Row(
        OPEN if one.healed is None else HEALED, step, one.what,
        duration_text(found) if found is not None else "" if one.found is not None else so_far,
        duration_text(healed) if healed is not None else so_far if one.found is not None else "", one.remedy,
    )


class Plain(Paper):
    """A line every ten seconds, and one for each thing that happens to a blow."""

    def __init__(self, storm: Storm, out: Any = None) -> None:
        super().__init__(out)
        self._storm = storm
        self._said: set[str] = set()

    def tick(self, run: Run, now_ns: int) -> None:
        for row in self._storm.rows(now_ns):
            self._news(row)
        if self.due(now_ns):
            progress = run.progress
            self.say(f"{progress.name}: step {progress.step}/{progress.steps}, {run.doing(now_ns)}")

    def _news(self, row: Row) -> None:
        """What is said of a row is said once."""
        if row.mark == WAITS:
            return
        at = f"at step {row.step}" if row.step else "of its own"
        self._once(f"{at}: {row.what}")
        if row.mark == HEALED:
            found = f"found after {row.found}, " if row.found else ""
            self._once(f"{at}: {found}healed after {row.healed or '?'}: {row.remedy}")

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)


class Live(Screen):
    def __init__(self, storm: Storm) -> None:
        super().__init__()
        self._storm = storm

    def tick(self, run: Run, now_ns: int) -> None:
        if self.due(now_ns, now=run.ended_ns > 0):
            self.draw(picture(self._storm, now_ns))


def picture(storm: Storm, now_ns: int) -> RenderableType:
    """Two bars, then a row for each blow."""
    from rich.console import Group
    from rich.padding import Padding

    return Group("", _bars(storm, now_ns), Padding(_table(storm.rows(now_ns)), (1, 0)))


def _bars(storm: Storm, now_ns: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bars = Table.grid(padding=(0, 2))
    for run in (storm.quiet, storm.broken):
        progress = run.progress
        bars.add_row(
            Text(progress.name, style="bold"),
            ProgressBar(
                total=1.0, completed=progress.fraction, width=BAR_WIDTH, complete_style="cyan", finished_style="green"
            ),
            Text(f"{progress.step:,} of {progress.steps:,} steps"), Text(run.doing(now_ns), style="dim"),
        )
    return bars


def _table(rows: Sequence[Row]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("")
    table.add_column("step", justify="right")
    table.add_column("what breaks")
    table.add_column("found", justify="right", no_wrap=True)
    table.add_column("healed", justify="right", no_wrap=True)
    table.add_column("by")
    for row in rows:
        plain = "dim" if row.mark == WAITS else ""
        table.add_row(
            Text(row.mark, style=STYLES[row.mark]), Text(row.step, style="dim"), Text(row.what, style=plain),
            _time(row.found), _time(row.healed), Text(row.remedy, style="dim"),
        )
    return table


def _time(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="dim" if text.startswith("(") else "bold")


@contextmanager
def showing(storm: Storm) -> Iterator[Plain | Live]:
    """A picture on a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        live = Live(storm)
        with live.rich:
            yield live
    else:
        yield Plain(storm)
