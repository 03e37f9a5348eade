"""One save at a carrier that does not publish: report what its workers offered, write where it is told, hear the end.

Blocking code over a Platform and a way to ask; the carrier runs it in a thread for each save. It ends by itself: when
the publishing carrier tells the outcome, when the log does (that carrier may be gone, or restarted and know nothing),
or some time after the deadline, when nobody does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from packtrain.checkpoint import joint
from packtrain.checkpoint.clients import Offer
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.format import PartEntry, parse_folder
from packtrain.checkpoint.homes import Hangs, Homes
from packtrain.checkpoint.joint import Order, Report, Source
from packtrain.checkpoint.open_save import OpenSave
from packtrain.checkpoint.publish import OutOfTime, Part, obstacle_of, write_parts
from packtrain.core.errors import CommitUnknown, PeerLost, SaveFailed, error_named
from packtrain.core.platform import Platform
from packtrain.core.units import NS

PATIENCE_S = 3.0
"""After its deadline a save waits so long for whoever publishes to say how it ended."""
CONFIRM_S = 30.0
"""A save that is being published in time may still wait this long for the log."""
LOST_S = 0.5
"""Before the publishing carrier is asked again after it did not answer."""
Ask = Callable[[Report, bytes | None], dict[str, Any]]
"""Brings a report to the publishing carrier, with the offers if they are wanted; its order. Raises PeerLost."""


class _Wrote(NamedTuple):
    """How it went in the try it was told of last."""

    trial: str = ""
    entries: tuple[PartEntry, ...] = ()
    obstacle: str = ""
    final: bool = False


class Far:
    """Carries one save."""

    def __init__(
        self, platform: Platform, log: CommitLog, homes: Homes, begin: Commit, source: Source, save: OpenSave,
        ask: Ask,
    ) -> None:
        self._platform, self._log, self._homes = platform, log, homes
        self._begin, self._source, self._save, self._ask = begin, source, save, ask
        self._wrote = _Wrote()
        self._trouble = "it has not said how the save ended"

    def carry(self) -> Commit:
        """How it ended, from whoever knows. Raises CommitStale: stop; SaveFailed, or the error that was told."""
        tells, end_ns = False, self._save.end_ns + int((PATIENCE_S + CONFIRM_S) * NS)
        while not self._save.gate.is_shut and self._platform.boot_ns() < end_ns:
            order = self._report(tells)
            tells = order.do == "tell" and not tells
            if order.do == "over":
                return _ended(order)
            if order.publishing:
                self._save.gate.go_through()
            if order.do == "write":
                self._write(order)
            elif not tells:
                self._save.news.wait(order.again_s)
                self._save.news.clear()
        raise SaveFailed(
            f"step {self._save.step}: no word from the carrier of node {self._begin.node}, which publishes: "
            f"{self._trouble}", where=f"node {self._begin.node}",
            fix="it may be published all the same: the log says so; training goes on and the next save is tried",
        )

    def _report(self, tells: bool) -> Order:
        """What is to be done now. Where that carrier does not answer, the log may know how it ended."""
        offers = dict(self._save.parts)
        report = Report(
            attempt=self._begin.attempt, begin=self._begin.nonce, node=self._platform.node(),
            boot=self._source.boot, began_ns=self._source.began_ns, round=self._source.round, step=self._save.step,
            left_s=(self._save.end_ns - self._platform.boot_ns()) / NS, writers=tuple(offers),
            **self._wrote._asdict(),
        )
        try:
            return _order(self._ask(report, msgspec.json.encode(list(offers.values())) if tells else None))
        except PeerLost as error:
            self._trouble = error.what
            commit = self._published()
            return Order(do="wait", again_s=LOST_S) if commit is None else Order(do="over", commit=commit)

    def _published(self) -> Commit | None:
        """The record of this save, if there is one."""
        try:
            for commit in self._log.follow(self._log.head()):
                if commit.attempt < self._begin.attempt or commit.kind != "save":
                    return None
                if (commit.attempt, commit.step) == (self._begin.attempt, self._save.step):
                    return commit
        except CommitUnknown:
            pass
        return None

    def _write(self, order: Order) -> None:
        folder = parse_folder(order.folder)
        ours = folder is not None and (folder.step, folder.attempt) == (self._save.step, self._begin.attempt)
        if not ours or not 0 <= order.rank < len(self._homes.paths):
            self._wrote = _Wrote(order.trial, (), "it was told to write where no save of this step belongs", True)
            return
        before = self._wrote.entries if self._wrote.trial == order.trial else ()
        try:
            self._wrote = _Wrote(order.trial, (*before, *self._written(order)))
        except OutOfTime:
            self._wrote = _Wrote(order.trial, (), "the disk was too slow")
        except Hangs:
            self._wrote = _Wrote(order.trial, (), "the disk hangs")
        except OSError as error:
            self._wrote = _Wrote(order.trial, (), obstacle_of(error))
        except SaveFailed as error:
            self._wrote = _Wrote(order.trial, (), error.what, True)

    def _written(self, order: Order) -> list[PartEntry]:
        """Raises OutOfTime, Hangs, OSError; SaveFailed when a buffer is gone. A home that hangs here is left alone."""
        home, save = self._homes.paths[order.rank], self._save
        if home not in self._homes.usable():
            raise Hangs
        end_ns = min(save.end_ns, self._platform.boot_ns() + int(order.left_s * NS))
        offers = [save.parts[writer] for writer in order.writers if writer in save.parts]
        parts = [part_of(offer) for offer in offers]

        def check() -> None:
            """Until the buffers may be filled again: what is read after that is not reported."""
            if save.gate.is_shut or self._platform.boot_ns() >= end_ns:
                raise OutOfTime

        work = partial(write_parts, self._platform, home, order.folder, parts, check)
        return self._homes.within(home, work, end_ns, lambda late: None)


def part_of(offer: Offer) -> Part:
    return Part(offer.writer, offer.buffer, offer.bytes, offer.tensors, offer.boxes)


def _order(reply: dict[str, Any]) -> Order:
    try:
        order = msgspec.convert(reply, Order)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PeerLost(f"its order makes no sense: {error}", where="carrier link", fix="use one version") from error
    if not 0 <= order.again_s <= joint.AGAIN_S_MAX or (order.do == "over" and not (order.commit or order.error)):
        raise PeerLost("its order makes no sense", where="carrier link", fix="use one version")
    return order


def _ended(order: Order) -> Commit:
    if order.commit is not None:
        return order.commit
    told = order.error or {}
    raise error_named(*(told.get(key, "") for key in ("name", "what", "where", "fix")))
