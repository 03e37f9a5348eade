"""`packtrain ckpt repair`: what is damaged comes back from another place, and what does not is told."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.cli import spec
from packtrain.cli.launch import launch
from packtrain.core.errors import RunMoved
from packtrain.core.holder import hold
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.worlds import make_run, publish_small
from tests.cli.home import call, interrupted, said


@pytest.fixture
def saves(home: pathlib.Path) -> list[Commit]:
    """Run `mine` with steps 5 and 10 published, both copied to `place`, which its spec names as a mirror."""
    platform, folder = LocalPlatform(), home / "runs" / "mine"
    log = make_run(platform, str(folder))
    log.begin(None, ["r00000"], "a")
    commits = [publish_small(platform, log, 1, step, str(folder)) for step in (5, 10)]
    place = home / "place"
    place.mkdir()
    (folder / "spec").mkdir()
    (folder / "spec" / "0001.toml").write_text(
        f"recipe = 'first-light'\n[[checkpoint.mirrors]]\nname = 'b2'\nplace = '{place}'\n"
        f"[[checkpoint.mirrors]]\nname = 'closed'\nplace = 's3://x/y'\nkey_id = 'env:NOT_SET_HERE'\n[supervise]\n"
    )
    for commit in commits:
        assert call("ckpt", "copy", "mine", "--step", str(commit.step), "--to", str(place)) == 0
    return commits


def image(home: pathlib.Path, commit: Commit, root: str = "runs/mine") -> pathlib.Path:
    return home / root / "checkpoints" / commit.folder / "part-r00000.safetensors"


def flip(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_is_bad_is_told_and_mended(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """Verify names this verb; it tells tensor and file, fetches from the mirror of the spec (one whose credentials are
    not there is passed over), and a second time finds everything whole; `all` sees a folder that is gone as well."""
    flip(image(home, saves[1]))
    code, _, errors = said(capsys, "ckpt", "verify", "mine")
    assert code == 78 and "packtrain ckpt repair" in errors
    code, out, errors = said(capsys, "ckpt", "repair", "mine")
    assert code == 0 and "mirror closed is passed over: " in errors, errors
    size = image(home, saves[1]).stat().st_size
    assert out.splitlines() == [
        "step 10 (commit 3): mended part-r00000.safetensors: w, step: 1 of 1 blocks cannot be used, the first is bytes "
        f"0..{size}",
        f"step 10 (commit 3): whole, {size} B fetched",
    ]
    assert said(capsys, "ckpt", "repair", "mine")[1] == "step 10 (commit 3): whole, 0 B fetched\n"
    shutil.rmtree(image(home, saves[0]).parent)
    assert said(capsys, "ckpt", "verify", "mine", "--all")[1].count("whole") == 1
    code, out, _ = said(capsys, "ckpt", "repair", "mine", "all", "--rate", "50MB/s")
    assert code == 0 and out.count("it is not there") == 3 and out.count(": whole, ") == 2
    assert said(capsys, "ckpt", "verify", "mine", "--all")[:2] == (
        0, "step 5 (commit 2): whole\nstep 10 (commit 3): whole\n",
    )


def test_a_copy_is_mended_from_the_run(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """The other way round, too: a place of copies is mended from the run, by this verb or by `ckpt copy`."""
    for words in (["repair", "place", "5", "--from", "runs/mine"], ["copy", "mine", "--step", "5", "--to", "place"]):
        flip(image(home, saves[0], "place"))
        assert said(capsys, "ckpt", "verify", "place", "5")[0] == 78
        assert said(capsys, "ckpt", *words)[0] == 0
        assert said(capsys, "ckpt", "verify", "place", "5")[0] == 0


def test_what_stays_is_told_with_its_reason(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged in the only other place: 78 and why; a place that is away: 75; no other place: 78 and how to name one.
    The file is left as it was."""
    for root in ("runs/mine", "place"):
        flip(image(home, saves[1], root))
    before = image(home, saves[1]).read_bytes()
    code, out, errors = said(capsys, "ckpt", "repair", "mine", "--from", "place")
    assert code == 78 and "step 10 (commit 3): STILL DAMAGED part-r00000.safetensors: w, step: " in out
    assert "[checkpoint.not_mended] still damaged: step 10; place: bytes 0.." in errors and "there, too" in errors
    code, _, errors = said(capsys, "ckpt", "repair", "mine", "--from", "place", "--from", "unmounted")
    assert code == 75 and "[store.unreachable] still damaged" in errors and "unmounted: this folder is not" in errors
    code, _, errors = said(capsys, "ckpt", "repair", "mine", "--from", "runs/mine")
    assert code == 78 and "no other place is known" in errors and "--from" in errors
    assert image(home, saves[1]).read_bytes() == before


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["mine", "7"], 78, "there is no checkpoint 7"), (["other"], 78, "run.missing"),
        (["mine", "--from", "s3://"], 78, "config.bad_value"), (["mine", "--rate", "fast"], 2, "'fast' is no rate"),
        (["mine", "--from", "s3://b", "--secret", "hunter2"], 78, "a secret is given by reference"),
    ],
)
def test_mistakes(
    words: list[str], code: int, says: str, home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """A step, run, place or rate that makes no sense: one message, no traceback, and a secret is not repeated."""
    ended, _, errors = said(capsys, "ckpt", "repair", *words)
    assert ended == code and says in errors and "hunter2" not in errors and "Traceback" not in errors


def test_what_retention_took_is_not_mended(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """A purged checkpoint is none that `all` brings back; named, it is not there; one whose purge has begun is gone."""
    stones = home / "runs" / "mine" / "tombstones"
    (stones / f"{saves[0].folder}.purging").write_text("")
    assert said(capsys, "ckpt", "repair", "mine", "5")[0] == 78
    assert said(capsys, "ckpt", "repair", "mine", "all")[0] == 0
    assert said(capsys, "ckpt", "tombstone", "mine", "5", "--yes")[0] == 78  # one of the last keep_last
    (stones / f"{saves[0].folder}.json").write_text(f'{{"folder":"{saves[0].folder}","written_s":1.0,"reason":"x"}}')
    shutil.rmtree(image(home, saves[0]).parent)
    assert "there is no checkpoint 5" in said(capsys, "ckpt", "repair", "mine", "5")[2]
    code, out, _ = said(capsys, "ckpt", "repair", "mine", "all")
    assert (code, out) == (0, "step 10 (commit 3): whole, 0 B fetched\n")


def test_ctrl_c_while_the_store_hangs(
    home: pathlib.Path, saves: list[Commit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends a repair that waits for a store, with 75 and one line, and nothing lies beside the file."""
    flip(image(home, saves[1]))
    code, out, errors = interrupted(home, monkeypatch, "ckpt", "repair", "mine", "--from", "s3://bucket/x")
    assert (code, out) == (75, "") and errors.count("goes on") == 1 and "Traceback" not in errors
    assert len(list(image(home, saves[1]).parent.iterdir())) == 3


# --- --promote -----------------------------------------------------------------------------------------


def test_a_place_of_copies_becomes_the_run(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what it goes on from and what to do next; the old run is looked at as before and gone on with no more;
    a place under runs/ needs no link; again it ends the same way."""
    log = CommitLog(LocalPlatform(), str(home / "runs" / "mine" / "commits"))
    publish_small(LocalPlatform(), log, 1, 15, str(home / "runs" / "mine"))
    for _ in range(2):
        code, out, errors = said(capsys, "ckpt", "repair", "mine", "--promote", "place")
        assert code == 0 and f"{home}/place is the run now; it goes on from step 10" in out, errors
        assert "the log of mine is closed" in out and "never came here, and stay in the old place: 15" in out
        assert f"next: ln -s {home}/place {home}/runs/place" in out and "--run place" in out
    assert said(capsys, "ckpt", "ls", "mine")[1].endswith(f"closed: this run goes on in {home}/place\n")
    assert "closed" not in said(capsys, "ckpt", "ls", "place")[1]
    with pytest.raises(RunMoved, match=f"goes on in {home}/place"):
        launch("mine", False, spec.read(str(home / "runs" / "mine" / "spec" / "0001.toml")))
    code, _, errors = said(capsys, "ckpt", "restore", "mine", "5")
    assert code == 78 and f"[run.moved] this run goes on in {home}/place, and nowhere else" in errors
    (home / "runs" / "back").mkdir()
    assert said(capsys, "ckpt", "copy", "place", "--step", "10", "--to", "runs/back")[0] == 0
    code, out, errors = said(capsys, "ckpt", "repair", "place", "--promote", "runs/back")
    assert code == 0 and "ln -s" not in out and "--run back" in out, errors


def test_a_run_that_is_gone_needs_a_word(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --lost a run that is not there is refused; held by somebody, too; with it the place goes on, and what to
    do when the disk comes back is said."""
    lock = hold(LocalPlatform(), str(home / "runs" / "mine"), "mine")
    code, _, errors = said(capsys, "ckpt", "repair", "mine", "--promote", "place")
    assert code == 78 and "[run.held]" in errors
    lock.release()
    (home / "runs" / "mine" / "commits").rename(home / "away")
    code, _, errors = said(capsys, "ckpt", "repair", "mine", "--promote", "place")
    assert code == 78 and "[checkpoint.promote_refused] the log of the run cannot be closed" in errors
    (home / "runs" / "mine").rename(home / "all")
    assert "[run.missing]" in said(capsys, "ckpt", "repair", "mine", "--promote", "place")[2]
    code, out, _ = said(capsys, "ckpt", "repair", "mine", "--promote", "place", "--lost")
    assert code == 0 and "the log of mine is not closed: when that disk comes back, give this command again" in out


def test_lost_records_of_the_log(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the run's log lost its last records and a place has them, a repair says so and names the way; the place
    becomes the run by it, goes on from the last save, and the log that lost them is closed."""
    assert said(capsys, "ckpt", "repair", "mine")[0] == 0
    record = home / "runs" / "mine" / "commits" / f"{saves[1].number:012d}"
    record.unlink()
    code, _, errors = said(capsys, "ckpt", "repair", "mine")
    assert code == 78 and f"the log here ends at record 2, and in {home}/place it goes on to 3" in errors
    assert f"packtrain ckpt repair mine --promote {home}/place" in errors
    for _ in range(2):
        code, out, errors = said(capsys, "ckpt", "repair", "mine", "--promote", f"{home}/place")
        assert code == 0 and "it goes on from step 10" in out and "the log of mine is closed" in out, errors
    assert "run.moved" in said(capsys, "ckpt", "restore", "mine", "5")[2]


def test_a_fork_is_no_longer_log(
    home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """A place of copies that was trained on has a longer log, and the run lost nothing."""
    CommitLog(LocalPlatform(), str(home / "place" / "commits")).begin(None, ["r00000"], "b")
    assert said(capsys, "ckpt", "repair", "mine")[0] == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["mine", "--lost"], 2, "--promote is given alone"), (["mine", "5", "--promote", "place"], 2, "given alone"),
        (["mine", "--promote", "place", "--from", "place"], 2, "given alone"),
        (["mine", "--promote", "mine"], 2, "one folder"), (["mine", "--promote", "nowhere"], 75, "nowhere"),
        (["mine", "--promote", "runs"], 78, "no copy of a run lies there"),
        (["mine", "--promote", "runs/mine/spec/0001.toml"], 78, "store.refused"),
        (["mime", "--promote", "place", "--lost"], 78, "what was copied there is of mine, which is not lost"),
        (["mine", "--promote", "s3://b/x"], 78, "a bucket cannot hold the log"),
    ],
)
def test_mistakes_of_promote(
    words: list[str], code: int, says: str, home: pathlib.Path, saves: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that make no sense together, and places that cannot be the run: one message."""
    ended, _, errors = said(capsys, "ckpt", "repair", *words)
    assert ended == code and says in errors and "Traceback" not in errors
