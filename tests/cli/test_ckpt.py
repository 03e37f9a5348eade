"""The verbs of `packtrain ckpt`, in this process, on a run whose saves were made by hand: no trainer, no JAX."""

from __future__ import annotations

import json
import pathlib
import shutil
from contextlib import closing

import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.reader import checkpoint_bytes
from packtrain.checkpoint.retention import plan
from packtrain.cli import ckpt_verify, launch, spec
from packtrain.cli.published import named, present, run_and_word
from packtrain.cli.retained import surveyed
from packtrain.core.errors import UsageError
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.holder import hold
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import AttemptBegan, AttemptEnded, EvalDone, Record, SaveDone, TrainingDone
from packtrain.core.units import bytes_text
from packtrain.recipes.spec import RunSpec
from packtrain.train.sections import newest_spec
from tests.checkpoint import foreign
from tests.checkpoint.worlds import RUN, WRITER, make_run, publish_small
from tests.cli.home import call, said, script
from tests.supervise.noted import begun

IMAGE = "part-r00000.safetensors"
SPEC = "recipe = 'first-light'\n[supervise]\n[checkpoint]\nkeep_last = 2\ngrace_s = 3600.0\n"


@pytest.fixture
def run(home: pathlib.Path) -> pathlib.Path:
    """Run `mine`: attempt 1 saved 10, 20, 30 and 40; attempt 2 began from 20 and saved 30 and 40 again."""
    platform = FakePlatform(FakeDisk(), "a")
    log = make_run(platform)
    log.begin(0, (WRITER,), "node")
    first = [publish_small(platform, log, 1, step) for step in (10, 20, 30, 40)]
    log.begin(first[1].number, (WRITER,), "node")
    for step in (30, 40):
        publish_small(platform, log, 2, step)
    folder = home / "runs" / "mine"
    folder.mkdir(parents=True)
    foreign.copied(platform, RUN, folder)
    (folder / "spec").mkdir()
    (folder / "spec" / "0001.toml").write_text(SPEC)
    return folder


def damage(file: pathlib.Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def folders(run: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_ls_tells_how_each_save_stands(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saves on and off the lineage, the one restored next, sizes; as JSON the same."""
    code, out, errors = said(capsys, "ckpt", "ls", "mine")
    assert (code, errors) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [(row[0], row[1], row[2], " ".join(row[6:])) for row in rows] == [
        ("10", "1", "2", ""), ("20", "1", "3", ""), ("30", "1", "4", "rolled back"), ("30", "2", "7", ""),
        ("40", "1", "5", "rolled back"), ("40", "2", "8", "restored next"),
    ]
    told = json.loads(said(capsys, "ckpt", "ls", "mine", "--json")[1])
    assert [one["step"] for one in told if one["next"]] == [40]
    size = (run / "checkpoints" / told[0]["folder"] / IMAGE).stat().st_size
    assert told[0]["bytes"] == size and told[0]["lineage"] and not told[2]["lineage"]


def test_a_size_is_the_same_everywhere(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls` and `show` tell the bytes of the images, as a report does of a save."""
    platform = LocalPlatform()
    size = bytes_text(checkpoint_bytes(platform, str(run), named(platform, str(run), "10")))
    assert size in said(capsys, "ckpt", "ls", "mine")[1].splitlines()[1]
    assert f", {size} in 1 part\n" in said(capsys, "ckpt", "show", "mine", "10")[1]


def test_show_tells_when_a_save_goes(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One with a tombstone: why it has that and when it is purged; of one that is kept again it is taken away."""
    assert said(capsys, "ckpt", "tombstone", "mine", "10", "--yes")[0] == 0
    told = said(capsys, "ckpt", "show", "mine", "10")[1]
    assert "  kept: no, tombstoned (a person asked for it), purged in 1h00m\n" in told
    assert 3590 < json.loads(said(capsys, "ckpt", "show", "mine", "10", "--json")[1])["purge_in_s"] <= 3600
    (run / "spec" / "0001.toml").write_text(SPEC.replace("keep_last = 2", "keep_last = 9"))
    told = said(capsys, "ckpt", "show", "mine", "10")[1]
    assert "  kept: one of the last 9; the next carrier takes its tombstone away\n" in told


def test_a_report_tells_which_saves_are_kept(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By reason: the best, each of so many steps, the last, the pinned; of a run whose spec does not tell, nothing."""
    (run / "spec" / "0001.toml").write_text(SPEC + "keep_best = 1\nkeep_every_steps = 10\n")
    evaluated(run, 1, {10: 2.5, 20: 2.31})
    evaluated(run, 2, {30: 9.0, 40: 8.0})
    assert said(capsys, "ckpt", "pin", "mine", "commit:4")[0] == 0
    told = said(capsys, "report", "mine")[1]
    assert told[told.index("checkpoints that are kept") :].partition("\n\n")[0].splitlines() == [
        "checkpoints that are kept", "  one of the last 2: steps 30, 40", "  pinned: step 30",
        "  every 10 steps: steps 10, 20, 30, 40", "  the best by held-out loss 2.3100 (32,768 tokens): step 20",
    ]
    (run / "spec" / "0001.toml").write_text("kind = \"program\"\n")
    code, told, _ = said(capsys, "report", "mine")
    assert code == 0 and "kept" not in told


def test_ls_of_a_run_without_a_save(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it did so far, and what to do for a save: before an attempt, while one runs, after its end, where saves
    fail. Where all that was published is gone that is said."""
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "commits")
    assert "no checkpoint yet: no attempt has begun" in said(capsys, "ckpt", "ls", "mine")[2]
    log = make_run(LocalPlatform(), str(run))
    log.begin(0, (WRITER,), "node")

    def told(*records: Record) -> str:
        with closing(Journal(LocalPlatform(), f"{run}/journal", "coordinator")) as journal:
            for record in records:
                journal.write(record, durable=True)
        code, out, errors = said(capsys, "ckpt", "ls", "mine")
        assert (code, errors) == (0, "")
        return out

    begin = AttemptBegan(attempt=1, commit=1, parent=0, restore_step=-1)
    lock = hold(LocalPlatform(), str(run), "mine")
    assert told(begin).splitlines() == [
        "this run has published no checkpoint yet: attempt 1 runs, at step 0",
        "  next:  let it train until a save (checkpoint.every_s, every_steps), or `packtrain stop mine`: it saves then",
    ]
    lock.release()
    (run / "holder").unlink()  # of a process that still lives: this one
    assert "attempt 1 was cut off, at step 0\n  next:  `packtrain report mine`" in told()
    assert "ended after step 0: it crashed (1)" in told(AttemptEnded(attempt=1, exit_code=1, reason="it crashed"))
    failed = SaveDone(step=1, commit=0, bytes=0, stall_s=0.0, write_s=0.0, error="checkpoint.save_failed")
    assert "yet: 1 save failed, the last with checkpoint.save_failed" in told(failed)
    published = SaveDone(step=1, commit=2, bytes=0, stall_s=0.0, write_s=0.0)
    told(published)
    assert "of 1 checkpoint that this run has published none is here" in said(capsys, "ckpt", "show", "mine")[2]


def evaluated(run: pathlib.Path, attempt: int, losses: dict[int, float]) -> None:
    """By rank 0 of that attempt, in the run's journal."""
    journal = Journal(LocalPlatform(), f"{run}/journal", "trainer", 0)
    journal.write(begun(attempt)[1])
    for step, loss in losses.items():
        journal.write(EvalDone(step=step, store="s", loss=loss, bits_per_byte=loss / 2, tokens=32_768), durable=True)
    journal.close()


def test_it_is_told_why_a_save_is_kept(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls` and `show` name the best by the figures in the journal, those that may be, by number, and the pinned; and
    `tombstone` asks with the same words. What they say is kept a plan keeps, and nothing else."""
    (run / "spec" / "0001.toml").write_text(SPEC + "keep_best = 1\nkeep_every_steps = 40\n")
    evaluated(run, 1, {10: 2.5, 20: 2.31, 30: 0.1})
    assert said(capsys, "ckpt", "pin", "mine", "commit:4")[0] == 0

    def words() -> list[str]:
        rows = [line.split() for line in said(capsys, "ckpt", "ls", "mine")[1].splitlines()[1:]]
        return [" ".join(row[6:]) for row in rows]

    best = "the best by held-out loss 2.3100 (32,768 tokens)"
    perhaps = "perhaps one of the best: the journal of attempt 2 may lack its evaluation"
    assert words() == [
        "", best, "pinned, rolled back", perhaps, "rolled back", f"restored next, every 40 steps, {perhaps}",
    ]
    evaluated(run, 2, {40: 2.0})
    now = "the best by held-out loss 2.0000 (32,768 tokens)"
    assert words() == ["", "", "pinned, rolled back", "", "rolled back", f"restored next, every 40 steps, {now}"]
    told = json.loads(said(capsys, "ckpt", "ls", "mine", "--json")[1])
    assert [one["why"] for one in told[5]["kept"]] == ["last", "every", "best"] and told[0]["kept"] == []
    assert f"  kept: one of the last 2, every 40 steps, {now}\n" in said(capsys, "ckpt", "show", "mine")[1]
    assert "  kept: no, retention lets it go\n" in said(capsys, "ckpt", "show", "mine", "10")[1]
    assert json.loads(said(capsys, "ckpt", "show", "mine", "30", "--json")[1])["kept"][0]["why"] == "last"
    platform = LocalPlatform()
    going = {action.folder for action in plan(*surveyed(platform, str(run)))}
    assert going == {one["folder"] for one in told if not one["kept"]}


def test_one_of_the_best_may_be_marked(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a person: then the next best takes its place, also in what `ls` says."""
    (run / "spec" / "0001.toml").write_text(SPEC + "keep_best = 1\n")
    evaluated(run, 1, {10: 2.5, 20: 2.31})
    evaluated(run, 2, {30: 9.0})
    assert said(capsys, "ckpt", "tombstone", "mine", "20", "--yes")[0] == 0
    lines = said(capsys, "ckpt", "ls", "mine")[1].splitlines()
    assert "the best by held-out loss 2.5000" in lines[1] and lines[2].endswith("  tombstoned, purged in 1h00m")


def test_show_needs_no_spec(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where none says what is kept nothing is said about it."""
    (run / "spec" / "0001.toml").write_text("kind = \"program\"\n")
    code, out, _ = said(capsys, "ckpt", "show", "mine", "10")
    assert code == 0 and "kept" not in out
    assert json.loads(said(capsys, "ckpt", "show", "mine", "10", "--json")[1])["kept"] is None


def test_ls_tells_of_debris_and_of_what_was_taken(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that no record names is uncommitted; a save that is gone without a tombstone is said to be gone."""
    (run / "checkpoints" / "step-00000050.a0002.t1").mkdir()
    (run / "checkpoints" / "step-00000010.a0001.t1").rename(run / "elsewhere")
    code, out, _ = said(capsys, "ckpt", "ls", "mine")
    lines = out.splitlines()
    assert code == 0 and "uncommitted" in lines[7] and lines[1].endswith("GONE") and lines[8].startswith("GONE: ")


@pytest.mark.parametrize(("word", "commit"), [
    (None, 8), ("40", 8), ("30", 7), ("20", 3), ("commit:4", 4), ("step-00000040.a0001.t1", 5),
])
def test_show(word: str | None, commit: int, run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step means the one on the lineage, commit:N and a folder any; the manifest, tensors and parts are told."""
    names = [word] if word else []
    code, out, errors = said(capsys, "ckpt", "show", "mine", *names, "--tensors")
    assert code == 0 and f"commit {commit}\n" in out, errors
    assert "seed: 7" in out and "guard: {'mean': 0.1}" in out and "2 tensors (6 bfloat16, 1 int32)" in out
    assert "w       bfloat16  3x2     d0 d1  12 B" in out and "step    int32     scalar         4 B" in out
    told = json.loads(said(capsys, "ckpt", "show", "mine", *names, "--json")[1])
    assert told["commit"]["number"] == commit and told["manifest"]["tensors"][0]["dims"] == ["d0", "d1"]


def test_verify_names_tensor_and_file(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole checkpoints end in 0; a flipped byte in 78 with its tensors and file on stdout, the others still looked
    at; progress goes to stderr, so that stdout is JSON where that was asked for."""
    assert said(capsys, "ckpt", "verify", "mine")[:2] == (0, "step 40 (commit 8): whole\n")
    code, out, errors = said(capsys, "ckpt", "verify", "mine", "--all")
    assert code == 0 and out.count("whole") == 6 and "step 10: " in errors
    damage(run / "checkpoints" / "step-00000030.a0002.t1" / IMAGE)
    code, out, errors = said(capsys, "ckpt", "verify", "mine", "--all")
    assert code == 78 and out.count("whole") == 5 and "[checkpoint.damage_found]" in errors
    (line,) = [line for line in out.splitlines() if "DAMAGED" in line]
    assert line.startswith("step 30 (commit 7): DAMAGED part-r00000.safetensors: w, step: ") and "crc32c" in line
    code, out, _ = said(capsys, "ckpt", "verify", "mine", "30", "--json")
    (told,) = json.loads(out)
    assert code == 78 and not told["whole"] and told["damage"][0]["tensors"] == ["w", "step"]


def test_verify_beside_a_purge(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What retention takes while it is read is said to be purged, and is no damage: its purge was claimed, or it is
    marked and has no manifest any more. One that is marked and whole is whole; damage without a mark stays damage."""
    image, gone = "step-00000010.a0001.t1", "step-00000030.a0001.t1"
    (run / "tombstones" / f"{image}.purging").write_text("")
    (run / "checkpoints" / image / IMAGE).unlink()
    (run / "tombstones" / f"{gone}.json").write_text(f'{{"folder":"{gone}","written_s":1.0,"reason":"x"}}')
    assert said(capsys, "ckpt", "verify", "mine", "--all")[1].count("whole") == 5
    (run / "checkpoints" / gone / "manifest.json").unlink()
    code, out, _ = said(capsys, "ckpt", "verify", "mine", "--all")
    assert (code, out.count("whole"), out.count("purged meanwhile")) == (0, 4, 2), out
    told = json.loads(said(capsys, "ckpt", "verify", "mine", "--all", "--json")[1])
    assert [(one["whole"], one["purged"]) for one in told].count((False, True)) == 2
    (run / "tombstones" / f"{gone}.json").unlink()
    code, out, errors = said(capsys, "ckpt", "verify", "mine", "--all")
    assert code == 78 and "damaged: step 30; 4 of 5 looked at are whole" in errors


def test_verify_tells_damage_and_refusals(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One damaged and two that the disk refuses: each is told, those after them still looked at, and it ends in 78;
    refused ones alone end in 75, however many are whole; as JSON the same."""
    saves = run / "checkpoints"
    for step in (20, 40):
        image = saves / f"step-{step:08d}.a0001.t1" / IMAGE
        image.rename(run / f"{step}")
        image.mkdir()
    code, out, errors = said(capsys, "ckpt", "verify", "mine", "--all")
    assert code == 75 and "[checkpoint.unreadable] the disk refuses to read step 20, 40 now; 4 of 6" in errors
    words = [line.split()[4] for line in out.splitlines()]
    assert words == ["whole", "UNREADABLE", "whole", "UNREADABLE", "whole", "whole"]
    damage(saves / "step-00000010.a0001.t1" / IMAGE)
    code, out, errors = said(capsys, "ckpt", "verify", "mine", "--all")
    assert code == 78 and "[checkpoint.damage_found] damaged: step 10; 3 of 6 looked at are whole; the disk" in errors
    lines = out.splitlines()
    assert len(lines) == 6 and lines[0].startswith(f"step 10 (commit 2): DAMAGED {IMAGE}: w, step: ")
    assert lines[1].startswith("step 20 (commit 3): UNREADABLE ") and str(saves / "step-00000020.a0001.t1") in lines[1]
    code, out, _ = said(capsys, "ckpt", "verify", "mine", "--all", "--json")
    told = json.loads(out)
    assert code == 78 and [one["whole"] for one in told] == [False, False, True, False, True, True]
    assert [len(one["damage"]) for one in told] == [1, 0, 0, 0, 0, 0]
    assert [one["unreadable"] and one["unreadable"]["name"] for one in told] == [
        None, "checkpoint.unreadable", None, "checkpoint.unreadable", None, None,
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_verify_cut_short_tells_what_it_found(
    as_json: bool, run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the third checkpoint: the damage of the first and the wholeness of the second are on stdout, and
    nothing is said of the third, of which nothing is known."""

    class Cut(LocalPlatform):
        def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
            if "step-00000030.a0001" in path:
                raise KeyboardInterrupt
            return super().read(path, offset, size)

    damage(run / "checkpoints" / "step-00000010.a0001.t1" / IMAGE)
    with pytest.raises(KeyboardInterrupt):
        ckpt_verify.look(Cut(), str(run), present(Cut(), str(run)), as_json)
    out = capsys.readouterr().out
    if as_json:
        assert [(one["step"], one["whole"], len(one["damage"])) for one in json.loads(out)] == [
            (10, False, 1), (20, True, 0),
        ]
    else:
        assert out.startswith("step 10 (commit 2): DAMAGED") and out.endswith("\nstep 20 (commit 3): whole\n")


def test_diff(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint is equal to itself; two differ by tensor with figures; both exit 0."""
    code, out, _ = said(capsys, "ckpt", "diff", "mine", "mine@40")
    assert (code, out) == (0, "equal: all 2 tensors, bit for bit\n")
    code, out, _ = said(capsys, "ckpt", "diff", "mine@10", f"{run}@commit:5")
    assert code == 0 and "6 of 6" in out and "0 of 2 tensors are equal" in out
    told = json.loads(said(capsys, "ckpt", "diff", "mine@10", "mine@20", "--json")[1])
    assert [(one["name"], one["state"]) for one in told] == [("w", "differs"), ("step", "differs")]
    assert told[1]["max_abs"] > 0


def test_pin_and_unpin(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pinned save is shown as that and cannot be tombstoned; a pin takes a tombstone away; unpinning is told."""
    assert said(capsys, "ckpt", "tombstone", "mine", "10", "--yes")[0] == 0
    assert "tombstoned, purged in " in said(capsys, "ckpt", "ls", "mine")[1]
    code, out, _ = said(capsys, "ckpt", "pin", "mine", "10", "--reason", "the paper")
    assert code == 0 and "its tombstone is gone" in out
    assert " pinned" in said(capsys, "ckpt", "ls", "mine")[1].splitlines()[1]
    code, _, errors = said(capsys, "ckpt", "tombstone", "mine", "10", "--yes")
    assert code == 78 and "[checkpoint.kept] step 10 stays: it is pinned" in errors
    assert "unpinned: step 10" in said(capsys, "ckpt", "unpin", "mine", "10")[1]
    assert "was not pinned" in said(capsys, "ckpt", "unpin", "mine", "10")[1]
    assert said(capsys, "ckpt", "ls", "mine")[1].splitlines()[1].split()[-1] != "pinned"


@pytest.mark.parametrize(("word", "why"), [("40", "a restart would read it"), ("30", "one of the last 2 saves")])
def test_tombstone_refuses_the_floor(
    word: str, why: str, run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a restart would read, and the last ones of the lineage, are refused with the reason, and nothing is
    marked."""
    code, _, errors = said(capsys, "ckpt", "tombstone", "mine", word, "--yes")
    assert code == 78 and why in errors and not list((run / "tombstones").iterdir())


def test_tombstone_asks(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody can be asked it wants --yes, and marks nothing; nothing is ever deleted by it."""
    before = folders(run)
    code, _, errors = said(capsys, "ckpt", "tombstone", "mine", "10")
    assert code == 2 and "--yes" in errors and not list((run / "tombstones").iterdir())
    assert call("ckpt", "tombstone", "mine", "10", "--yes") == 0 and folders(run) == before


@pytest.mark.parametrize(("age_days", "when"), [(0, "in 20d00h"), (4.99, "in 15d00h"), (21, "by the next carrier")])
def test_an_older_tombstone_keeps_its_time(
    age_days: float, when: str, run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Marking again starts no new grace: what is told is the time that is really left, as `ls` tells it; a new mark,
    or one whose file is damaged, has all of it before it."""
    (run / "spec" / "0002.toml").write_text(SPEC.replace("3600.0", "1729000.0"))  # 20 days and 17 minutes
    assert "may be purged in 20d00h; " in said(capsys, "ckpt", "tombstone", "mine", "10", "--yes")[1]
    (stone,) = (run / "tombstones").iterdir()
    told = json.loads(stone.read_text())
    stone.write_text(json.dumps(told | {"written_s": told["written_s"] - 86_400 * age_days}))
    code, out, _ = said(capsys, "ckpt", "tombstone", "mine", "10", "--yes")
    assert code == 0 and f"may be purged {when}; " in out
    assert f"tombstoned, purged {when}\n" in said(capsys, "ckpt", "ls", "mine")[1]
    stone.write_text("{")
    assert "may be purged in 20d00h; " in said(capsys, "ckpt", "tombstone", "mine", "10", "--yes")[1]


def test_restore_says_what_it_abandons(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next attempt begins from the step that was asked for; later saves are named; ls and show know it, and a save
    that was asked for cannot be tombstoned."""
    code, out, errors = said(capsys, "ckpt", "restore", "mine", "10")
    assert code == 0 and "begins from step 10" in out, errors
    assert "abandons 3 later saves, up to step 40: 20, 30, 40" in out
    assert said(capsys, "ckpt", "ls", "mine")[1].splitlines()[1].endswith("restored next")
    assert "step 10, attempt 1" in said(capsys, "ckpt", "show", "mine")[1]
    code, _, errors = said(capsys, "ckpt", "tombstone", "mine", "10", "--yes")
    assert code == 78 and "was asked to begin from it" in errors
    code, out, _ = said(capsys, "ckpt", "restore", "mine", "40")
    assert code == 0 and "abandons" not in out


def end(platform: LocalPlatform, run: pathlib.Path) -> None:
    """Its journal says that training is done."""
    journal = Journal(platform, f"{run}/journal", "trainer", 0)
    journal.write(TrainingDone(step=40, updates_skipped=0, attempt=2), durable=True)
    journal.close()


def test_a_finished_run_goes_on_from_what_was_restored(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose journal says that training is done is finished until somebody asks it to go back."""
    platform = LocalPlatform()
    end(platform, run)
    found = launch.Run("mine", str(run), RunSpec(recipe="first-light"), resumed=True)
    assert launch.finished(platform, found)
    assert said(capsys, "ckpt", "restore", "mine", "20")[0] == 0
    assert not launch.finished(platform, found)


def test_a_finished_run_names_the_mirrors_that_lack_its_end(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command again says so, with the command that brings the last step there."""
    platform = LocalPlatform()
    end(platform, run)
    mirrored = RunSpec(recipe="first-light", checkpoint=CheckpointConfig(mirrors=(Mirror(name="b2", place="s3://b"),)))
    path = pathlib.Path(newest_spec(platform, str(run)))
    path.write_text(spec.text(mirrored))
    assert launch.finished(platform, launch.Run("mine", str(run), mirrored, resumed=True))
    told = capsys.readouterr().err
    assert "step 40, the last one, is not on mirror b2" in told and f"packtrain ckpt copy {run} --to s3://b" in told


def test_restore_is_refused_while_somebody_trains(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While another process holds the run, nothing is asked of it, and the message names that process."""
    note = {"job": "mine", "pid": 4711, "node": "n1", "since": "noon"}
    lock = LocalPlatform().lock(f"{run}/holder", json.dumps(note))
    assert lock is not None
    code, _, errors = said(capsys, "ckpt", "restore", "mine", "10")
    lock.release()
    assert code == 78 and "[run.held]" in errors and "process 4711 on n1" in errors
    assert not (run / "restore.json").exists()
    assert call("ckpt", "restore", "mine", "10") == 0


def test_a_damaged_checkpoint_is_not_gone_back_to(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Restoring what does not open is refused, naming the file, and what was asked for before stands."""
    (run / "checkpoints" / "step-00000010.a0001.t1" / "manifest.json").write_text("{}")
    code, _, errors = said(capsys, "ckpt", "restore", "mine", "10")
    assert code == 75 and "[checkpoint.damaged]" in errors and "manifest.json" in errors
    assert not (run / "restore.json").exists()


READ_ONLY = {"ls": [], "show": [], "verify": []}
WITH_STEP = ["pin", "unpin", "tombstone", "restore"]


@pytest.mark.parametrize("verb", [*READ_ONLY, *WITH_STEP, "diff"])
def test_wrong_names_are_one_message(verb: str, run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run or a step that is not there ends in 78 with the nearest run or the steps there are."""
    step = ["10"] if verb in WITH_STEP else ["mine"] if verb == "diff" else []
    code, _, errors = said(capsys, "ckpt", verb, "mini", *step)
    assert code == 78 and "did you mean mine?" in errors and "where:" in errors
    if verb != "ls":
        names = ["mine@99", "mine"] if verb == "diff" else ["mine", "99"]
        code, _, errors = said(capsys, "ckpt", verb, *names)
        assert code == 78 and "there is no checkpoint 99" in errors and "there are steps 40, 30, 20, 10" in errors


@pytest.mark.parametrize("verb", [*READ_ONLY, *WITH_STEP])
def test_a_damaged_log_is_one_message(verb: str, run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged record ends every verb with its file and a way out; a run that never began says that instead."""
    step = ["10"] if verb in WITH_STEP else []
    record = run / "commits" / f"{5:012d}"
    record.write_text(record.read_text()[:-9])
    code, _, errors = said(capsys, "ckpt", verb, "mine", *step)
    assert code == 75 and "[commits.unknown] record 5 is damaged" in errors and str(record) in errors
    (run / "commits").rename(run / "away")
    code, _, errors = said(capsys, "ckpt", verb, "mine", *step)
    assert code == 78 and "has published no checkpoint yet" in errors


def test_a_rolled_back_step_of_two_attempts_wants_a_commit(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that only attempts off the lineage saved, more than one of them, is asked about by commit."""
    CommitLog(LocalPlatform(), f"{run}/commits").begin(2, (WRITER,), "node")
    code, _, errors = said(capsys, "ckpt", "show", "mine", "40")
    assert code == 2 and "name one: commit:8, commit:5" in errors
    assert said(capsys, "ckpt", "show", "mine", "20")[0] == 0


def test_verbs_of_ckpt_load_no_framework(run: pathlib.Path, home: pathlib.Path) -> None:
    """ls, show, verify and diff run without importing JAX, torch or the data extra; `ckpt` alone prints its help."""
    words = [["ls", "mine"], ["show", "mine", "--tensors"], ["verify", "mine"], ["diff", "mine", "mine@10"], []]
    program = (
        "import sys; from tests.cli.home import call\n"
        f"codes = [call('ckpt', *w) for w in {words!r}]\n"
        "print([n for n in ('jax', 'torch', 'tokenizers', 'pyarrow') if n in sys.modules], codes)\n"
    )
    done = script(program, home)
    assert done.stdout.splitlines()[-1] == "[] [0, 0, 0, 0, 2]", done.stderr
    assert "  tombstone  Mark a checkpoint" in done.stderr


@pytest.mark.parametrize("text", ["tiny@", "@4", "@"])
def test_half_a_name_is_refused_as_such(text: str) -> None:
    """RUN@STEP with one side missing says so, rather than looking for a run or step that nobody named."""
    with pytest.raises(UsageError, match="is no RUN@STEP"):
        run_and_word(text)
    assert run_and_word("tiny@4") == ("tiny", "4") and run_and_word("tiny") == ("tiny", None)
