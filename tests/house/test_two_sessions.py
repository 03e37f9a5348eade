"""tests/two_sessions.py, by which both gates run pytest twice at a time: whose words and whose exit code come out."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
STAND_IN = """
import pathlib, signal, sys
folder, codes, words = pathlib.Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
others = any(word.startswith("--ignore=") for word in words)
print("others" if others else "named", *words, flush=True)
code = codes[others]
if code == "hangs":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(2))
(folder / str(int(others))).touch()
while code == "hangs":
    signal.pause()
sys.exit(int(code))
"""
"""Of pytest: FOLDER, then the exit code of the session of PATHS and that of the other one, or `hangs`."""
PATHS = "tests/a tests/b"


def started(folder: pathlib.Path, codes: str, limit_s: float) -> subprocess.Popen[str]:
    python = sys.executable
    command = (python, "-m", "tests.two_sessions", str(limit_s), PATHS, python, "-c", STAND_IN, str(folder), codes)
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(("codes", "expected"), [("0,0", 0), ("1,0", 1), ("0,1", 1), ("1,2", 2), ("3,2", 3)])
def test_the_higher_code_comes_out(tmp_path: pathlib.Path, codes: str, expected: int) -> None:
    """Each session gets the words it should, both are printed, the named one last, and the exit code hides neither."""
    process = started(tmp_path, codes, limit_s=60)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == expected, said
    assert said.index("others --ignore=tests/a --ignore=tests/b") < said.index("named tests/a tests/b")
    assert ("exit codes: " in said) == (expected != 0)


@pytest.mark.parametrize("codes", ["hangs,0", "0,hangs"])
def test_a_session_that_hangs_is_interrupted(tmp_path: pathlib.Path, codes: str) -> None:
    """After the limit; that is no success."""
    process = started(tmp_path, codes, limit_s=1)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 124 and "named" in said and "others" in said, said


def test_an_interrupt_reaches_both(tmp_path: pathlib.Path) -> None:
    """Ctrl-C ends both sessions, and what both said is printed."""
    process = started(tmp_path, "hangs,hangs", limit_s=60)
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 2 and "named" in said and "others" in said, said
