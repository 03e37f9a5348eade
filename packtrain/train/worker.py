"""One worker process, from its environment to its exit code.

In:    the environment of `core.contract`, or a run folder by hand; the newest spec of the run.
Out:   journal records, beats, saves offered to the carrier, an exit code: 0 done, 75 start me again (stopped on request
       included), 78 never start me again as I am configured, 70 a fault of ours, with a traceback in the log.
Fails: every PacktrainError is printed as what, where and what next, and journalled; it is no traceback.

JAX is imported late: a wrong environment or spec is refused at once, and beats go out while it loads.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType

from packtrain.core.contract import RUN, Beats
from packtrain.core.errors import EXIT_DONE, EXIT_OURS, GuardRollback, GuardStopped, PacktrainError, StoppedOnRequest
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import ErrorSeen
from packtrain.train.seat import Desk, seated
from packtrain.train.sections import load

AGREED = (StoppedOnRequest, GuardStopped, GuardRollback)
"""Endings all ranks reach together; after any other, nobody waits for the rest of the world."""


class Signals:
    """SIGTERM becomes this rank's order to stop, whenever it comes; SIGINT is the foreground's business."""

    def __init__(self, by_hand: bool) -> None:
        self._came = False
        self._tell: Callable[[], None] | None = None
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle if by_hand else signal.SIG_IGN)

    def forward(self, tell: Callable[[], None]) -> None:
        """From now on `tell` hears of it; at once when it came already."""
        self._tell = tell
        if self._came:
            tell()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._came = True
        signal.signal(signal.SIGINT, signal.SIG_DFL if signum == signal.SIGINT else signal.getsignal(signal.SIGINT))
        if self._tell is not None:
            self._tell()


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m packtrain.train", description="Train one rank of a run.")
    parser.add_argument("run", nargs="?", default="", help="run folder; PACKTRAIN_RUN names it under a supervisor")
    parser.add_argument("--fresh", action="store_true", help="by hand: start a run from nothing")
    arguments = parser.parse_args(argv)
    if not arguments.run and not env.get(RUN):
        parser.error("give a run folder")
    signals = Signals(by_hand=not env.get(RUN))
    try:
        with ExitStack() as stack:
            return _seat(arguments.run, arguments.fresh, env, signals, stack)
    except PacktrainError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return EXIT_OURS


def _seat(run: str, fresh: bool, env: Mapping[str, str], signals: Signals, stack: ExitStack) -> int:
    platform = LocalPlatform()
    run = run or env[RUN]
    spec = load(platform, run)
    place = stack.enter_context(seated(platform, env, run, fresh))
    journal = Journal(platform, os.path.join(place.run, "journal"), "trainer", place.rank)
    stack.callback(journal.close)
    beats = Beats(place.socket or None, place.attempt, place.rank)
    stack.callback(beats.close)
    return _work(Desk(platform, place, spec, journal, beats, signals.forward))


def _work(desk: Desk) -> int:
    """Train. An error is journalled before it leaves, so that whoever watches knows it from the record."""
    from packtrain.train import assemble

    agreed = False
    try:
        assemble.join_world(desk.place)
        assemble.train(desk)
        agreed = True
        return EXIT_DONE
    except PacktrainError as error:
        agreed = isinstance(error, AGREED)
        seen = ErrorSeen(severity="error", name=error.name, what=error.what, where=error.where, fix=error.fix)
        desk.journal.write(seen, durable=True)
        raise
    finally:
        if agreed:
            assemble.leave_world(desk.place)
