"""The foreground on real processes: a worker without JAX, the real carrier, real signals and kills."""

from __future__ import annotations

import pathlib
import random
import signal

import pytest

from packtrain.checkpoint import asked
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
from tests.supervise.runs import (
    drive,
    driven,
    expected,
    kill,
    leftovers,
    log,
    processes,
    records,
    restore_point,
    saved_state,
)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run"


def test_done(folder: pathlib.Path) -> None:
    """A worker that finishes ends the command with 0, its last state published and every record in place."""
    assert drive(folder, {"steps": 30, "save_every": 10}) == (0, "")
    assert saved_state(folder) == expected(30)
    assert len(records(folder, RunCreated)) == len(records(folder, AttemptBegan)) == 1
    ended = records(folder, AttemptEnded)
    assert [(one.exit_code, one.reason) for one in ended] == [(0, "done")]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_and_the_same_command_resumes(folder: pathlib.Path, signum: int) -> None:
    """A request to stop ends in 75 with the state saved; the same command goes on from there to the same result."""
    toy = {"steps": 400, "step_s": 0.01}
    with driven(folder, toy) as run:
        run.until("beat 5")
        run.signal(signum)
        code, errors = run.end()
    assert code == 75 and "run.stopped_on_request" in errors
    stopped_at = restore_point(folder).step
    assert 5 <= stopped_at < 400 and saved_state(folder) == expected(stopped_at)
    assert [order.word for order in records(folder, OrderGiven)] == ["stop"]
    assert drive(folder, toy | {"step_s": 0}) == (0, "")
    assert saved_state(folder) == expected(400)
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, stopped_at]
    assert len(records(folder, RunCreated)) == 1


def test_a_second_signal_kills(folder: pathlib.Path) -> None:
    """Asked twice, a worker that does not listen is killed at once, and the command still ends in 75."""
    with driven(folder, {"steps": 10**9, "step_s": 0.01, "fail": {"1": [0, "deaf"]}}) as run:
        run.until("beat 5")
        run.signal(signal.SIGINT)
        run.until("say SIGINT")
        run.signal(signal.SIGINT)
        code, errors = run.end()
    assert code == 75 and "asked twice" in errors
    assert records(folder, AttemptEnded)[0].exit_code == -9


def test_the_grace_ends_in_sigkill(folder: pathlib.Path) -> None:
    """A worker that does not stop within the grace is killed, and the command says that it was not clean."""
    toy = {"steps": 10**9, "step_s": 0.01, "fail": {"1": [0, "deaf"]}}
    with driven(folder, toy, "FAST", grace_s=2) as run:
        run.until("beat 5")
        run.signal(signal.SIGTERM)
        code, errors = run.end()
    assert code == 75 and "not cleanly" in errors and "supervise.grace_s" in errors


def test_a_crash_is_restarted(folder: pathlib.Path) -> None:
    """After a crash another attempt goes on from the last published step, and the result is the uninterrupted one."""
    toy = {"steps": 30, "save_every": 10, "wait": True, "step_s": 0.02, "fail": {"1": [15, "crash"]}}
    assert drive(folder, toy) == (0, "")
    assert saved_state(folder) == expected(30)
    first, second = records(folder, AttemptEnded)
    assert first.exit_code == 1 and "ValueError: planted" in first.reason and second.exit_code == 0
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, 10]
    assert [error.name for error in records(folder, ErrorSeen)] == ["run.worker_crashed"]
    told = [(folder / "logs" / attempt / "0.log").read_text() for attempt in ("0001", "0002")]
    assert [text.split()[0] for text in told] == ["0", "1"], "attempts that failed before it"


def test_a_run_begins_where_it_was_asked_to(folder: pathlib.Path) -> None:
    """After `ckpt restore` the next attempt begins from that save, once; a crash later goes on from its own saves."""
    toy = {"steps": 30, "save_every": 10, "wait": True}
    assert drive(folder, toy) == (0, "")
    first = next(commit for commit in log(folder).all() if commit.kind == "save")
    asked.wish(LocalPlatform(), str(folder), first, log(folder).head())
    assert drive(folder, toy | {"step_s": 0.02, "fail": {"2": [25, "crash"]}}) == (0, "")
    assert saved_state(folder) == expected(30)
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, 10, 20]


def test_a_crash_loop_ends(folder: pathlib.Path) -> None:
    """Crashing at the same step again and again ends in NoProgress and 70 after the attempts allowed."""
    fail = {str(attempt): [5, "crash"] for attempt in range(1, 9)}
    code, errors = drive(folder, {"steps": 30, "fail": fail}, attempts_without_progress=2)
    assert code == 70 and "run.no_progress" in errors and "ValueError: planted" in errors
    assert len(records(folder, AttemptBegan)) == 3  # the first one made progress


def test_75_unasked_is_restarted(folder: pathlib.Path) -> None:
    """A worker that asks for it is started again."""
    assert drive(folder, {"steps": 9, "fail": {"1": [5, "75"]}}) == (0, "")
    assert [one.exit_code for one in records(folder, AttemptEnded)] == [75, 0]


def test_78_is_never_restarted(folder: pathlib.Path) -> None:
    """A refused configuration ends in 78 with the worker's own message, after one attempt."""
    code, errors = drive(folder, {"fail": {"1": [3, "78"]}})
    assert code == 78
    assert errors == "[checkpoint.other_model] planted\n  where: the toy\n  next:  plant nothing\n"
    assert len(records(folder, AttemptBegan)) == 1


def test_a_second_command_on_one_run_is_refused(folder: pathlib.Path) -> None:
    """Of two commands on one run the second ends in 78 naming the first, and the first goes on."""
    with driven(folder, {"steps": 10**9, "step_s": 0.01}, job="the first job") as run:
        run.until("beat 3")
        code, errors = drive_beside(folder)
        assert code == 78 and "run.held" in errors
        assert "the first job" in errors and f"process {run.process.pid}" in errors
        run.signal(signal.SIGTERM)
        assert run.end()[0] == 75
    assert log(folder).all()[-1].attempt == 1


def drive_beside(folder: pathlib.Path) -> tuple[int, str]:
    """A second command, while processes of the first are alive."""
    with driven(folder, {}, job="the second job") as second:
        _, errors = second.process.communicate()
        return second.process.returncode, errors


def test_a_killed_carrier_does_not_disturb_the_worker(folder: pathlib.Path) -> None:
    """A carrier that is killed is replaced on the same socket; the worker goes on and later saves are published."""
    with driven(folder, {"steps": 150, "save_every": 20, "step_s": 0.01}) as run:
        run.until("beat 30")
        kill(folder, "packtrain.checkpoint.carrier")
        assert run.end() == (0, "")
    assert saved_state(folder) == expected(150)
    assert len(records(folder, AttemptBegan)) == 1
    assert [error.name for error in records(folder, ErrorSeen)] == ["checkpoint.carrier_lost"]


def test_a_carrier_that_cannot_be_started_is_tried_again(folder: pathlib.Path) -> None:
    """When there is no memory for another carrier the worker goes on, and the next one comes a little later."""
    with driven(folder, {"steps": 60, "step_s": 0.01}, "CROWDED") as run:
        run.until("beat 10")
        kill(folder, "packtrain.checkpoint.carrier")
        assert run.end() == (0, "")
    assert saved_state(folder) == expected(60)
    assert len(records(folder, AttemptBegan)) == 1
    assert [error.name for error in records(folder, ErrorSeen)] == ["checkpoint.carrier_lost"] * 2


def test_a_carrier_that_answers_nothing_is_given_up(folder: pathlib.Path) -> None:
    """A carrier that answers stays; one that stands still is killed and another one takes its place, with one warning
    and a record; the worker goes on, and later saves are published."""
    toy = {"steps": 100_000, "save_every": 20, "step_s": 0.01}
    with driven(folder, toy, "FAST", carrier_overdue_s=10.0) as run:
        run.until("beat 420")  # longer than one that starts may be silent
        stopped = kill(folder, "packtrain.checkpoint.carrier", signal.SIGSTOP)
        assert "answered nothing for 10 s" in run.until("say the carrier")
        stopped.wait(10)
        run.signal(signal.SIGINT)
        assert run.end()[0] == 75
    assert saved_state(folder) == expected(restore_point(folder).step) and len(records(folder, AttemptBegan)) == 1
    assert [one.quarantine for one in records(folder, CarrierGivenUp)] == [[]]
    hung = [error for error in records(folder, ErrorSeen) if error.name == "checkpoint.carrier_hung"]
    assert len(hung) == 1 and hung[0].severity == "warning" and hung[0].where and hung[0].fix


def test_a_carrier_that_hangs_does_not_hold_the_end(folder: pathlib.Path) -> None:
    """A carrier that not even SIGKILL ends is told of and left, and the run ends."""
    with driven(folder, {"steps": 20}, "HANGING") as run:
        assert "was killed and has not ended" in run.until("say process")
        assert run.end() == (0, "")


def test_a_journal_that_cannot_be_listed_now_ends_nothing(folder: pathlib.Path) -> None:
    """While the journal's folder refuses to be listed there is no news; the worker goes on."""
    code, errors = drive(folder, {"steps": 40, "step_s": 0.01, "fail": {"1": [20, "crash"]}}, "UNLISTABLE")
    assert (code, errors) == (0, "") and saved_state(folder) == expected(40)
    assert len(records(folder, AttemptBegan)) == 2


def test_silence_is_killed_and_restarted(folder: pathlib.Path) -> None:
    """A worker that is alive and silent is killed when its beats are overdue, and the run goes on."""
    code, errors = drive(folder, {"steps": 20, "fail": {"1": [10, "stop"]}}, "FAST", beat_overdue_s=5)
    assert (code, errors) == (0, "")
    first = records(folder, AttemptEnded)[0]
    assert first.exit_code == -9 and "silent for 5 s" in first.reason


def test_no_child_of_a_worker_is_left(folder: pathlib.Path) -> None:
    """What a worker started and left behind when it ended is killed with it."""
    with driven(folder, {"steps": 9, "fail": {"1": [5, "child"]}}) as run:
        assert run.end() == (0, "")


def test_a_killed_foreground_leaves_nothing(folder: pathlib.Path) -> None:
    """kill -9 of the foreground takes carrier and worker with it, and the same command goes on."""
    toy = {"steps": 200, "save_every": 10, "wait": True, "step_s": 0.01}
    with driven(folder, toy) as run:
        run.until("beat 50")
        run.signal(signal.SIGKILL)
        run.process.communicate()
        assert not leftovers(folder)
    assert drive(folder, toy | {"step_s": 0}) == (0, "")
    assert saved_state(folder) == expected(200)


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


def test_retention_runs_through_the_carrier(folder: pathlib.Path) -> None:
    """After saves, what the plan retires is retired by the carrier and written down; what is kept stays."""
    toy = {"steps": 60, "save_every": 10, "wait": True, "step_s": 0.02}
    assert drive(folder, toy, keep_last=2, purge_grace_s=0) == (0, "")
    done = records(folder, RetentionDone)
    assert {one.action for one in done} == {"tombstone", "purge"}
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    purged = {one.folder for one in done if one.action == "purge"}
    assert not left & purged and restore_point(folder).folder in left and len(left) >= 2
    assert saved_state(folder) == expected(60)


def test_no_attempt_begins_on_an_unknown_log(folder: pathlib.Path) -> None:
    """A damaged last record ends the command in 75 before anything begins, and nothing is appended to the log."""
    assert drive(folder, {"steps": 5})[0] == 0
    records_before = sorted((folder / "commits").iterdir())
    last = records_before[-1]
    last.write_bytes(last.read_bytes()[:-9] + b"damaged}\n")
    code, errors = drive(folder, {"steps": 9})
    assert code == 75 and "commits.unknown" in errors
    assert sorted((folder / "commits").iterdir()) == records_before
    assert len(records(folder, AttemptBegan)) == 1


def test_a_file_system_without_links_is_refused(folder: pathlib.Path) -> None:
    """Where link(2) is no exclusive create the command ends in 78 before anything begins."""
    code, errors = drive(folder, {"steps": 5}, "LINKLESS")
    assert code == 78 and errors.startswith("[commits.unfit]")
    assert list((folder / "commits").iterdir()) == [] and not (folder / "logs").exists()


def test_one_carrier_at_a_time(folder: pathlib.Path) -> None:
    """When an attempt ends its carrier does too: the next attempt has the only one."""
    with driven(folder, {"steps": 10**9, "step_s": 0.01, "fail": {"1": [5, "crash"]}}) as run:
        run.until("say the worker ended")
        run.until("beat 9")
        carriers = [p for p in processes(folder) if "packtrain.checkpoint.carrier" in p.cmdline()]
        assert len(carriers) == 1
        run.signal(signal.SIGINT)
        assert run.end()[0] == 75


def test_a_folder_that_cannot_be_used_is_one_message(folder: pathlib.Path) -> None:
    """Where the run folder refuses what an attempt needs, the command ends in 75 with the place and what to do."""
    folder.mkdir()
    (folder / "logs").write_text("in the way")
    code, errors = drive(folder, {"steps": 5})
    assert code == 75 and errors.startswith("[run.unusable]") and str(folder / "logs") in errors
    assert "Traceback" not in errors


def test_a_broken_display_does_not_break_the_run(folder: pathlib.Path) -> None:
    """A view that raises is told of once, as a warning, and the run goes on to its end."""
    assert drive(folder, {"steps": 30, "step_s": 0.02}, "BROKEN_VIEW") == (0, "")
    (warning,) = records(folder, ErrorSeen)
    assert warning.severity == "warning" and "a fault of the display" in warning.what


def test_a_disk_that_takes_no_save_is_a_warning_until_the_last_one(folder: pathlib.Path) -> None:
    """Saves that fail leave the run going; when the last one finds no home the command ends in 75, and once only."""
    folder.mkdir()
    (folder / "checkpoints").write_text("in the way")
    code, errors = drive(folder, {"steps": 40, "save_every": 10, "deadline_s": 1.0})
    assert code == 75 and errors.startswith("[checkpoint.save_failed]")
    assert [one.exit_code for one in records(folder, AttemptEnded)] == [75]
    (folder / "checkpoints").unlink()
    assert drive(folder, {"steps": 40}) == (0, "") and saved_state(folder) == expected(40)


def test_a_rollback_passes_over_what_does_not_open(folder: pathlib.Path) -> None:
    """Going back, a save that is gone is passed over at once, and no save that is whole is."""
    assert drive(folder, {"steps": 40, "save_every": 10, "wait": True}, keep_last=9)[0] == 0
    last, before, *_ = sorted((folder / "checkpoints").iterdir(), reverse=True)
    image = last / "part-r00000.safetensors"
    image.write_bytes(image.read_bytes()[:-1] + b"!")
    (before / "manifest.json").unlink()
    assert drive(folder, {"steps": 50}, keep_last=9) == (0, "") and saved_state(folder) == expected(50)
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, 40, 40, 20]


def test_a_damaged_checkpoint_is_left_for_the_one_before(folder: pathlib.Path) -> None:
    """When the newest checkpoint cannot be read the run goes back one save, says so, and ends with the right result."""
    assert drive(folder, {"steps": 20, "save_every": 10, "wait": True})[0] == 0
    image = folder / "checkpoints" / restore_point(folder).folder / "part-r00000.safetensors"
    image.write_bytes(image.read_bytes()[:-1] + b"!")
    assert drive(folder, {"steps": 40}) == (0, "") and saved_state(folder) == expected(40)
    assert [began.restore_step for began in records(folder, AttemptBegan)] == [-1, 20, 20, 10]
    assert {error.name for error in records(folder, ErrorSeen)} == {"run.worker_crashed", "checkpoint.damaged"}
