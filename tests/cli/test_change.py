"""`packtrain set`: what of a run that has begun may change, and what stays."""

from __future__ import annotations

import pathlib
import resource
from collections.abc import Callable

import msgspec
import pytest

from packtrain.cli import spec
from packtrain.cli.change import refusal, when
from packtrain.core.journal import read_folder
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import SpecChanged
from packtrain.recipes.spec import RunSpec
from tests.cli.home import said


@pytest.fixture
def run(home: pathlib.Path) -> pathlib.Path:
    folder = home / "runs" / "it"
    (folder / "spec").mkdir(parents=True)
    (folder / "spec" / "0001.toml").write_text(spec.text(RunSpec(recipe="first-light")))
    return folder


def test_a_value_is_the_next_spec(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All values of one command are one spec, which the next one goes on from; each change is told with its date of
    force, and journalled; what is so already makes no spec."""
    code, out, _ = said(capsys, "set", "it", "checkpoint.every_s=60", "supervise.grace_s=30")
    assert code == 0 and out.splitlines() == [
        "checkpoint.every_s: 120.0 -> 60.0, in force from the next attempt on",
        "supervise.grace_s: 60.0 -> 30.0, in force when the run's command is given again",
    ]
    assert said(capsys, "set", "it", "guard.policy=stop")[0] == 0
    assert said(capsys, "set", "it", "guard.policy=stop")[1] == "nothing changes: that is so already\n"
    newest = spec.read(f"{run}/spec/0003.toml")
    assert (newest.checkpoint.every_s, newest.supervise.grace_s, newest.guard.policy) == (60.0, 30.0, "stop")
    assert not (run / "spec" / "0004.toml").exists()
    entries = [entry.record for entry in read_folder(LocalPlatform(), f"{run}/journal").entries]
    assert [(one.spec, len(one.changes)) for one in entries if isinstance(one, SpecChanged)] == [(2, 2), (3, 1)]


def test_what_is_in_force_at_two_times_says_so() -> None:
    """Workers save after each evaluation before retention knows of it: nobody may rely on it in between."""
    told = when("checkpoint.keep_best")
    assert "command is given again, and until then the old value counts" in told and "from the next attempt on" in told
    assert when("checkpoint.keep_best_by") == when("checkpoint.keep_last") == "when the run's command is given again"


@pytest.mark.parametrize("value", [
    "checkpoint.every_s=-1", "supervise.beat_overdue_s=1", "guard.polcy=stop", "guard", "checkpoint.keep_best=2",
    "train.eval_steps=1",
])
def test_nonsense_is_refused_as_ever(run: pathlib.Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    """Contradictions, keys that do not exist, and what is no KEY=VALUE: one message, and no spec."""
    code, _, errors = said(capsys, "set", "it", value)
    assert code in (2, 78) and errors.startswith("[") and not (run / "spec" / "0002.toml").exists()
    if value == "train.eval_steps=1":
        assert code == 78 and "config.unknown_key" in errors, "not as if it were one that stays"


def cut(text: str) -> str:
    """What a disk that got full left of a spec, up to a section's end."""
    return text[: text.index("[checkpoint]")]


@pytest.mark.parametrize("left", [lambda text: "", cut])
def test_a_spec_that_is_not_whole_is_none(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str], left: Callable[[str], str]
) -> None:
    """Its missing sections would mean the defaults: it is told with its path, and nothing goes on from it."""
    newest = run / "spec" / "0002.toml"
    newest.write_text(left((run / "spec" / "0001.toml").read_text()))
    code, _, errors = said(capsys, "set", "it", "checkpoint.every_s=60")
    assert code == 78 and "config.bad_value" in errors and str(newest) in errors
    assert not (run / "spec" / "0003.toml").exists()


def test_a_change_that_the_disk_refuses_is_told(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where a run is made: one message, to try again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        code, _, errors = said(capsys, "set", "it", "checkpoint.every_s=60")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 75 and "run.unusable" in errors and str(run) in errors
    assert [path.name for path in (run / "spec").iterdir()] == ["0001.toml"]


def test_every_key_is_decided() -> None:
    """Each value of a spec may change at a known moment, or stays for a reason of its own."""
    stays = []
    for section, value in msgspec.to_builtins(RunSpec(recipe="r")).items():
        keys = [f"{section}.{key}" for key in value] if isinstance(value, dict) else [section]
        for key in keys:
            error = refusal(key)
            assert error is None or (key in error.what and "stays: " in error.what and "--new" in error.fix)
            assert when(key)
            stays += [key] if error is not None else []
    assert {"model.layers", "data.length", "seed", "recipe", "optim.name", "train.mesh"} <= set(stays)
    assert not {"checkpoint.every_s", "supervise.grace_s", "train.steps", "guard.policy"} & set(stays)
