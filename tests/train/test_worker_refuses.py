"""What a worker refuses: one clear message (what, where, what next), exit code 78, a journal record, no traceback."""

from __future__ import annotations

import os
import pathlib

import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.saver import Saver
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import ErrorSeen
from packtrain.data.loader import open_loader
from packtrain.train.assemble import facts_of
from packtrain.train.mesh import make_mesh
from packtrain.train.saving import Standing, local_tensors
from packtrain.train.sections import load
from packtrain.train.worker import main
from tests.train import rig
from tests.train.test_worker import corpus, found, make_run

__all__ = ["corpus"]


def refused(capsys: pytest.CaptureFixture[str], run: str, *arguments: str, **env: str) -> str:
    """The message; it has all three parts and no traceback."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PACKTRAIN_")}
    assert main([run, *arguments], plain | env) == 78
    said = capsys.readouterr().err
    assert "Traceback" not in said and "where: " in said and "next:  " in said, said
    return said


def test_neither_restore_nor_fresh(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a supervisor that names no checkpoint and does not say fresh, and by hand without --fresh, none starts."""
    run = make_run(tmp_path / "run", "nowhere")
    assert "checkpoint.neither_restore_nor_fresh" in refused(capsys, run, PACKTRAIN_RUN=run)
    assert [seen.name for seen in found(run, ErrorSeen)] == ["checkpoint.neither_restore_nor_fresh"]
    assert "give --fresh" in refused(capsys, run)
    assert CommitLog(LocalPlatform(), f"{run}/commits").head() == 0


def test_no_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a spec is no run."""
    assert "run.missing" in refused(capsys, str(tmp_path), "--fresh")


def test_a_misspelt_key(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown key is refused by its name before anything is begun."""
    run = make_run(tmp_path / "run", "nowhere")
    spec = pathlib.Path(run, "spec", "0001.toml")
    spec.write_text(spec.read_text().replace("batch_rows", "batch_row"))
    assert "batch_row" in refused(capsys, run, "--fresh")
    assert not pathlib.Path(run, "commits").exists()


@pytest.mark.parametrize(("text", "said"), [
    ("", "is empty"), ("seed = 1\n", "was cut"), ("[model\n[supervise]", "config.bad_value"),
    ("seed = -1\n[supervise]", "seed is -1"),
])
def test_a_broken_spec(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    """A spec that is empty, cut, no TOML, or whose seed is no seed, is refused with its path."""
    run = make_run(tmp_path / "run", "nowhere")
    pathlib.Path(run, "spec", "0001.toml").write_text(text)
    message = refused(capsys, run, PACKTRAIN_RUN=run, PACKTRAIN_FRESH="1")
    assert said in message and "0001.toml" in message


def test_the_spec_of_the_attempt_is_read(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And none that was written since, while the ranks of a world start one after the other; by hand it is the newest.
    """
    run = make_run(tmp_path / "run", "nowhere")
    pathlib.Path(run, "spec", "0002.toml").write_text("")
    for env, said in (({"PACKTRAIN_SPEC": "1"}, "neither_restore_nor_fresh"), ({}, "0002.toml")):
        assert said in refused(capsys, run, PACKTRAIN_RUN=run, **env)
    assert "0002.toml" in refused(capsys, run, "--fresh")


def test_an_unreadable_spec(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A spec that is there and cannot be read now may be readable later: 75, and its path."""
    pathlib.Path(tmp_path, "spec", "0001.toml").mkdir(parents=True)
    assert main([str(tmp_path), "--fresh"], {}) == 75
    said = capsys.readouterr().err
    assert "run.unusable" in said and "0001.toml" in said and "Traceback" not in said


def test_more_ranks_by_hand(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand there is one process."""
    run = make_run(tmp_path / "run", "nowhere")
    assert "WORLD_SIZE is 2" in refused(capsys, run, "--fresh", WORLD_SIZE="2")


def test_no_store(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that is not there is named, also in the journal, which is what the supervisor reads."""
    run = make_run(tmp_path / "run", str(tmp_path / "nowhere"))
    said = refused(capsys, run, PACKTRAIN_RUN=run, PACKTRAIN_FRESH="1")
    assert "nowhere/train" in said
    (seen,) = found(run, ErrorSeen)
    assert (seen.severity, seen.name) == ("error", "data.corpus_missing")


@pytest.fixture
def saved(tmp_path: pathlib.Path, corpus: str) -> tuple[str, str]:
    """A run with one checkpoint, and the PACKTRAIN_RESTORE that names it."""
    run, platform = make_run(tmp_path / "run", corpus), LocalPlatform()
    log = CommitLog(platform, f"{run}/commits")
    log.probe()
    platform.mkdir(f"{run}/checkpoints")
    record = log.begin(None, ("r00000",), "node")
    saver = Saver(platform, f"{run}/buffers", rig.InlineCarrier(platform, run), record.attempt, "r00000", 5.0)
    spec = load(platform, run)
    facts = facts_of(spec, open_loader(spec.data, spec.seed, spec.model.vocab), platform)
    state = rig.fresh_state(make_mesh({}, rig.jax.devices()[:1]))
    saver.save(4, local_tensors(state, rig.specs()), facts | Standing(4).meta())
    (result,) = saver.poll()
    commit = log.read(result.commit)
    assert commit is not None
    return run, f"{commit.number}:{commit.digest}"


def edit_spec(run: str, old: str, new: str) -> None:
    """The spec of the next attempt."""
    text = pathlib.Path(run, "spec", "0001.toml").read_text()
    assert old in text
    pathlib.Path(run, "spec", "0002.toml").write_text(text.replace(old, new))


@pytest.mark.parametrize(("old", "new", "name", "said"), [
    ("embed = 16", "embed = 32", "checkpoint.other_model", "tensor params/embedding"),
    ("batch_rows = 4", "batch_rows = 8", "config.contradiction", "plan_hash"),
    ("seed = 3", "seed = 4", "config.contradiction", "seed is 4 now, and the checkpoint was trained with 3"),
    ("vocab = 384", "vocab = 256", "data.tokenizer_mismatch", "256"),
    ('"line "', f'"{"line " * 9}"', "config.bad_value", "the prompt has 45 tokens"),
])
def test_a_checkpoint_of_something_else(
    saved: tuple[str, str], capsys: pytest.CaptureFixture[str], old: str, new: str, name: str, said: str
) -> None:
    """Another model, other data, another seed, a vocabulary too small for the tokenizer: refused by name on restore."""
    run, restore = saved
    edit_spec(run, old, new)
    message = refused(capsys, run, PACKTRAIN_RUN=run, PACKTRAIN_RESTORE=restore)
    assert name in message and said in message
    assert [seen.name for seen in found(run, ErrorSeen)] == [name]


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_another_tokenizer(
    saved: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, part: str
) -> None:
    """A store built with another tokenizer than the checkpoint was trained with is refused, to train or to measure."""
    from packtrain.data.build import BuildOptions, build

    run, restore = saved
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("another text, for another tokenizer\n" * 50)
    (tmp_path / "text" / "b.txt").write_text("and some that is held out of it\n" * 20)
    options = BuildOptions(vocab=300, workers=1)
    build(LocalPlatform(), [str(tmp_path / "text")], str(tmp_path / "bpe"), options, lambda stage, done, total: None)
    old = load(LocalPlatform(), run).data.stores[0].path.removesuffix("train") + part
    edit_spec(run, f'"{old}"', f'"{tmp_path}/bpe/{part}"')
    assert "data.tokenizer_mismatch" in refused(capsys, run, PACKTRAIN_RUN=run, PACKTRAIN_RESTORE=restore)


def test_fresh_over_a_published_run(saved: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """By hand --fresh does not throw away what was published; and a restore is not fresh."""
    run, restore = saved
    assert "published step 4" in refused(capsys, run, "--fresh")
    assert "leave out --fresh" in refused(capsys, run, "--fresh", PACKTRAIN_RUN=run, PACKTRAIN_RESTORE=restore)
    assert "unset PACKTRAIN_RUN" in refused(capsys, "elsewhere", PACKTRAIN_RUN=run, PACKTRAIN_RESTORE=restore)
