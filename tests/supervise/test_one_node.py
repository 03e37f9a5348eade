"""A run of one node on real processes, as `packtrain train` starts one: coordinator, agent, carrier, a worker without
JAX; real signals and kills. What follows what is in test_policy.py and test_led.py; here is that it does."""

from __future__ import annotations

import os
import pathlib
import random
import signal

import pytest

from packtrain.core.platform import LocalPlatform
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    CarrierGivenUp,
    ErrorSeen,
    OrderGiven,
    RetentionDone,
    RunCreated,
)
from packtrain.supervise import local
from tests.supervise.runs import (
    drive,
    driven,
    expected,
    kill,
    log,
    records,
    restore_point,
    saved_state,
)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run"


def test_a_run_is_healed_stopped_and_goes_on(folder: pathlib.Path) -> None:
    """A crash leads to another attempt from the last save; Ctrl-C saves and ends the command with 75; the same command
    goes on to the result of an undisturbed run, what retention retires is gone, every record is in place, and nothing
    of the run is left outside its folder."""
    toy = {"steps": 200, "save_every": 10, "wait": True, "step_s": 0.02, "fail": {"1": [15, "crash"]}}
    options = {"keep_last": 2, "purge_grace_s": 0}
    with driven(folder, toy, **options) as run:
        assert "ValueError: planted" in run.until("say warning: [run.worker_crashed]")
        run.until_step(25)
        base = local.find(LocalPlatform(), str(folder)).base  # type: ignore[union-attr]
        run.signal(signal.SIGINT)
        code, errors = run.end()
    assert code == 75 and "run.stopped_on_request" in errors and not os.path.exists(base)
    stopped_at = restore_point(folder).step
    assert 25 <= stopped_at < 200 and saved_state(folder) == expected(stopped_at)
    assert drive(folder, toy | {"steps": 250, "step_s": 0}, **options) == (0, "")
    assert saved_state(folder) == expected(250)
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, 10, stopped_at]
    assert [one.exit_code for one in records(folder, AttemptEnded)] == [1, 75, 0]
    assert [order.word for order in records(folder, OrderGiven)] == ["stop"] and len(records(folder, RunCreated)) == 1
    assert [error.name for error in records(folder, ErrorSeen)] == ["run.worker_crashed"]
    told = [(folder / "logs" / attempt / "0.log").read_text() for attempt in ("0001", "0002")]
    assert [text.split()[0] for text in told] == ["0", "1"], "attempts that failed before it"
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    purged = {one.folder for one in records(folder, RetentionDone) if one.action == "purge"}
    assert purged and not left & purged and restore_point(folder).folder in left and len(left) >= 2


def test_the_best_saves_stay_over_restarts(folder: pathlib.Path) -> None:
    """Those with the lowest held-out losses outlive a crash, a newer and worse one, and the end of the run; a better
    one that comes when the run is made longer frees the worse of them."""
    losses = {"10": 5.0, "20": 1.0, "30": float("nan"), "40": 2.0, "50": 3.0, "70": 1.5, "80": 9.0}
    toy = {"steps": 60, "save_every": 10, "wait": True, "losses": losses, "fail": {"1": [25, "crash"]}}
    options = {"keep_last": 1, "keep_best": 2, "purge_grace_s": 0}
    assert drive(folder, toy, **options) == (0, "")
    assert steps_kept(folder) == [20, 40, 60]
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, 20]
    assert drive(folder, toy | {"steps": 90}, **options) == (0, "")
    assert steps_kept(folder) == [20, 70, 90] and saved_state(folder) == expected(90)


def steps_kept(folder: pathlib.Path) -> list[int]:
    """Of the checkpoints that are there and have no tombstone: the last plan may be carried out by a later carrier."""
    marked = {path.stem for path in (folder / "tombstones").iterdir()}
    names = {path.name for path in (folder / "checkpoints").iterdir()} - marked
    return sorted(int(name[5:13]) for name in names)


def test_a_killed_watcher_leaves_the_run_alone(folder: pathlib.Path) -> None:
    """kill -9 of the command disturbs nothing: the same command finds the run alive and watches it, and where its
    display breaks that is said and disturbs nothing either."""
    toy = {"steps": 10**9, "step_s": 0.02}
    with driven(folder, toy) as first:
        first.until_step(5)
        first.signal(signal.SIGKILL)
        first.process.communicate()
        with driven(folder, toy, "BROKEN_VIEW") as second:
            second.until("say run runs already")
            second.signal(signal.SIGTERM)
            code, errors = second.end()
    assert code == 75 and "a fault of the display" in errors and "run.stopped_on_request" in errors
    assert len(records(folder, AttemptBegan)) == 1 and saved_state(folder) == expected(restore_point(folder).step)


@pytest.mark.soak
def test_a_second_signal_kills(folder: pathlib.Path) -> None:
    """Asked twice, a worker that does not listen is killed at once, and the command still ends in 75."""
    with driven(folder, {"steps": 10**9, "step_s": 0.01, "fail": {"1": [0, "deaf"]}}) as run:
        run.until_step(5)
        run.signal(signal.SIGINT)
        run.until("say SIGINT")
        run.signal(signal.SIGINT)
        code, errors = run.end()
    assert code == 75 and "asked twice" in errors
    assert records(folder, AttemptEnded)[0].exit_code == -9


@pytest.mark.soak
def test_a_carrier_that_answers_nothing_is_given_up(folder: pathlib.Path) -> None:
    """One that stands still is killed and another one takes its place, with one warning and a record; the worker goes
    on, and later saves are published. One that is killed is replaced as well."""
    toy = {"steps": 10**9, "save_every": 20, "step_s": 0.01}
    with driven(folder, toy, carrier_overdue_s=5.0) as run:
        run.until_step(100)
        kill(folder, "packtrain.checkpoint.carrier")
        run.until("say warning: [checkpoint.carrier_lost]")
        run.until_step(1000)  # longer than one that starts may be silent
        stopped = kill(folder, "packtrain.checkpoint.carrier", signal.SIGSTOP)
        assert "answered nothing for 5 s" in run.until("say warning: [checkpoint.carrier_hung]")
        stopped.wait(10)
        run.signal(signal.SIGINT)
        assert run.end()[0] == 75
    assert saved_state(folder) == expected(restore_point(folder).step) and len(records(folder, AttemptBegan)) == 1
    assert [(one.quarantine, one.node) for one in records(folder, CarrierGivenUp)] == [([], "n0")]
    hung = [error for error in records(folder, ErrorSeen) if error.name == "checkpoint.carrier_hung"]
    assert len(hung) == 1 and hung[0].severity == "warning" and hung[0].where and hung[0].fix


@pytest.mark.soak
def test_silence_and_what_is_left_behind(folder: pathlib.Path) -> None:
    """A worker that is alive and silent is killed when its beats are overdue; what another one started and left behind
    goes with it; and the run ends well."""
    toy = {"steps": 30, "fail": {"1": [10, "stop"], "2": [15, "child"]}}
    assert drive(folder, toy, beat_overdue_s=5) == (0, "")
    first = records(folder, AttemptEnded)[0]
    assert first.exit_code == -9 and "silent for 5 s" in first.reason and saved_state(folder) == expected(30)


@pytest.mark.soak
def test_a_killed_agent_or_coordinator_is_started_again(folder: pathlib.Path) -> None:
    """By whoever watches: a coordinator touches no worker, an agent takes them with it and another attempt begins."""
    with driven(folder, {"steps": 10**9, "save_every": 10, "wait": True, "step_s": 0.01}) as run:
        run.until_step(20)
        kill(folder, "packtrain.supervise.coordinator")
        run.until("say the coordinator is gone")
        run.until_step(200)
        kill(folder, "packtrain.supervise.agent")
        run.until("say the agent of n0 had ended")
        while len(records(folder, AttemptBegan)) < 2:
            run.until("step")
        run.signal(signal.SIGINT)
        assert run.end()[0] == 75
    assert [one.exit_code for one in records(folder, AttemptEnded)] == [-9, 75]
    assert saved_state(folder) == expected(restore_point(folder).step)


@pytest.mark.soak
def test_twenty_kills(folder: pathlib.Path) -> None:
    """Killed twenty times at seeded moments, during saves too, the run ends with the uninterrupted result."""
    chance = random.Random(20)
    fail = {str(attempt): [8 * attempt + chance.randrange(8), "kill"] for attempt in range(1, 21)}
    toy = {"steps": 200, "save_every": 4, "step_s": 0.002, "fail": fail}
    assert drive(folder, toy, attempts_without_progress=5) == (0, "")
    assert saved_state(folder) == expected(200)
    assert [one.exit_code for one in records(folder, AttemptEnded)] == [-9] * 20 + [0]
    begun = [commit for commit in log(folder).all() if commit.kind == "begin"]
    assert [commit.attempt for commit in begun] == list(range(1, 22))


@pytest.mark.soak
def test_a_disk_that_takes_no_save_is_a_warning_until_the_last_one(folder: pathlib.Path) -> None:
    """Saves that fail leave the run going; when the last one finds no home the command ends in 75, and once only."""
    folder.mkdir()
    (folder / "checkpoints").write_text("in the way")
    code, errors = drive(folder, {"steps": 40, "save_every": 10, "deadline_s": 1.0})
    assert code == 75 and errors.startswith("[checkpoint.save_failed]")
    assert [one.exit_code for one in records(folder, AttemptEnded)] == [75]
    (folder / "checkpoints").unlink()
    assert drive(folder, {"steps": 40}) == (0, "") and saved_state(folder) == expected(40)


@pytest.mark.soak
def test_a_damaged_checkpoint_is_left_for_the_one_before(folder: pathlib.Path) -> None:
    """When the newest checkpoint cannot be read the run goes back one save, says so, and ends with the right result."""
    assert drive(folder, {"steps": 20, "save_every": 10, "wait": True})[0] == 0
    image = folder / "checkpoints" / restore_point(folder).folder / "part-r00000.safetensors"
    image.write_bytes(image.read_bytes()[:-1] + b"!")
    assert drive(folder, {"steps": 40}) == (0, "") and saved_state(folder) == expected(40)
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, 20, 20, 10]
    assert {error.name for error in records(folder, ErrorSeen)} == {"checkpoint.damaged"}
