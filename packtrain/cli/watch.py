"""Staying with a run whose coordinator and agents live on their own: show it, pass on what a person asks, and its end.

Whoever watches may go at any moment: nothing that trains hangs on this process.
"""

from __future__ import annotations

import select
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from packtrain.core.contract import PHASES, Beat
from packtrain.core.errors import EXIT_DONE, CoordinatorGone, PacktrainError, RunUnusable, error_named
from packtrain.core.holder import seems_held
from packtrain.core.journal import Entry, Tail
from packtrain.core.platform import Platform
from packtrain.core.records import (
    AgentStarted,
    AttemptBegan,
    CoordinatorBegan,
    ErrorSeen,
    HomeBack,
    MirrorDone,
    NodeDrained,
    RunFinished,
    WorldChosen,
)
from packtrain.core.units import NS
from packtrain.supervise import local
from packtrain.supervise.console import ask
from packtrain.supervise.requests import Requests

LOOK_S = 0.2
STATUS_NS = NS
ANSWER_NS = 30 * NS
"""How long the question at Ctrl-C stands."""
REVIVE_NS = 10 * NS
"""A coordinator that was just started has so long to answer before another one is."""
REVIVALS_MAX, REVIVALS_NS = 10, 60 * NS
"""More than so many in such a time end as the one before, whatever they are."""
DETACHED = "detached"
QUESTION = "Ctrl-C: s = save and stop, d = detach (the run goes on), any other key = stay; then Enter"


class View(Protocol):
    """What is shown. Never asked for anything, so a view cannot change what happens."""

    def entries(self, entries: Sequence[Entry]) -> None:
        """Journal entries, each once, the past of the run first."""

    def beat(self, beat: Beat) -> None: ...

    def say(self, text: str) -> None:
        """One line about what was just done."""

    def tick(self, now_ns: int) -> None:
        """Called several times a second."""


class Shielded:
    """A view that may break without breaking anything: that is told once on stderr, and it is not used any more."""

    def __init__(self, view: View) -> None:
        self._view, self._broken = view, False

    def entries(self, entries: Sequence[Entry]) -> None:
        self._try(self._view.entries, entries)

    def beat(self, beat: Beat) -> None:
        self._try(self._view.beat, beat)

    def say(self, text: str) -> None:
        self._try(self._view.say, text)

    def tick(self, now_ns: int) -> None:
        self._try(self._view.tick, now_ns)

    def _try(self, call: Callable[[Any], None], argument: Any) -> None:
        if self._broken:
            return
        try:
            call(argument)
        except Exception as error:
            self._broken = True
            with suppress(OSError):
                print(f"the display broke, the run goes on: {type(error).__name__}: {error}", file=sys.stderr)


class Revivals:
    """How often something was started again lately. Times are nanoseconds since boot."""

    def __init__(self) -> None:
        self._dates: deque[int] = deque(maxlen=REVIVALS_MAX)

    def too_many(self, now_ns: int) -> bool:
        return len(self._dates) == REVIVALS_MAX and now_ns - self._dates[0] < REVIVALS_NS

    def note(self, now_ns: int) -> None:
        self._dates.append(now_ns)


class Watch:
    """One person at one run."""

    def __init__(self, platform: Platform, keeper: local.Keeper, view: View) -> None:
        self._platform, self._keeper, self._view = platform, keeper, Shielded(view)
        self._home = keeper.live.coordinator
        self._tail = Tail(platform, f"{keeper.live.run_folder}/journal")
        self._begun_ns = self._heard_ns = platform.boot_ns()
        self._asked_ns = self._status_ns = 0
        self._revivals = Revivals()
        self._stopping = self._mute = False
        self._unheard = ""
        """Who asks to stop, while no coordinator has heard of it."""
        self._waits = ""
        """What the coordinator said it waits for."""
        self._past = True
        """Of what the journal holds already nothing is said again."""
        self._drained: list[str] = []
        """Nodes that the world is left without, while no attempt has begun since."""
        self._ended: RunFinished | None = None

    def run(self, requests: Requests, terminal: bool) -> local.Finish:
        """How the run ended, or that it goes on without a watcher (exit code 0). `terminal`: what Ctrl-C means is asked
        there; else it means stop. Raises RunUnusable."""
        while True:
            self._show()
            finish = self._finish()
            if finish is not None:
                self._show()
                return finish
            if self._told(requests, terminal):
                return local.Finish(EXIT_DONE, DETACHED)
            if self._unheard:
                self._stop(self._unheard)
            self._status()
            self._platform.sleep(LOOK_S)

    # --- what is seen ---

    def _show(self) -> None:
        with suppress(OSError):
            entries = self._tail.poll()
            self._view.entries(entries)
            for entry in entries if not self._past else ():
                self._say_news(entry.record)
            self._past = False
        self._view.tick(self._platform.boot_ns())

    def _say_news(self, record: object) -> None:
        match record:
            case ErrorSeen(severity="warning"):
                error = error_named(record.name, record.what, record.where, record.fix)
                self._view.say(f"warning: {error.render()}")
            case AttemptBegan() if record.note:
                self._view.say(record.note)
            case HomeBack():
                self._view.say(f"{record.path} answers again: saves may go there")
            case MirrorDone() if not record.error:
                self._view.say(f"step {record.step} is on {record.mirror}")
            case CoordinatorBegan() if record.by:
                self._view.say(f"the coordinator was gone; {record.by} started another one, the workers go on")
            case AgentStarted():
                self._view.say(f"the agent of {record.node} had ended; started again")
            case NodeDrained():
                self._say_drained(record)
            case WorldChosen() if self._drained:
                self._view.say(
                    f"attempt {record.attempt} goes on without {', '.join(self._drained)}, on {', '.join(record.nodes)}"
                )
                self._drained = []
            case RunFinished():
                self._ended = record

    def _say_drained(self, record: NodeDrained) -> None:
        follows = "its world saves, and goes on without it" if record.in_world else "it had no ranks"
        self._view.say(f"node {record.node} is drained ({record.by}): {follows}")
        self._drained += [record.node] if record.in_world else []

    def _say_waits(self, waits: str) -> None:
        if waits != self._waits and waits:
            self._view.say(waits)
        self._waits = waits

    def _status(self) -> None:
        """Once a second; a coordinator that is gone is started again."""
        now = self._platform.boot_ns()
        if now - self._status_ns < STATUS_NS:
            return
        self._status_ns = now
        try:
            status = ask(self._platform, self._home, "status", watching=True)
        except CoordinatorGone:
            self._missed(now)
            return
        self._heard_ns, self._mute = now, False
        if (beat := beat_of(status)) is not None:
            self._view.beat(beat)
        self._say_waits(str(status.get("waits", "")))

    def _missed(self, now: int) -> None:
        """One that lives and does not answer is waited for: it holds the run, and no other could. Raises RunUnusable
        where another coordinator would end as the last one did."""
        ended = self._keeper.ended
        if (not ended and now - self._heard_ns < REVIVE_NS) or self._finish() is not None:
            return
        if not ended and seems_held(self._platform, self._keeper.live.run_folder):
            if not self._mute:
                self._view.say("the coordinator lives and does not answer (its disk may hang); the workers go on")
            self._mute = True
            return
        if self._revivals.too_many(now) or (ended and self._heard_ns == self._begun_ns):
            log = f"{self._home}/log"
            fix = last_line(self._platform, log) or "read its log"
            raise RunUnusable("the coordinator of this run cannot be started", where=log, fix=fix)
        self._revivals.note(now)
        self._heard_ns = now
        self._view.say("the coordinator is gone; another one is started, the workers go on")
        try:
            self._keeper.coordinator()
        except OSError as error:
            raise RunUnusable(
                f"the coordinator of this run cannot be started again: {error.strerror}", where=self._home,
                fix="if that folder was deleted, all of the run has ended: the same command begins from its last save",
            ) from error

    def _finish(self) -> local.Finish | None:
        """A coordinator that nobody seemed to watch, because this process was stopped, has cleared its home away."""
        ended = self._ended
        if ended is not None and not self._platform.exists(self._home):
            return local.Finish(ended.exit_code, ended.reason, ended.error or None)
        return local.finish_of(self._platform, self._keeper.live)

    # --- what is asked ---

    def _told(self, requests: Requests, terminal: bool) -> bool:
        """Whether to leave the run to itself."""
        for name in requests.take():
            if name == "SIGHUP" or self._unheard:
                return True
            if name == "SIGINT" and terminal and not self._stopping and not self._asked_ns:
                self._asked_ns = self._platform.boot_ns()
                self._view.say(QUESTION)
            else:
                self._stop(name)
        return bool(self._asked_ns) and self._answered()

    def _answered(self) -> bool:
        """Whether the answer is to detach."""
        if self._platform.boot_ns() - self._asked_ns > ANSWER_NS:
            self._asked_ns = 0
            self._view.say("no answer: staying")
        elif select.select([sys.stdin], [], [], 0)[0]:
            answer, self._asked_ns = sys.stdin.readline().strip().lower()[:1], 0
            if answer == "s":
                self._stop("SIGINT")
            return answer == "d"
        return False

    def _stop(self, by: str) -> None:
        """Save and stop; at once, where that was answered before. A coordinator that does not answer, at its start for
        instance, is told as soon as it does."""
        self._asked_ns = 0
        again = self._stopping
        try:
            answer = ask(self._platform, self._home, "stop", by=by, at_once=again)
        except CoordinatorGone:
            if not self._unheard:
                self._view.say(f"{by}: the run stops as soon as its coordinator answers (once more leaves it alone)")
            self._unheard = by
            return
        self._stopping, self._unheard = True, ""
        self._view.say(f"{by}: {'stopping at once' if again else 'saving, then stopping (once more kills)'}")
        if said := answer.get("said"):
            self._view.say(str(said))


def beat_of(status: Mapping[str, Any]) -> Beat | None:
    """What a display knows to draw, from the coordinator's answer; None: nothing runs."""
    step, attempt = status.get("step", -1), status.get("attempt", 0)
    if status.get("state") != "running" or type(step) is not int or type(attempt) is not int:
        return None
    phase = "pause" if status.get("paused") else status.get("phase", "step")
    return Beat(0, attempt, 0, 0, phase if phase in PHASES else "other", step, {})


def last_line(platform: Platform, path: str) -> str:
    """Of a log, as far as it can be printed."""
    with suppress(OSError):
        start = max(0, platform.size(path) - 4096)
        lines = platform.read(path, start, 4096).decode(errors="replace").strip().splitlines()
        return "".join(c for c in lines[-1] if c.isprintable())[:300] if lines else ""
    return ""


def told_end(finish: local.Finish) -> PacktrainError | None:
    """The error a run ended with; None: it is done, or stopped as it was asked to."""
    if finish.error is None:
        return None
    texts = (str(finish.error.get(key, "")) for key in ("name", "what", "where", "fix"))
    return error_named(*texts)

