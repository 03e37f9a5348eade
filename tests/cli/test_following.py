"""What is shown of a program that Packtrain only supervises."""

from __future__ import annotations

import io
import pathlib

from packtrain.cli.following import LINE_CHARS_MAX, READ_BYTES_MAX, Following, LogTail, shown
from packtrain.core.journal import Entry
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import AttemptBegan, AttemptEnded, Record


def entries(*records: Record) -> list[Entry]:
    return [Entry(record, "c", "b", 0, 1) for record in records]


def began(attempt: int) -> Record:
    return AttemptBegan(attempt=attempt, commit=attempt, parent=0, restore_step=-1)


def log_of(folder: pathlib.Path, attempt: int) -> pathlib.Path:
    path = folder / f"logs/{attempt:04d}/0.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_output_of_rank_0_and_what_happens(tmp_path: pathlib.Path) -> None:
    """Whole lines appear as they come, an unfinished one at the end of its attempt; attempts are told between them."""
    out = io.StringIO()
    view = Following(LocalPlatform(), str(tmp_path), out)
    view.entries([])
    view.entries(entries(began(1)))
    log = log_of(tmp_path, 1)
    log.write_bytes(b"step 1\nste")
    view.tick(0)
    view.tick(1)
    with open(log, "ab") as file:
        file.write(b"p 2\nhalf")
    view.tick(2)
    view.entries(entries(AttemptEnded(attempt=1, exit_code=-9, reason="killed"), began(2)))
    log_of(tmp_path, 2).write_bytes(b"step 2 again\n")
    view.tick(3)
    assert out.getvalue().splitlines() == [
        "packtrain: attempt 1 begins", "step 1", "step 2", "half", "packtrain: attempt 1 ended: killed (-9)",
        "packtrain: attempt 2 begins", "step 2 again",
    ]


def test_the_past_is_not_shown_again(tmp_path: pathlib.Path) -> None:
    """Who comes later sees what the attempt prints from then on, and nothing of those before."""
    for attempt in (1, 2):
        log_of(tmp_path, attempt).write_bytes(b"old\n")
    out = io.StringIO()
    view = Following(LocalPlatform(), str(tmp_path), out)
    view.entries(entries(began(1), AttemptEnded(attempt=1, exit_code=1, reason="x"), began(2)))
    with open(log_of(tmp_path, 2), "ab") as file:
        file.write(b"new\n")
    view.tick(0)
    assert out.getvalue() == "new\n"


def test_hostile_text_is_shown_as_text() -> None:
    """No control character reaches the terminal; of a line drawn over, its last state is left."""
    assert shown(b"\x1b[2Jgone\x07") == "[2Jgone"
    assert shown(b" 10%|#\r 50%|###\r100%|######\r") == "100%|######"
    assert shown(b"\xff\xfe") == "\ufffd\ufffd"


def test_a_flood_is_bounded(tmp_path: pathlib.Path) -> None:
    """Of a log that grows faster than it is read the newest is shown, with what was left out counted."""
    path = tmp_path / "log"
    path.write_bytes(b"x" * 99 + b"\n")
    tail = LogTail(LocalPlatform(), str(path))
    path.write_bytes((b"y" * 99 + b"\n") * (READ_BYTES_MAX // 100 * 3))
    lines = tail.lines()
    assert lines[0] == f"... {path.stat().st_size - READ_BYTES_MAX:,} bytes left out ..."
    assert len(lines) <= READ_BYTES_MAX // 100 + 2 and lines[-1] == "y" * 99


def test_a_line_without_end_is_bounded(tmp_path: pathlib.Path) -> None:
    """A program that never ends its line is shown in parts, and none of it is kept beyond a bound."""
    path = tmp_path / "log"
    path.write_bytes(b"z" * (2 * LINE_CHARS_MAX))
    assert LogTail(LocalPlatform(), str(path)).lines() == ["z" * LINE_CHARS_MAX]


def test_a_log_that_is_not_there_is_empty(tmp_path: pathlib.Path) -> None:
    """Nothing is told of a log before it exists."""
    assert LogTail(LocalPlatform(), str(tmp_path / "none")).rest() == []
