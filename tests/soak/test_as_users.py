"""The trainer's numbers from programs compiled as users run them: tests/train compiles quickly, in another way."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.train.lowering import AS_USERS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = pathlib.Path(__file__).parents[2]
FILES = ("test_step_guard.py", "test_loop_cut.py", "test_model_layout.py", "test_model_optimizers.py")


def test_guard_resume_and_layouts_as_users_run_them() -> None:
    """The tests of the guard, of cut and resume and of layouts and optimizers pass with XLA's and JAX's defaults.

    Measured: 5 min 52 s beside other work (load 5).
    """
    command = [sys.executable, "-m", "pytest", *(f"tests/train/{name}" for name in FILES)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {AS_USERS: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "tests/train: programs are compiled as users run them" in done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 60, done.stdout
