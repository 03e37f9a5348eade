"""The scripts behind the Makefile say what a machine lacks before anything is made."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.house import tree


def find_python(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["/bin/sh", str(tree.ROOT / "setup/find-python")], env=env, capture_output=True, text=True)


def tool(folder: pathlib.Path, name: str, text: str = "") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_bare_machine_is_told_everything_it_lacks(tmp_path: pathlib.Path) -> None:
    """Without git, make and Python all three are named in one message, and the exit code is 1."""
    done = find_python(PATH=str(tmp_path))
    assert done.returncode == 1 and not done.stdout
    for name in ("git", "make", "Python 3.11 or newer"):
        assert name in done.stderr


def test_a_python_without_venv_is_told_so(tmp_path: pathlib.Path) -> None:
    """A new enough Python that lacks the venv module is named with the package that brings it."""
    tool(tmp_path, "git")
    tool(tmp_path, "make")
    tool(tmp_path, "python3", 'case "$2" in *version_info*) exit 0;; *) exit 1;; esac')
    done = find_python(PATH=str(tmp_path))
    assert done.returncode == 1
    assert "venv module of python3" in done.stderr and "git" not in done.stderr


def test_an_old_python_is_passed_over(tmp_path: pathlib.Path) -> None:
    """A python3 that is too old does not hide a newer one beside it."""
    tool(tmp_path, "git")
    tool(tmp_path, "make")
    tool(tmp_path, "python3", "exit 1")
    os.symlink(sys.executable, tmp_path / "python3.11")
    done = find_python(PATH=str(tmp_path))
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "python3.11"))


@pytest.mark.parametrize("python", ["/nowhere/python", "false"])
def test_a_chosen_python_is_the_only_candidate(tmp_path: pathlib.Path, python: str) -> None:
    """PYTHON=... that cannot serve is refused by name, although another would do."""
    done = find_python(PATH=os.environ.get("PATH", os.defpath), PYTHON=python)
    assert done.returncode == 1 and python in done.stderr
