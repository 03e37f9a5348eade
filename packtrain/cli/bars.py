"""Progress of stages with a known length: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from packtrain.core.units import count_text


class Bars:
    """Progress of named stages of known length. `text`: how an amount is written."""

    def __init__(self, out: Any = None, text: Callable[[float], str] = count_text) -> None:
        self._out, self._text = out or sys.stdout, text
        self._stage = ""
        self._tenth = -1
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        if self._out.isatty():
            from rich import progress as rich
            from rich.console import Console

            self._bars = rich.Progress(
                rich.TextColumn("{task.description:<20}"), rich.BarColumn(bar_width=36), rich.TaskProgressColumn(),
                rich.TextColumn("{task.fields[done]}"), rich.TimeRemainingColumn(),
                console=Console(file=self._out),
            )
            self._bars.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._bars is not None:
            self._bars.__exit__(*exc)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Called by the build; `total` 0: not known."""
        if self._bars is None:
            self._plain(stage, done, total)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None, done="")
        self._bars.update(self._tasks[stage], completed=done, total=total or None, done=self._text(done))

    def _plain(self, stage: str, done: int, total: int) -> None:
        """A line for each tenth of a stage."""
        tenth = 10 * done // total if total else 0
        if (done or total) and (stage, tenth) != (self._stage, self._tenth):
            self._stage, self._tenth = stage, tenth
            of = f" of {self._text(total)}" if total else ""
            print(f"{stage}: {self._text(done)}{of}", file=self._out, flush=True)
