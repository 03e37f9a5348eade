"""`packtrain run`: what is asked for, recorded and refused. That it keeps alive is tested in test_run.py."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from packtrain.cli import program
from packtrain.core import config
from packtrain.core.errors import SpecDiffers, UsageError
from packtrain.core.platform import LocalPlatform
from packtrain.recipes.program import ProgramSpec
from tests.cli.home import said


def spec(
    *overrides: str, command: tuple[str, ...] = (sys.executable, "x.py"), nodes: int = 1,
    preload: tuple[str, ...] = (),
) -> ProgramSpec:
    return program.resolve(command, nodes, 2, 1, preload, overrides)


def recorded(folder: pathlib.Path, data: bytes) -> None:
    (folder / "spec").mkdir(parents=True)
    (folder / "spec/0001.toml").write_bytes(data)


def test_a_spec_reads_back(tmp_path: pathlib.Path) -> None:
    """What is asked for is recorded: command, folder, counts, and the section `supervise` with what was set."""
    wanted = spec("supervise.progress_s=300")
    recorded(tmp_path, config.encode(wanted))
    assert program.read(LocalPlatform(), str(tmp_path)) == wanted
    assert (wanted.folder, wanted.supervise.progress_s) == (os.getcwd(), 300.0)
    assert wanted.command == (sys.executable, "x.py")


def test_another_command_for_a_run_is_refused() -> None:
    """A difference is told with both values and the command that made the run; the same is accepted."""
    program.compare(spec(), spec(), "x", "path")
    with pytest.raises(SpecDiffers) as told:
        program.compare(spec("supervise.grace_s=9"), spec(nodes=2), "x", "path")
    text = told.value.render()
    assert "--nodes: 1 -> 2" in text and "--set: supervise.grace_s=9 -> nothing" in text
    again = f"packtrain run --run x --procs-per-node 2 --spares 1 --set supervise.grace_s=9 -- {sys.executable} x.py"
    assert again in text


def test_another_folder_is_another_command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of a command mean something else elsewhere, and the way back is told."""
    here = spec()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecDiffers, match="cd .* && packtrain run"):
        program.compare(here, spec(), "x", "path")


@pytest.mark.parametrize(("command", "name"), [
    (("python", "-u", "train/ddp.py", "out"), "ddp"), (("./go.sh",), "go"), (("python3", "-m", "pkg.main"), "pkg"),
    (("sleep", "5"), "sleep"), (("./\u00e9.sh",), "program"), (("bash",), "bash"),
    (("bash", "-c", "echo a; sleep 1"), "bash"), (("python", "-u", "-c", "pass"), "python"),
    (("python", "x.py", "-c", "f"), "x"),
])
def test_runs_are_named_after_their_program(command: tuple[str, ...], name: str) -> None:
    """A run without --run has the name of the script, or of the command, as far as it can be a name."""
    assert program.default_name(command) == name


@pytest.mark.parametrize(("arguments", "words"), [
    (["--", "no-such-command"], "there is no command 'no-such-command'"),
    (["--set", "model.layers=2", "--", "true"], "model.layers cannot be set"),
    (["--nodes", "0", "--", "true"], "--nodes"),
    (["--preload", "decimal", "--", "true"], "nothing can be preloaded for true"),
    (["--preload", "decimal", "--", "python", "-c", "pass"], "nothing can be preloaded for python -c pass"),
    ([], "CMD"),
    (["--run", "../x", "--", "true"], "cannot be the name of a run"),
])
def test_a_mistake_is_one_message(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    arguments: list[str], words: str,
) -> None:
    """What cannot be run is refused before anything is made: one message, exit code 2."""
    monkeypatch.setenv("PACKTRAIN_HOME", str(tmp_path))
    code, _, errors = said(capsys, "run", *arguments)
    assert code == 2 and words in errors and "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_a_wrong_key_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key that `supervise` has not is answered with the nearest right one."""
    monkeypatch.setenv("PACKTRAIN_HOME", str(tmp_path))
    code, _, errors = said(capsys, "run", "--set", "supervise.progres_s=9", "--", "true")
    assert code == 78 and "progress_s" in errors


def test_programs_and_recipes_are_not_mixed(tmp_path: pathlib.Path) -> None:
    """A run of a recipe is no program's, and a program's is none of a recipe: each says what it is."""
    from packtrain.cli import spec as recipes

    recorded(tmp_path / "a", b'recipe = "first-light"\n')
    recorded(tmp_path / "b", config.encode(spec()))
    with pytest.raises(UsageError, match="trains a recipe"):
        program.read(LocalPlatform(), str(tmp_path / "a"))
    with pytest.raises(UsageError, match="keeps a program alive"):
        recipes.read(str(tmp_path / "b/spec/0001.toml"))


def test_the_program_gets_the_environment_as_it_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither our paths nor our settings of the allocator reach the program; its output is not held back."""
    monkeypatch.setenv("MINE", "1")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    job = program.job_of("x", str(tmp_path), spec(nodes=3))
    assert job.env == {**os.environ, "PYTHONUNBUFFERED": "1"}
    assert (job.plain, job.carrier, job.cwd) == (True, (), os.getcwd())
    assert (job.nodes, job.procs, job.spares) == (3, 2, 1)
