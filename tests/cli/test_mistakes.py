"""What a person can get wrong: one message each (what, where, what next), the documented exit code, no traceback."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from contextlib import closing

import pytest
import typer

from packtrain.cli import first, folders, launch, spec
from packtrain.cli.ending import end
from packtrain.core.errors import INTERRUPTED, RunUnusable
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import CoordinatorBegan
from packtrain.data.tokenizer import train_bpe
from tests.cli.home import call, environment, packtrain, said, script, sets
from tests.data.makers import write_store

MISTAKES = {
    "unknown verb": (["trian"], 2, "Did you mean"),
    "unknown option": (["train", "first-light", "--sets", "x"], 2, "--set"),
    "no recipe": (["train"], 2, "RECIPE"),
    "unknown recipe": (["train", "first-lite"], 78, "did you mean first-light"),
    "no size": (["train", "rung"], 78, "rung:SIZE"),
    "size out of range": (["train", "rung:1t"], 78, "10m"),
    "unknown key": (["train", "first-light", "--set", "model.layer=2"], 78, "layers"),
    "bad value": (["train", "first-light", "--set", "model.layers=many"], 78, "model.layers"),
    "no value": (["train", "first-light", "--set", "model.layers"], 2, "--set model.layers=12"),
    "contradiction": (["train", "first-light", "--set", "model.kv_heads=3"], 78, "model.kv_heads"),
    "metric": (["train", "first-light", "--set", "checkpoint.keep_best_by=accuracy"], 78, "bits_per_byte"),
    "metric of none": (["train", "first-light", "--set", "checkpoint.keep_best_by=bits_per_byte"], 78, "keep_best=3"),
    "the usual metric of none": (["train", "first-light", "--set", "checkpoint.keep_best_by=loss"], 78, "keep_best=3"),
    "store of none": (["train", "first-light", "--set", "checkpoint.keep_best_on=x"], 78, "keep_best=3"),
    "fewer than none": (["train", "first-light", "--set", "checkpoint.keep_best=-1"], 78, "checkpoint.keep_best"),
    "recipe by --set": (["train", "first-light", "--set", "recipe=x"], 2, "recipe"),
    "mesh axis": (["train", "first-light", "--set", "train.mesh.expret=2"], 78, "expert"),
    "--mesh without a size": (["shape", "rung:10m", "--mesh", "fsdp"], 78, "--mesh fsdp=8"),
    "--mesh axis": (["shape", "rung:10m", "--mesh", "fdsp=8"], 78, "did you mean fsdp?"),
    "--mesh axis twice": (["shape", "rung:10m", "--mesh", "fsdp=8,fsdp=2"], 78, "fsdp is given twice"),
    "--mesh of none": (["shape", "rung:10m", "--mesh", "fsdp=0"], 78, "fsdp is '0'"),
    "--mesh below none": (["shape", "rung:10m", "--mesh", "fsdp=-1"], 78, "fsdp is '-1'"),
    "--mesh too large": (["shape", "rung:10m", "--mesh", f"fsdp={10**30}"], 78, "1 to 1,000,000"),
    "--mesh in Python's spelling": (["shape", "rung:10m", "--mesh", "fsdp=1_0"], 78, "fsdp is '1_0'"),
    "--mesh in other digits": (["shape", "rung:10m", "--mesh", "fsdp=８"], 78, "fsdp is '８'"),
    "--mesh that does not fit": (["shape", "rung:10m", "--mesh", "tensor=2"], 78, "where: --mesh"),
    "size of an axis": (["train", "first-light", "--set", "train.mesh.fsdp=0"], 78, "fsdp is 0"),
    "--profile without an end": (["train", "first-light", "--profile", "1001"], 2, "--profile"),
    "no data": (["train", "first-light"], 78, "packtrain data build"),
    "data not there": (["train", "first-light", "--data", "nowhere"], 78, "packtrain data build"),
    "first-light without an end": (["first-light", "--set", "train.minutes_max=0"], 78, "train.minutes_max"),
    "a longer first-light": (["first-light", "--set", "train.minutes_max=30"], 78, "packtrain train first-light"),
    "bad name": (["train", "first-light", "--run", "../x"], 2, "--run"),
    "corpus missing": (["data", "build", "nowhere", "--out", "x"], 78, "nowhere"),
    "corpus empty": (["data", "build", "empty", "--out", "x"], 78, "empty"),
    "tokenizer missing": (["data", "build", "text", "--out", "x", "--tokenizer", "no.json"], 78, "no.json"),
    "tokenizer is a folder": (["data", "build", "text", "--out", "x", "--tokenizer", "empty"], 78, "empty/token"),
    "tokenizer misspelt": (["data", "build", "text", "--out", "x", "--tokenizer", "BPE"], 78, "did you mean bpe?"),
    "no tokenizer": (["data", "build", "text", "--out", "x", "--tokenizer", ""], 78, "byte has an id"),
    "no store": (["data", "show", "nowhere"], 78, "packtrain data build"),
    "no run to report": (["report", "nowhere"], 78, "packtrain first-light"),
    "no run to sample": (["sample", "nowhere", "--prompt", "x"], 78, "packtrain first-light"),
    "no prompt": (["sample", "nowhere"], 2, "next:  see `packtrain sample --help`"),
    "no run to export": (["export", "nowhere", "--hf", "x", "--step", "latest"], 78, "packtrain first-light"),
    "seed too large": (["sample", "nowhere", "--prompt", "x", "--seed", str(2**64)], 2, "seed"),
    "negative temperature": (["sample", "nowhere", "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake: str, home: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what, where and what next; the exit code is the documented one; nothing is left behind."""
    arguments, expected, hint = MISTAKES[mistake]
    (home / "empty").mkdir()
    (home / "text").mkdir()
    for n in range(9):
        (home / "text" / f"{n}.txt").write_text(f"some text of its own {n}\n" * (n + 3))
    code, out, errors = said(capsys, *arguments)
    assert code == expected, errors
    assert hint in errors and "Traceback" not in errors + out
    assert errors.startswith("[") and errors.count("\n[") == 0
    assert "\n  where: " in errors and "\n  next:  " in errors
    assert not (home / "runs").exists()


def test_nearest_run_is_named(home: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt run is answered with the nearest one there is."""
    (home / "runs" / "first-light" / "spec").mkdir(parents=True)
    (home / "runs" / "first-light" / "spec" / "0001.toml").write_text("recipe = 'first-light'\n")
    code, _, errors = said(capsys, "report", "firstlight")
    assert code == 78 and "did you mean first-light?" in errors


def test_a_bug_keeps_its_traceback_in_a_file(home: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our own fault exits 70 with one message that names a file, and the file has the traceback."""

    def bug() -> None:
        raise ZeroDivisionError("planted")

    assert end(bug) == 70
    errors = capsys.readouterr().err
    path = next(word for word in errors.split() if word.endswith(".txt"))
    assert "Traceback" not in errors and errors.startswith("[ours.bug] ZeroDivisionError: planted")
    assert "Traceback" in pathlib.Path(path).read_text()


def test_interrupted_is_75(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in a command that has no run to stop ends in 75 and a sentence."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    app = typer.Typer()
    app.command()(interrupted)
    for command in (interrupted, lambda: app([], standalone_mode=False)):
        assert end(command) == 75
        assert capsys.readouterr().err.splitlines() == [INTERRUPTED]


def test_interrupted_while_importing(tmp_path: pathlib.Path) -> None:
    """Ctrl-C before any verb is there ends in 75 and the same sentence, nothing else."""
    press = "signal.signal(signal.SIGINT, signal.default_int_handler); signal.raise_signal(signal.SIGINT)"
    for module in ("typer.py", "psutil.py"):  # the second is imported inside the verb
        (tmp_path / module).write_text(f"exec('import signal; {press}')\n")  # this session may ignore Ctrl-C
        code, out, errors = packtrain(tmp_path, "data", "build", "x", "--out", "y")
        assert (code, out, errors.splitlines()) == (75, "", [INTERRUPTED])
        (tmp_path / module).unlink()


def test_a_closed_pipe_is_no_error(tmp_path: pathlib.Path) -> None:
    """Output that nobody reads any more (a pipe into head) ends the command quietly."""
    code = "import os, sys; from packtrain.__main__ import main; sys.argv = ['packtrain', '--help']; " \
        "r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w); main()"
    done = script(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("redirect", "expected"), [(">/dev/full", 75), (">&-", 0)])
def test_an_output_that_takes_nothing(tmp_path: pathlib.Path, redirect: str, expected: int) -> None:
    """A full output ends in one line and 75, a closed one quietly; neither is our fault."""
    command = ["bash", "-c", f'"$0" -m packtrain --version {redirect}', sys.executable]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == expected, done.stderr
    said_lines = done.stderr.splitlines()
    assert len(said_lines) == (expected == 75) and all("No space left" in line for line in said_lines)


BASE_ONLY = """
import sys
from importlib.machinery import PathFinder

ABSENT = ("jax", "jaxlib", "optax", "tokenizers", "pyarrow", "zstandard")


class BaseOnly:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)


sys.meta_path = [BaseOnly if finder is PathFinder else finder for finder in sys.meta_path]
from packtrain.cli.ending import end
from packtrain.cli.main import app
code = end(lambda: app(sys.argv[1:] or {arguments!r}, standalone_mode=False))
assert not [name for name in sys.modules if name.split(".")[0] in ABSENT]
sys.exit(code)
"""


def test_base_only_train_prints_the_config(tmp_path: pathlib.Path) -> None:
    """Without the train extra, `train` prints the resolved config, names the extra and exits 78, importing nothing."""
    done = script(BASE_ONLY.format(arguments=["train", "rung:10m", "--set", "seed=7"]), tmp_path)
    assert done.returncode == 78, done.stderr
    assert 'recipe = "rung:10m"' in done.stdout and "seed = 7" in done.stdout and "[model]" in done.stdout
    assert done.stderr.startswith("[config.missing_extra]") and "pip install 'packtrain[train]'" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["first-light"], "train"), (["data", "build", ".", "--out", "x"], "data"), (["data", "show", "."], "data"),
    ],
)
def test_base_only_verbs_name_their_extra(tmp_path: pathlib.Path, arguments: list[str], extra: str) -> None:
    """Every verb that needs more than the base says which extra, with exit code 78."""
    done = script(BASE_ONLY.format(arguments=arguments), tmp_path)
    assert done.returncode == 78 and f"packtrain[{extra}]" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["runs"], ["doctor"], ["report", "nowhere"]])
def test_base_only_is_enough_for_the_rest(tmp_path: pathlib.Path, arguments: list[str]) -> None:
    """runs, doctor and report work in a base-only environment."""
    done = script(BASE_ONLY.format(arguments=arguments), tmp_path)
    assert done.returncode in (0, 78) and "missing_extra" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("options", "hint"), [
    ({"train__eval_every_steps": "0"}, "set train.eval_every_steps"),
    ({"data__held_out": "[]"}, "there is no held-out store to judge them by"),
    ({"checkpoint__keep_best_on": "other"}, "name it as data.held_out does"),
])
def test_best_of_what_is_asked_at_once(
    options: dict[str, str], hint: str, home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the best are to be kept and nothing tells which they are, no run begins."""
    code, _, errors = said(
        capsys, "train", "first-light", "--data", store, *sets(checkpoint__keep_best="3", **options)
    )
    assert code == 78 and hint in errors and errors.startswith("[") and not (home / "runs").exists()


def test_a_spec_that_differs_is_refused(home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another recipe or other overrides under the name of a run are refused with a diff, --new and the old command."""
    wanted = spec.resolve("first-light", ["model.layers=2", "seed=3"], store)
    launch.create(LocalPlatform(), "mine", wanted)
    code, _, errors = said(capsys, "train", "first-light", "--run", "mine", "--data", store, "--set", "model.layers=4")
    assert code == 78 and errors.startswith("[config.spec_differs]")
    assert "model.layers: 2 -> 4" in errors and "seed: 3 -> not given" in errors and "--new" in errors
    assert f"packtrain train first-light --run mine --data {store} --set model.layers=2 --set seed=3" in errors
    assert launch.find("mine", False, wanted) is not None


@pytest.mark.parametrize(
    ("launched", "options"),
    [
        ({"nodes": 3, "spares": 1, "procs": 2}, " --nodes 3 --spares 1 --procs-per-node 2"),
        ({"nodes": 2}, " --nodes 2"), ({"nodes": 1, "procs": 2}, " --nodes 1 --procs-per-node 2"), ({"nodes": 1}, ""),
    ],
)
def test_the_old_command_is_whole(
    home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str], launched: dict[str, int], options: str
) -> None:
    """With the nodes that the run was launched with the last time: pasted it resumes the run on as many."""
    launch.create(LocalPlatform(), "mine", spec.resolve("first-light", ["seed=3"], store))
    with closing(Journal(LocalPlatform(), f"{home}/runs/mine/journal", "coordinator")) as journal:
        journal.write(CoordinatorBegan(term=1, log="", nodes=9, spares=9, procs=9))
        journal.write(CoordinatorBegan(term=2, log="", **launched))
    code, _, errors = said(capsys, "train", "first-light", "--run", "mine", "--data", store, "--set", "seed=4")
    assert code == 78 and errors.endswith(
        f"resume this one: packtrain train first-light --run mine --data {store} --set seed=3{options}\n"
    )


def test_saves_cannot_fall_back_into_the_run_folder(
    home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A place to fall back to inside the run folder is refused before the folder is made."""
    folder = folders.named("mine")
    inside = f'checkpoint.fallback=["{folder}/saves"]'
    code, _, errors = said(capsys, "train", "first-light", "--run", "mine", "--data", store, "--set", inside)
    assert code == 78 and errors.startswith("[config.contradiction]") and "checkpoint.fallback" in errors
    assert "another disk" in errors and not pathlib.Path(folder).exists()


def test_a_damaged_spec_is_one_message(home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A recorded spec that was edited into nonsense is refused naming the file and the key."""
    (home / "runs" / "mine" / "spec").mkdir(parents=True)
    path = home / "runs" / "mine" / "spec" / "0001.toml"
    path.write_text("recipe = 'first-light'\n[model]\nlayer = 3\n[supervise]\n")
    code, _, errors = said(capsys, "train", "first-light", "--run", "mine", "--data", store)
    assert code == 78 and str(path) in errors and "layers" in errors


@pytest.mark.parametrize("place", ["/proc/nope", "a file"])
def test_a_home_that_cannot_be_written(
    place: str, home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder that the machine refuses to write is one message with the place and what to do, exit 75."""
    (home / "a file").write_text("not a folder")
    monkeypatch.setenv("PACKTRAIN_HOME", place)
    code, _, errors = said(capsys, "train", "first-light", "--data", store)
    assert code == 75 and errors.startswith("[run.unusable]") and "PACKTRAIN_HOME" in errors
    assert f"where: {folders.home()}" in errors
    with pytest.raises(RunUnusable, match="cannot be written"):
        first.time_steps(LocalPlatform(), spec.resolve("first-light", [], store), folders.named("timed"))


def test_a_held_out_store_of_another_tokenizer(
    home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out text in ids of another tokenizer is refused before the run is made, naming the store."""
    source = "".join(f"def other{n}(): pass\n" for n in range(300))
    other = write_store(home / "other", [source.encode()], train_bpe([source], 300))
    code, _, errors = said(capsys, "train", "first-light", "--data", store, "--set", f'data.held_out=["{other}"]')
    assert code == 78 and errors.startswith("[data.tokenizer_mismatch]") and other in errors
    assert not (home / "runs").exists()


def test_a_held_out_store_given_twice(home: pathlib.Path, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One held-out store under two names is refused before the run is made, naming the second."""
    twice = f'data.held_out=["{store}/held_out", "{store}/train/../held_out"]'
    code, _, errors = said(capsys, "train", "first-light", "--data", store, "--set", twice)
    assert code == 78 and errors.startswith("[config.contradiction]") and "data.held_out.1" in errors
    assert not (home / "runs").exists()


def test_a_build_names_a_run_of_its_own(home: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that `data build` tells to give next is not refused for a run that is there: its run is new."""
    (home / "text").mkdir()
    for n in range(9):
        (home / "text" / f"{n}.txt").write_text(f"some text of its own {n}\n" * (n + 3))
    build = ("data", "build", "text", "--out", "my texts", "--tokenizer", "byte")
    code, out, errors = said(capsys, *build)
    assert code == 0 and out.endswith("next: packtrain train first-light --run my-texts --data 'my texts'\n"), errors
    launch.create(LocalPlatform(), "my-texts", spec.resolve("first-light", [], str(home / "my texts")))
    assert said(capsys, *build)[1].endswith("--run my-texts-2 --data 'my texts'\n")


# --- mistakes that only a worker can see ---------------------------------------------------------------


def test_a_mesh_that_does_not_fit(home: pathlib.Path, store: str) -> None:
    """More devices than there are: one message of the worker's, exit 78, one attempt."""
    code, _, errors = packtrain(
        home, "train", "first-light", "--data", store, *sets(train__steps="4", train__mesh__tensor="3")
    )
    assert code == 78 and errors.startswith("[layout.indivisible]") and "Traceback" not in errors
    assert len(list((home / "runs" / "first-light" / "logs").iterdir())) == 1


def test_a_tokenizer_that_does_not_match(home: pathlib.Path, store: str) -> None:
    """A model with fewer ids than the store's tokenizer is refused by the worker: one message, exit 78."""
    code, _, errors = packtrain(
        home, "train", "first-light", "--data", store, *sets(train__steps="4", model__vocab="128")
    )
    assert code == 78 and errors.startswith("[data.tokenizer_mismatch]") and "Traceback" not in errors


def test_by_hand_neither_restore_nor_fresh(home: pathlib.Path, store: str) -> None:
    """A worker started by hand on a new run without --fresh is refused: nothing starts from random by accident."""
    run = launch.create(LocalPlatform(), "mine", spec.resolve("first-light", [], store))
    done = subprocess.run(
        [sys.executable, "-m", "packtrain.train", run.folder], env=environment(home), text=True, capture_output=True,
        check=False,
    )
    assert done.returncode == 78 and done.stderr.startswith("[checkpoint.neither_restore_nor_fresh]")
    assert "--fresh" in done.stderr


def test_runs_without_any(home: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty home is not an error."""
    assert call("runs") == 0
    assert "no runs in" in capsys.readouterr().out
