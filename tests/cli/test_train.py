"""The main job at its smallest, as a person runs it: real JAX, real carrier, a model that trains in seconds."""

from __future__ import annotations

import pathlib
import shutil
import signal

import pytest

from packtrain.checkpoint.reader import open_checkpoint
from packtrain.cli.published import named
from packtrain.core.platform import LocalPlatform
from tests.checkpoint import foreign
from tests.checkpoint.worlds import same_bits
from tests.cli.home import packtrain, said, sets, start


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, store: str) -> tuple[pathlib.Path, list[str], str]:
    """A home with one finished run over a store that was there, the command that made it and what it printed."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(store, home / "stores" / "first-light")
    command = ["first-light", "--run", "small", *sets(train__steps="12", train__eval_every_steps="6")]
    code, out, errors = packtrain(home, *command)
    assert (code, errors) == (0, "")
    return home, command, out


def test_first_light_to_the_last_line(trained: tuple[pathlib.Path, list[str], str]) -> None:
    """It names the run folder, prints plain lines of progress, and ends with figures, samples and the next command."""
    home, _, out = trained
    assert f"new run small in {home}/runs/small" in out
    assert "step 0/12" in out and "\x1b" not in out
    assert "/held_out: bits per byte" in out and "xz -9e, one stream" in out
    assert out.count("text it writes at step 12") == 1
    assert f"run folder: {home}/runs/small" in out
    assert 'next: packtrain sample small --prompt "def "' in out


def test_a_finished_run_says_so(
    trained: tuple[pathlib.Path, list[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command on a finished run starts nothing, names --new and tells the figures again."""
    home, command, _ = trained
    monkeypatch.setenv("PACKTRAIN_HOME", str(home))
    capsys.readouterr()
    before = sorted((home / "runs" / "small" / "commits").iterdir())
    code, out, errors = said(capsys, *command)
    assert (code, errors) == (0, "") and "is finished, at step 12" in out and "--new" in out and "run folder:" in out
    assert "--profile" not in out and "--profile traced nothing" in said(capsys, *command, "--profile", "2")[1]
    assert sorted((home / "runs" / "small" / "commits").iterdir()) == before


def test_report_and_runs_tell_of_it(
    trained: tuple[pathlib.Path, list[str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has the final figure beside xz, seconds that sum and samples; the table has its line."""
    home, _, _ = trained
    monkeypatch.setenv("PACKTRAIN_HOME", str(home))
    code, out, _ = said(capsys, "report", "small")
    assert code == 0 and out.startswith("small: done, 12 steps")
    assert "xz -9e, file by file" in out and "all attempts" in out and "text it writes at step 12" in out
    assert "journal: whole" in out and "errors and warnings: none" in out
    code, out, _ = said(capsys, "runs")
    assert code == 0 and out.splitlines()[1].split()[:4] == ["small", "first-light", "done", "12"]


def test_a_foreign_reader_reads_its_checkpoint(trained: tuple[pathlib.Path, list[str], str]) -> None:
    """The reader in examples/ gives every tensor of the run's last save as ours does."""
    home, _, _ = trained
    platform, run = LocalPlatform(), f"{home}/runs/small"
    ours, theirs = open_checkpoint(platform, run, named(platform, run, None)), foreign.load().read(run)
    assert theirs.keys() == ours.specs.keys()
    assert all(same_bits(array, ours.read(name)) for name, array in theirs.items())


def test_sample_generates(trained: tuple[pathlib.Path, list[str], str]) -> None:
    """sample prints the prompt and what follows it, the same for the same seed."""
    home, _, _ = trained
    code, out, errors = packtrain(home, "sample", "small", "--prompt", "def ", "--tokens", "5")
    assert code == 0 and out.startswith("def "), errors


def test_ctrl_c_saves_and_stops(home: pathlib.Path, store: str) -> None:
    """SIGINT in the middle of training ends in 75, with the step saved and published."""
    command = ["train", "first-light", "--data", store, *sets(train__steps="4000", train__eval_every_steps="1")]
    with start(home, *command) as process:
        assert process.stdout is not None
        wait_for_a_step(home)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 75 and "run.stopped_on_request" in errors and "saved as commit" in errors
    assert list((home / "runs" / "first-light" / "checkpoints").iterdir())


def wait_for_a_step(home: pathlib.Path) -> None:
    """Until the journal tells of one; the test's own time limit ends this."""
    from packtrain.core.journal import Tail
    from packtrain.core.records import EvalDone

    tail = Tail(LocalPlatform(), f"{home}/runs/first-light/journal")
    while not any(isinstance(entry.record, EvalDone) for entry in tail.poll()):
        LocalPlatform().sleep(0.05)
