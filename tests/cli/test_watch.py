"""Watching a run that lives on its own, and the words a person says to it; the coordinator is a stand-in."""

from __future__ import annotations

import os
import pathlib
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

from packtrain.cli import spec
from packtrain.cli.watch import (
    DETACHED,
    REVIVALS_MAX,
    REVIVALS_NS,
    Revivals,
    Watch,
    beat_of,
    last_line,
    told_end,
)
from packtrain.core.contract import Beat
from packtrain.core.errors import CoordinatorGone, PacktrainError, RunUnusable, StoppedOnRequest
from packtrain.core.holder import hold
from packtrain.core.journal import Entry, Journal
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import AttemptBegan, HomeBack, MirrorDone, NodeDrained, WorldChosen
from packtrain.core.units import NS
from packtrain.recipes.spec import RunSpec
from packtrain.supervise import local
from packtrain.supervise.console import OPERATOR, ask
from packtrain.supervise.requests import Requests
from tests.cli.home import environment, said, start
from tests.cli.stand_in import STATUS, StandIn, standing_in

DEADLINE_S = 60


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt-") as path:
        yield pathlib.Path(path) / "b"


@pytest.fixture
def run(home: pathlib.Path) -> str:
    """A run folder, by its name `it`."""
    folder = home / "runs" / "it"
    (folder / "spec").mkdir(parents=True)
    (folder / "spec" / "0001.toml").write_text(spec.text(RunSpec(recipe="first-light")))
    return str(folder)


@pytest.fixture
def there(run: str, base: pathlib.Path) -> Iterator[StandIn]:
    with standing_in(run, base) as made:
        yield made


# --- the console ---------------------------------------------------------------------------------------


def test_an_answer_is_told_and_a_refusal_is_raised(run: str, base: pathlib.Path) -> None:
    """By the name, words and next step that the coordinator gave; no answer, and none that is one, is its absence."""
    platform, home = LocalPlatform(), f"{base}/c"
    with pytest.raises(CoordinatorGone):
        ask(platform, home, "status")
    with standing_in(run, base) as there:
        assert ask(platform, home, "pause")["said"] == "pause: it will be done"
        there.answers["drain"] = {"ok": False, "error": {"name": "usage", "what": "no such node", "fix": "look"}}
        with pytest.raises(PacktrainError, match="no such node"):
            ask(platform, home, "drain", node="n9")
        assert there.asked[-1] == {"op": "drain", "node": "n9"}
        there.answers["save"] = {"ok": False, "error": None}
        with pytest.raises(PacktrainError):
            ask(platform, home, "save")


@pytest.mark.parametrize(
    ("words", "op"),
    [
        (("stop", "it"), {"op": "stop", "by": "packtrain stop", "at_once": False}), (("pause", "it"), {"op": "pause"}),
        (("resume", "it"), {"op": "resume"}),
        (("drain", "it", "n1"), {"op": "drain", "node": "n1", "by": "packtrain drain"}),
        (("cordon", "it", "n1"), {"op": "cordon", "node": "n1", "by": "packtrain cordon"}),
        (("break", "it", "kill"), {"op": "break", "fault": "kill", "node": "", "rank": -1, "seconds": 0, "factor": 0}),
        (
            ("break", "it", "slow", "--node", "n1", "--rank", "2", "--for", "9", "--factor", "1.5"),
            {"op": "break", "fault": "slow", "node": "n1", "rank": 2, "seconds": 9, "factor": 1.5},
        ),
    ],
)
def test_words_reach_the_coordinator(
    there: StandIn, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], op: dict[str, Any]
) -> None:
    """Each verb says its word once, and prints what was answered."""
    code, out, errors = said(capsys, *words)
    assert (code, errors, out) == (0, "", f"{op['op']}: it will be done\n")
    assert [one for one in there.asked if one["op"] != "status"] == [op]


def test_a_run_that_stops_already_is_stopped_at_once(there: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """`packtrain stop` said twice is no word that came twice: the second knows of the first."""
    there.answers["status"] = {**STATUS, "stopping": "packtrain stop"}
    assert said(capsys, "stop", "it")[0] == 0
    assert there.asked[-1] == {"op": "stop", "by": "packtrain stop", "at_once": True}


@pytest.mark.parametrize("words", [("stop", "it"), ("attach", "it"), ("drain", "it", "n1")])
def test_a_run_that_does_not_live_is_told_no_words(
    run: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """One message, and how to find those that do."""
    code, _, errors = said(capsys, *words)
    assert code == 78 and "run.not_live" in errors and "packtrain ps" in errors


def test_what_lives_is_listed(there: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """The run, then each node with its ranks."""
    code, out, _ = said(capsys, "ps")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["run", "node", "state", "ranks", "step"], ["it", "-", "running", "-", "7"],
        ["it", "n0", "runs", "0,", "1", "7"], ["it", "n1", "spare", "-", "-"],
    ]


def test_what_a_run_waits_for_is_listed(there: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside its state: that it is paused, what it waits for, why its log cannot be written."""
    there.answers["status"] = {**STATUS, "state": "waiting", "paused": True, "waits": "bringing it", "log": "disk full"}
    assert "waiting, paused, bringing it, disk full" in said(capsys, "ps")[1]


def test_nothing_lives(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that says so."""
    assert said(capsys, "ps")[:2] == (0, f"no run of {os.path.dirname(run)} lives on its own now\n")


def test_logs(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of each log of the last attempt; of one rank, of an older attempt, of none."""
    for attempt in (1, 2):
        folder = pathlib.Path(run) / "logs" / f"{attempt:04d}"
        folder.mkdir(parents=True)
        for rank in (0, 1):
            (folder / f"{rank}.log").write_text("".join(f"attempt {attempt} rank {rank} line {n}\n" for n in range(50)))
    assert said(capsys, "logs", "it")[1].count("attempt 2 rank") == 80
    assert said(capsys, "logs", "it", "1", "--lines", "1")[1] == "attempt 2 rank 1 line 49\n"
    assert said(capsys, "logs", "it", "0", "--attempt", "1", "--lines", "1")[1] == "attempt 1 rank 0 line 49\n"
    code, _, errors = said(capsys, "logs", "it", "7")
    assert code == 78 and "rank 7 in attempt 0002" in errors


# --- watching ------------------------------------------------------------------------------------------


def watching(home: pathlib.Path) -> subprocess.Popen[str]:
    return start(home, "attach", "it")


def until_watched(process: subprocess.Popen[str], there: StandIn, asked: str = "status") -> None:
    platform = LocalPlatform()
    end_ns = platform.boot_ns() + DEADLINE_S * 10**9
    while asked not in [one["op"] for one in there.asked]:
        assert process.poll() is None and platform.boot_ns() < end_ns, process.communicate()
        platform.sleep(0.02)


def test_without_a_terminal_ctrl_c_stops(home: pathlib.Path, there: StandIn, base: pathlib.Path) -> None:
    """It asks for the stop, waits for the end, tells it, ends with its code, and leaves no folder behind."""
    with watching(home) as process:
        until_watched(process, there)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75 and there.asked[-1] == {"op": "stop", "by": "SIGINT", "at_once": False}
    assert "saving, then stopping" in out and "run.stopped_on_request" in errors
    assert not base.exists() and not (home / "runs" / "it" / local.LIVE).exists()


def test_twice_stops_at_once(home: pathlib.Path, run: str, base: pathlib.Path) -> None:
    """The first was answered, so the second asks for it."""
    with standing_in(run, base, obedient=False) as there, watching(home) as process:
        until_watched(process, there)
        process.send_signal(signal.SIGINT)
        until_watched(process, there, "stop")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=DEADLINE_S)
        assert there.words() == ["stop", "stop"] and "stopping at once" in out
        assert [one["at_once"] for one in there.asked if one["op"] == "stop"] == [False, True]


def test_a_lost_terminal_detaches(home: pathlib.Path, there: StandIn, base: pathlib.Path) -> None:
    """The run goes on: nothing was asked of it, and its folder is there."""
    with watching(home) as process:
        until_watched(process, there)
        process.send_signal(signal.SIGHUP)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0 and there.words() == [] and "packtrain attach it" in out and base.exists()


@pytest.mark.parametrize(("key", "code", "words"), [("d", 0, []), ("s", 75, ["stop"])])
def test_on_a_terminal_ctrl_c_asks(
    home: pathlib.Path, there: StandIn, key: str, code: int, words: list[str]
) -> None:
    """Save and stop, or leave it running."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "packtrain", "attach", "it"], env={**environment(home), "TERM": "xterm"}, stdin=theirs,
        stdout=theirs, stderr=theirs, cwd=home, start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    try:
        while not (there.asked and b"training" in seen):
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        while b"detach" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, key.encode() + b"\n")
        assert process.wait(DEADLINE_S) == code and there.words() == words
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_the_end_of_a_run_is_the_end_of_its_watcher(home: pathlib.Path, there: StandIn) -> None:
    """With the coordinator's exit code, and no message where all is well."""
    with watching(home) as process:
        until_watched(process, there)
        there.finish(0)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")


def test_what_is_waited_for_is_said_once(home: pathlib.Path, there: StandIn) -> None:
    """Each time that it is something else; and that a checkpoint has come to a mirror."""
    there.answers["status"] = {**STATUS, "state": "waiting", "waits": "bringing step 7 to a, b"}
    with watching(home) as process:
        until_watched(process, there)
        there.asked.clear()
        until_watched(process, there)
        there.answers["status"] = {**STATUS, "state": "waiting", "waits": "bringing step 7 to b"}
        with closing(Journal(LocalPlatform(), f"{home}/runs/it/journal", role="carrier")) as journal:
            for error in ("", "refused"):
                journal.write(MirrorDone(mirror=f"a{error}", step=7, commit=3, error=error), durable=True)
        there.asked.clear()
        until_watched(process, there)
        there.asked.clear()
        until_watched(process, there)
        there.finish(0)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert sorted(line for line in out.splitlines() if line.startswith(("bringing", "step 7 is"))) == [
        "bringing step 7 to a, b", "bringing step 7 to b", "step 7 is on a"
    ]


# --- pieces --------------------------------------------------------------------------------------------


def test_what_the_display_is_fed_with() -> None:
    """A coordinator's answer becomes a beat; one that says nothing runs, or that is odd, does not."""
    beat = beat_of(STATUS)
    assert beat is not None and (beat.attempt, beat.step, beat.phase) == (3, 7, "step")
    paused = beat_of({**STATUS, "paused": True})
    assert paused is not None and paused.phase == "pause"
    assert beat_of({**STATUS, "state": "waiting"}) is None and beat_of({**STATUS, "step": "7"}) is None


def test_an_end_is_told_by_its_own_name() -> None:
    """So that exit codes and messages are those of the error."""
    assert told_end(local.Finish(0)) is None
    error = {"name": "run.stopped_on_request", "what": "stopped", "where": "", "fix": ""}
    told = told_end(local.Finish(75, error=error))
    assert isinstance(told, StoppedOnRequest)


def test_the_last_line_of_a_log(tmp_path: pathlib.Path) -> None:
    """What prints of it; nothing where there is none."""
    (tmp_path / "log").write_bytes(b"first\nlast\x1b[31m\n\n")
    assert last_line(LocalPlatform(), str(tmp_path / "log")) == "last[31m"
    assert last_line(LocalPlatform(), str(tmp_path / "none")) == ""


# --- a watcher and a coordinator that is not there yet, or does not answer ------------------------------


class Heard:
    """A view that keeps what is said; `then` is called with it."""

    def __init__(self, then: Callable[[str], object] = lambda text: None) -> None:
        self.said: list[str] = []
        self._then = then

    def entries(self, entries: Sequence[Entry]) -> None: ...

    def beat(self, beat: Beat) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)
        self._then(text)

    def tick(self, now_ns: int) -> None: ...


class Fast(LocalPlatform):
    """A clock fifty times as fast."""

    def boot_ns(self) -> int:
        return 50 * super().boot_ns()

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / 50)


def unanswered(run: str, base: pathlib.Path) -> local.Keeper:
    """Of a run whose coordinator does not listen."""
    with standing_in(run, base):
        live = local.find(LocalPlatform(), run)
    assert live is not None
    (base / "c" / OPERATOR).unlink(missing_ok=True)
    return local.Keeper(LocalPlatform(), live, {})


def test_a_stop_is_said_as_soon_as_somebody_listens(run: str, base: pathlib.Path) -> None:
    """Ctrl-C while the coordinator still starts is no lost word."""
    keeper, requests, there = unanswered(run, base), Requests(), list[StandIn]()
    view = Heard(lambda text: there.append(StandIn(base / "c")) if "as soon as its coordinator" in text else None)
    requests.arrive(signal.SIGINT)
    finish = Watch(LocalPlatform(), keeper, view).run(requests, terminal=False)
    there[0].close()
    assert finish.exit_code == 75 and there[0].words() == ["stop"]
    assert [text for text in view.said if "SIGINT" in text] == [
        "SIGINT: the run stops as soon as its coordinator answers (once more leaves it alone)",
        "SIGINT: saving, then stopping (once more kills)",
    ]


@pytest.mark.parametrize("trouble", ["", "noted, and done as soon as the log can be written: disk full"])
def test_what_is_in_the_way_of_a_stop_is_said(run: str, base: pathlib.Path, trouble: str) -> None:
    """And the run is watched to its end: the word was heard."""
    requests, view = Requests(), Heard()
    requests.arrive(signal.SIGINT)
    with standing_in(run, base) as there:
        live = local.find(LocalPlatform(), run)
        assert live is not None
        there.answers["stop"] = {"ok": True, "said": trouble}
        finish = Watch(LocalPlatform(), local.Keeper(LocalPlatform(), live, {}), view).run(requests, terminal=False)
    assert finish.exit_code == 75
    assert view.said == ["SIGINT: saving, then stopping (once more kills)", *([trouble] if trouble else [])]


def test_asked_twice_while_nobody_listens_it_leaves(run: str, base: pathlib.Path) -> None:
    """A watcher can always be left."""
    requests = Requests()
    for _ in range(2):
        requests.arrive(signal.SIGINT)
    finish = Watch(LocalPlatform(), unanswered(run, base), Heard()).run(requests, terminal=False)
    assert finish == local.Finish(0, DETACHED)


def test_a_coordinator_that_lives_and_does_not_answer_is_waited_for(run: str, base: pathlib.Path) -> None:
    """It holds the run, and no other one could: none is started, and that is said once."""
    keeper, requests, platform = unanswered(run, base), Requests(), Fast()
    lock = hold(platform, run, "another")
    view = Heard(lambda text: requests.arrive(signal.SIGHUP))
    finish = Watch(platform, keeper, view).run(requests, terminal=False)
    lock.release()
    assert finish.reason == DETACHED and keeper.started == {}
    assert view.said == ["the coordinator lives and does not answer (its disk may hang); the workers go on"]


def test_homes_that_were_deleted_are_named(run: str, base: pathlib.Path) -> None:
    """Whoever cleans up folders for temporary files ends a run; who watches it is told so, and how it goes on."""
    keeper = unanswered(run, base)
    shutil.rmtree(base / "c")
    with pytest.raises(RunUnusable, match="cannot be started again: No such file") as refused:
        Watch(Fast(), keeper, Heard()).run(Requests(), terminal=False)
    assert refused.value.where == f"{base}/c" and "from its last save" in refused.value.fix


def test_a_display_that_breaks_is_told_once(there: StandIn, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the run is watched to its end."""

    class Broken(Heard):
        def tick(self, now_ns: int) -> None:
            raise ZeroDivisionError("planted")

    live = local.find(LocalPlatform(), run)
    assert live is not None
    there.finish(0)
    watch = Watch(LocalPlatform(), local.Keeper(LocalPlatform(), live, {}), Broken())
    assert watch.run(Requests(), terminal=False).exit_code == 0
    assert capsys.readouterr().err == "the display broke, the run goes on: ZeroDivisionError: planted\n"


def test_revivals_are_bounded_by_the_minute() -> None:
    """Ten in a minute are too many, ten in a month are not."""
    revivals = Revivals()
    for second in range(REVIVALS_MAX):
        assert not revivals.too_many(second * NS)
        revivals.note(second * NS)
    assert revivals.too_many(REVIVALS_MAX * NS) and not revivals.too_many(REVIVALS_NS)


def test_what_an_attempt_begins_from_is_said(there: StandIn, run: str) -> None:
    """Where it is not the last save: from memory, or brought back from a mirror; and a home that answers again."""
    live = local.find(LocalPlatform(), run)
    assert live is not None
    journal = Journal(LocalPlatform(), f"{run}/journal", role="coordinator")
    journal.write(AttemptBegan(attempt=1, commit=1, parent=0, restore_step=-1, note="of the past"), durable=True)

    class Telling(Heard):
        ticks = 0

        def tick(self, now_ns: int) -> None:
            self.ticks += 1
            if self.ticks == 1:
                note = "step 7 from memory"
                journal.write(AttemptBegan(attempt=2, commit=2, parent=1, restore_step=7, note=note), durable=True)
                journal.write(HomeBack(path="/disk"), durable=True)
                there.finish(0)

    view = Telling()
    Watch(LocalPlatform(), local.Keeper(LocalPlatform(), live, {}), view).run(Requests(), terminal=False)
    journal.close()
    assert view.said == ["step 7 from memory", "/disk answers again: saves may go there"]


def test_a_drained_node_is_named(there: StandIn, run: str) -> None:
    """By whom, and what follows: its world saves, and goes on without it; a spare had no ranks. Of the past nothing."""
    live = local.find(LocalPlatform(), run)
    assert live is not None
    journal = Journal(LocalPlatform(), f"{run}/journal", role="coordinator")
    journal.write(NodeDrained(node="n0", by="of the past", in_world=True), durable=True)

    class Telling(Heard):
        ticks = 0

        def tick(self, now_ns: int) -> None:
            self.ticks += 1
            if self.ticks == 1:
                for node, in_world in (("n3", False), ("n1", True)):
                    journal.write(NodeDrained(node=node, by="packtrain drain", in_world=in_world), durable=True)
                for attempt in (2, 3):
                    world = WorldChosen(attempt=attempt, nodes=["n0", "n2"], procs=1, spares=[], wanted=2)
                    journal.write(world, durable=True)
                there.finish(0)

    view = Telling()
    Watch(LocalPlatform(), local.Keeper(LocalPlatform(), live, {}), view).run(Requests(), terminal=False)
    journal.close()
    assert view.said == [
        "node n3 is drained (packtrain drain): it had no ranks",
        "node n1 is drained (packtrain drain): its world saves, and goes on without it",
        "attempt 2 goes on without n1, on n0, n2",
    ]
