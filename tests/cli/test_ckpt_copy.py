"""`packtrain ckpt copy`: a published checkpoint in another place, whole or not at all."""

from __future__ import annotations

import pathlib

import pytest

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.reader import verify_commit
from packtrain.cli.ckpt_copy import CopyBar
from packtrain.core.platform import LocalPlatform
from packtrain.core.transfer import Progress
from tests.checkpoint import foreign
from tests.checkpoint.worlds import make_run, publish_small
from tests.cli.home import interrupted, said


@pytest.fixture
def saves(home: pathlib.Path) -> list[Commit]:
    """Run `mine` with steps 5 and 10 published."""
    platform, folder = LocalPlatform(), home / "runs" / "mine"
    log = make_run(platform, str(folder))
    (folder / "spec").mkdir()
    (folder / "spec" / "0001.toml").write_text("recipe = 'first-light'\n[supervise]\n")
    log.begin(None, ["r00000"], "a")
    return [publish_small(platform, log, 1, step, str(folder)) for step in (5, 10)]


def test_a_copy_is_made_and_verified(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step, or the one named, is in the place afterwards and whole; the same command again sends nothing, and
    mends what was damaged meanwhile."""
    place = home / "place"
    place.mkdir()
    code, out, errors = said(capsys, "ckpt", "copy", "mine", "--to", str(place))
    assert code == 0 and f"step 10 of mine is in {place}/checkpoints/{saves[1].folder}: " in out, errors
    assert "copying: " in errors and "verified" in errors.splitlines()[-1]
    assert verify_commit(LocalPlatform(), str(place), saves[1]) == []
    assert said(capsys, "ckpt", "copy", "mine", "--to", f"file://{place}", "--step", "5", "--rate", "50MB/s")[0] == 0
    assert verify_commit(LocalPlatform(), str(place), saves[0]) == []
    assert "0 B sent" in said(capsys, "ckpt", "copy", "mine", "--to", str(place))[1]
    image = next((place / "checkpoints" / saves[1].folder).glob("*.safetensors"))
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    assert "0 B sent" not in said(capsys, "ckpt", "copy", "mine", "--to", str(place))[1]
    assert verify_commit(LocalPlatform(), str(place), saves[1]) == []


def test_a_place_is_read_alone(home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]) -> None:
    """When the run is gone, the folder with its copy is listed, shown, verified and read by a foreign reader like a run
    of its own; what was never copied is no loss there."""
    place = home / "place"
    place.mkdir()
    assert said(capsys, "ckpt", "copy", "mine", "--to", str(place))[0] == 0
    (home / "runs" / "mine").rename(home / "runs" / "deleted")
    (home / "runs" / "deleted" / "spec" / "0001.toml").unlink()
    code, out, errors = said(capsys, "ckpt", "ls", str(place))
    assert (code, errors) == (0, "") and out.splitlines()[1].endswith("restored next")
    assert out.splitlines()[2:] == ["1 more was purged by retention, or not copied (--all lists them)"]
    assert "not copied" in said(capsys, "ckpt", "ls", str(place), "--all")[1]
    assert "step 10, attempt 1, commit 3" in said(capsys, "ckpt", "show", str(place))[1]
    assert said(capsys, "ckpt", "verify", str(place), "--all")[:2] == (0, "step 10 (commit 3): whole\n")
    assert sorted(foreign.load().read(place)) == ["step", "w"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["mine", "--to", "nowhere"], 75, "store.unreachable"), (["mine", "--to", "file"], 78, "not a folder"),
        (["mine", "--to", "s3://"], 78, "config.bad_value"),
        (["mine", "--to", "place", "--rate", "fast"], 2, "'fast' is no rate"),
        (["mine", "--to", "place", "--rate", "200"], 2, "'200' is no rate"), (["mine"], 2, "--to"),
        (["mine", "--to", "place", "--step", "7"], 78, "there is no checkpoint 7"),
        (["other", "--to", "x"], 78, "run.missing"),
        (["mine", "--to", "s3://b", "--secret", "hunter2"], 78, "a secret is given by reference"),
    ],
)
def test_mistakes(
    words: list[str], code: int, says: str, home: pathlib.Path, saves: list[Commit],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A place that is not there, an address, rate, step or run that makes no sense: one message, no traceback, and a
    secret is not repeated."""
    monkeypatch.chdir(home)
    (home / "file").touch()
    ended, _, errors = said(capsys, "ckpt", "copy", *words)
    assert ended == code and says in errors and "hunter2" not in errors and "Traceback" not in errors


def test_ctrl_c_while_the_store_hangs(
    home: pathlib.Path, saves: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends a copy that waits for a store at once, with 75 and one line."""
    code, out, errors = interrupted(home, monkeypatch, "ckpt", "copy", "mine", "--to", "s3://bucket/x")
    assert (code, out) == (75, "") and errors.count("\n") == 1 and "goes on" in errors


def test_progress_tells_amount_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Elsewhere than on a terminal a line comes for each tenth, with what is verified, the rate and what is left."""
    with CopyBar() as bar:
        for done in range(0, 1001, 10):
            bar(Progress(done << 20, 1000 << 20, 200e6, (1000 - done) / 5))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[4] == "copying: 500.0 MiB of 1000.0 MiB verified, 190.7 MiB/s, 1m40s left"
    assert lines[9] == "copying: 1000.0 MiB of 1000.0 MiB verified, 190.7 MiB/s"
