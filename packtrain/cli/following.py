"""What a person sees of a program that Packtrain only supervises: what its rank 0 prints, and what happens to the run.

Log text is hostile text: control characters are left out, and of a line that was drawn over (a progress bar) the last
state is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from packtrain.core.contract import Beat
from packtrain.core.journal import Entry
from packtrain.core.platform import Platform
from packtrain.core.records import AttemptBegan, AttemptEnded
from packtrain.monitor.report import printable

READ_BYTES_MAX = 64 << 10
"""At one look; of a flood what is older is left out, and told."""
LINE_CHARS_MAX = 4096


class LogTail:
    """The lines that a growing log got, each once. A file that does not exist yet is empty."""

    def __init__(self, platform: Platform, path: str, offset: int = 0) -> None:
        self._platform, self._path, self._offset = platform, path, offset
        self._partial = b""

    def lines(self) -> list[str]:
        """Whole lines since the last call; an unfinished one waits for its end, within bounds."""
        with suppress(OSError):
            size = self._platform.size(self._path)
            skipped = max(0, size - self._offset - READ_BYTES_MAX)
            told = [f"... {skipped:,} bytes left out ..."] if skipped else []
            data = self._platform.read(self._path, self._offset + skipped, READ_BYTES_MAX)
            self._offset += skipped + len(data)
            *whole, self._partial = ((b"" if skipped else self._partial) + data).split(b"\n")
            if len(self._partial) > LINE_CHARS_MAX:
                whole, self._partial = [*whole, self._partial], b""
            return [*told, *map(shown, whole)]
        return []

    def rest(self) -> list[str]:
        """What is left at the end: an unfinished last line, too."""
        lines = self.lines()
        partial, self._partial = self._partial, b""
        return [*lines, shown(partial)] if partial else lines


def shown(line: bytes) -> str:
    """A line as a terminal would leave it."""
    return printable(line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])[:LINE_CHARS_MAX]


class Following:
    """A view (cli.watch.View) of a run folder."""

    def __init__(self, platform: Platform, run_folder: str, out: Any = None) -> None:
        self._platform, self._folder = platform, run_folder
        self._out = out or sys.stdout
        self._tail: LogTail | None = None
        self._past = True

    def entries(self, entries: Sequence[Entry]) -> None:
        """Of what was there when we came only the attempt that runs is followed, from now on."""
        for entry in entries:
            if isinstance(entry.record, AttemptBegan):
                self._began(entry.record.attempt)
            elif isinstance(entry.record, AttemptEnded):
                self._ended(entry.record)
        self._past = False

    def _began(self, attempt: int) -> None:
        path = f"{self._folder}/logs/{attempt:04d}/0.log"
        if self._past:
            self._tail = LogTail(self._platform, path, self._size(path))
            return
        self.say(f"attempt {attempt} begins")
        self._tail = LogTail(self._platform, path)

    def _ended(self, record: AttemptEnded) -> None:
        self._print(self._tail.rest() if self._tail is not None else [])
        self._tail = None
        if not self._past:
            self.say(f"attempt {record.attempt} ended: {record.reason} ({record.exit_code})")

    def _size(self, path: str) -> int:
        with suppress(OSError):
            return self._platform.size(path)
        return 0

    def beat(self, beat: Beat) -> None:
        """What a program that tells its steps has to say is in its log as well."""

    def say(self, text: str) -> None:
        self._print([f"packtrain: {text}"])

    def tick(self, now_ns: int) -> None:
        if self._tail is not None:
            self._print(self._tail.lines())

    def _print(self, lines: Sequence[str]) -> None:
        """One that cannot be written to any more is silent, and the run goes on."""
        with suppress(OSError):
            for line in lines:
                print(line, file=self._out)
            self._out.flush()
