"""Where what a person sees is put: a stream, line by line, or a terminal, redrawn in place. One that cannot be written
to any more is silent, and what is shown goes on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from packtrain.core.units import NS

if TYPE_CHECKING:
    from rich.console import RenderableType

PLAIN_LINE_NS = 10 * NS
DRAW_NS = NS // 4


class Paper:
    """For logs and pipes."""

    def __init__(self, out: Any = None) -> None:
        self._out = out or sys.stdout
        self._line_ns = 0

    def say(self, text: str) -> None:
        try:
            print(text, file=self._out, flush=True)
        except OSError:
            return

    def due(self, now_ns: int) -> bool:
        """Whether it is time for the next line; then the one after it is counted from now."""
        due = now_ns - self._line_ns >= PLAIN_LINE_NS
        self._line_ns = now_ns if due else self._line_ns
        return due


class Screen:
    """For a terminal: a picture; what is said scrolls above it. `rich`: a context in which it stays."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self.rich = Live(console=self._console, auto_refresh=False)
        self._drawn_ns = 0

    def say(self, text: str) -> None:
        try:
            self._console.print(text, markup=False)
        except OSError:
            return

    def due(self, now_ns: int, now: bool = False) -> bool:
        """Whether it is time to draw again, or that is asked for."""
        due = now or now_ns - self._drawn_ns >= DRAW_NS
        self._drawn_ns = now_ns if due else self._drawn_ns
        return due

    def draw(self, picture: RenderableType) -> None:
        try:
            self.rich.update(picture, refresh=True)
        except OSError:
            return
