"""One worker process, from its environment to its exit code.

In:    the environment of `core.contract`, or a run folder by hand; the spec that is named there, by hand the newest.
Out:   journal records, beats, saves offered to the carrier, an exit code: 0 done, 75 start me again (stopped on request
       included), 78 never start me again as I am configured, 70 a fault of ours, with a traceback in the log.
Fails: every PacktrainError is printed as what, where and what next, and journalled; it is no traceback.

JAX is imported late: a wrong environment or spec is refused at once, and beats go out while it loads.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import FrameType

from packtrain.core.contract import RUN, Beats, Place
from packtrain.core.errors import EXIT_DONE, EXIT_OURS, GuardRollback, GuardStopped, PacktrainError, StoppedOnRequest
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.records import ErrorSeen
from packtrain.core.specs import spec_path
from packtrain.train.seat import Desk, seated
from packtrain.train.sections import Sections, load, newest_spec, read

AGREED = (StoppedOnRequest, GuardStopped, GuardRollback)
"""Endings all ranks reach together; after any other, nobody waits for the rest of the world."""


class Signals:
    """SIGTERM becomes this rank's order to stop, whenever it comes; SIGINT is the business of whoever watches."""

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
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more kills
        if self._tell is not None:
            self._tell()


Prepare = Callable[[Platform, Place, Sections], None]
"""Called once JAX may be loaded: what is done to it where it has a process to itself."""


def main(argv: Sequence[str], env: Mapping[str, str], prepare: Prepare = lambda *_: None) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="python -m packtrain.train", description="Train one rank of a run.")
    parser.add_argument("run", nargs="?", default="", help="run folder; PACKTRAIN_RUN names it under a supervisor")
    parser.add_argument("--fresh", action="store_true", help="by hand: start a run from nothing")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="trace so many steps of this attempt")
    arguments = parser.parse_args(argv)
    if not arguments.run and not env.get(RUN):
        parser.error("give a run folder")
    signals = Signals(by_hand=not env.get(RUN))
    seated_by = _supervised if env.get(RUN) else _by_hand
    try:
        return seated_by(arguments, env, signals, prepare)
    except PacktrainError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return EXIT_OURS


def _supervised(
    arguments: argparse.Namespace, env: Mapping[str, str], signals: Signals, prepare: Prepare
) -> int:
    platform, place = LocalPlatform(), Place.from_env(env)
    path = spec_path(place.run, place.spec) if place.spec else newest_spec(platform, place.run)
    with _journalled(platform, place) as journal:
        spec = read(platform, path)
        with seated(platform, env, arguments.run, arguments.fresh):
            return _work(platform, place, spec, journal, signals, arguments.profile, prepare)


def _by_hand(
    arguments: argparse.Namespace, env: Mapping[str, str], signals: Signals, prepare: Prepare
) -> int:
    platform = LocalPlatform()
    spec = load(platform, arguments.run)
    memory = spec.checkpoint.memory_every_steps > 0
    with (
        seated(platform, env, arguments.run, arguments.fresh, memory) as seat,
        _journalled(platform, seat.place) as journal,
    ):
        assert seat.began is not None, "by hand an attempt is begun here"
        journal.write(seat.began, durable=True)
        return _work(platform, seat.place, spec, journal, signals, arguments.profile, prepare)


@contextmanager
def _journalled(platform: Platform, place: Place) -> Iterator[Journal]:
    """This rank's journal. An error is in it before it leaves, so that whoever watches knows it from the record."""
    journal = Journal(platform, f"{place.run}/journal", "trainer", place.rank)
    try:
        yield journal
    except PacktrainError as error:
        seen = ErrorSeen(severity="error", name=error.name, what=error.what, where=error.where, fix=error.fix)
        journal.write(seen, durable=True)
        raise
    finally:
        journal.close()


def _work(
    platform: Platform, place: Place, spec: Sections, journal: Journal, signals: Signals, profile_steps: int,
    prepare: Prepare,
) -> int:
    with closing(Beats(place.socket or None, place.attempt, place.rank)) as beats:
        from packtrain.train import assemble

        prepare(platform, place, spec)
        desk, agreed = Desk(platform, place, spec, journal, beats, signals.forward, profile_steps), False
        try:
            assemble.join_world(place)
            with assemble.named_when_broken(place):
                assemble.train(desk)
            agreed = True
            return EXIT_DONE
        except AGREED:
            agreed = True
            raise
        finally:
            if agreed:
                assemble.leave_world(place)
