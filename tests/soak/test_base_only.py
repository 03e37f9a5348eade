"""An environment with the base dependencies alone supervises, reports and resolves; it says what else it would need."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from tests.house import tree

PYTHON = os.environ.get("PACKTRAIN_BASE_PYTHON", "")
ROOMS = ("core", "checkpoint", "monitor", "supervise", "recipes")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not PYTHON, reason="PACKTRAIN_BASE_PYTHON names no base-only environment; make soak-ci does"),
]


def base(folder: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(tree.ROOT / PYTHON), *words], cwd=folder, capture_output=True, text=True)


def test_base_has_no_framework(tmp_path: pathlib.Path) -> None:
    """The base environment has no library of an extra, and every module of the base rooms imports in it."""
    modules = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in tree.files(*(f"packtrain/{room}" for room in ROOMS), suffix=".py")
    ]
    program = "; ".join([
        "import importlib.util as u",
        "assert not any(map(u.find_spec, ('jax', 'optax', 'tokenizers', 'pyarrow', 'torch')))",
        *(f"import {module}" for module in modules),
    ])
    done = base(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr


def test_train_says_which_extra_is_missing(tmp_path: pathlib.Path) -> None:
    """`packtrain train` resolves and prints the configuration, then names the extra to install and exits 78."""
    done = base(tmp_path, "-m", "packtrain.cli.main", "train", "rung:10m", "--set", "model.layers=7")
    assert done.returncode == 78
    assert "layers = 7" in done.stdout
    assert "config.missing_extra" in done.stderr and "packtrain[train]" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["--help", "runs", "doctor"])
def test_verbs_that_need_nothing_work(tmp_path: pathlib.Path, verb: str) -> None:
    """What needs no extra works without any."""
    done = base(tmp_path, "-m", "packtrain.cli.main", verb)
    assert done.returncode == 0, done.stderr


PROGRAM = """
import os, signal, sys, time
attempt = int(os.environ["PACKTRAIN_ATTEMPT"])
print("attempt", attempt, "rank", os.environ["RANK"])
if attempt == 1 and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if attempt < 3:
    time.sleep(600)
"""


def test_any_program_is_kept_alive(tmp_path: pathlib.Path) -> None:
    """`packtrain run` needs the base alone: what was killed, and what does nothing, begins again."""
    (tmp_path / "program.py").write_text(PROGRAM)
    sets = ("--set", "supervise.beat_overdue_s=5", "--set", "supervise.progress_s=11")
    command = ("-m", "packtrain.cli.main", "run", "--procs-per-node", "2", *sets, "--")
    done = base(tmp_path, *command, str(tree.ROOT / PYTHON), "program.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: 3 attempts" in done.stdout and "supervise.progress_s" in done.stdout
