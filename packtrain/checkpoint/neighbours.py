"""The carriers of the other nodes: how this one hears them, asks the one that publishes, and waits for their parts."""

from __future__ import annotations

import math
import posixpath
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from packtrain.checkpoint import joint
from packtrain.checkpoint.asking import Around
from packtrain.checkpoint.clients import Offer
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.far import Ask
from packtrain.checkpoint.fetching import Fetch
from packtrain.checkpoint.format import PartEntry
from packtrain.checkpoint.joint import OFFERS_BYTES_MAX, OVER_MAX, Order, Report, Trial
from packtrain.checkpoint.lending import Lend, Lending
from packtrain.checkpoint.link import (
    LinkClient,
    LinkServer,
    Reply,
    Request,
    address_of,
    body_of,
    known_peers,
    write_address,
)
from packtrain.checkpoint.open_save import OpenSave
from packtrain.checkpoint.publish import Others
from packtrain.core.errors import CommitStale, PacktrainError, PeerCopyFailed, PeerLost, SaveFailed
from packtrain.core.pinned import KEY_FILE, Pinned
from packtrain.core.platform import Platform
from packtrain.core.transfer import Rate, unlimited

ASK_S = 10.0
LOOK_S = 0.05
HEAR_S = 5.0
"""A report waits this long for the loop of the carrier that publishes."""
Hear = Callable[[Report, list[Offer]], Order]
"""Called in the thread of a connection; may raise PacktrainError."""


class Neighbours:
    """Listens for other carriers, and knows where they are.

    `peers`: a file, JSON of node -> host:port, replaced by the agent. `trusted`: plain TCP. Raises OSError.
    """

    def __init__(self, platform: Platform, peers: str, host: str, trusted: bool) -> None:
        self._platform, self._peers = platform, peers
        self.lending: Lending | None = None
        self._pinned = None if trusted else Pinned(posixpath.join(posixpath.dirname(peers), KEY_FILE))
        self.server = LinkServer(platform, host, self._pinned, {})
        """Others may add what they answer, before it starts."""

    def start(self, socket_path: str, hear: Hear, lending: Lending | None = None) -> None:
        if lending is not None:
            self.lending = lending
            self.server.answers.update(lending.answers)
            lending.start()
        self.server.answers["part"] = lambda request: _answer(request, hear)
        self.server.start()
        write_address(self._platform, socket_path, self.server.address)

    def stop(self, run_over: bool = False) -> None:
        """`run_over`: what is kept in memory for others goes."""
        self.server.stop()
        if self.lending is not None:
            self.lending.stop(run_over)

    def client(self, node: str, rate: Rate = unlimited) -> LinkClient:
        """Of the carrier of that node, wherever it is when it is asked. `rate`: cap of what is sent."""
        return LinkClient(self._platform, lambda: address_of(self._platform, self._peers, node), self._pinned, rate)

    def nodes(self) -> list[str]:
        """Of all carriers that are known by now. Raises PeerLost."""
        return list(known_peers(self._platform, self._peers))


def lending_of(
    platform: Platform, run_folder: str, begin: Commit, neighbours: Neighbours, config: CheckpointConfig | None,
    warn: Callable[[PacktrainError], None],
) -> Lending:
    """Peer memory as the run's checkpoint section wants it."""
    config = config or CheckpointConfig()
    cap = config.peer_bytes_per_s_max or math.inf
    around = Around(
        platform.node(), lambda node: neighbours.client(node, lambda: cap), neighbours.nodes, config.failure_domains
    )
    return Lending(platform, run_folder, begin, around, config.deadline_s, warn)


def elsewhere(
    neighbours: Neighbours | None, message: Lend | Fetch, told: Callable[[dict[str, Any]], None]
) -> None:
    """Lend or fetch a slot; `told` hears the outcome, from any thread."""
    lending = neighbours.lending if neighbours is not None else None

    def tell(result: dict[str, Any] | PacktrainError) -> None:
        told({"re": "outcome", "id": message.id, **_said(result)})

    if lending is None:
        tell(PeerCopyFailed("this carrier knows of no other node", where="carrier", fix="start it with --peers"))
    elif isinstance(message, Lend):
        lending.lend(message, tell)
    else:
        threading.Thread(target=lambda: tell(lending.fetching.fetch(message)), daemon=True, name="fetch").start()


def _said(result: dict[str, Any] | PacktrainError) -> dict[str, Any]:
    return {"ok": False, "error": result.as_dict()} if isinstance(result, PacktrainError) else {"ok": True, **result}


def asking(client: LinkClient) -> Ask:
    """How a save reports to the carrier that publishes."""

    def ask(report: Report, offers: bytes | None) -> dict[str, Any]:
        body = None if offers is None else body_of(offers)
        return client.ask(msgspec.to_builtins(report), body, timeout_s=ASK_S)

    return ask


def _answer(request: Request, hear: Hear) -> Reply:
    try:
        report = msgspec.convert(request.header, Report)
        data = request.data(OFFERS_BYTES_MAX) if request.bytes else b"[]"
        offers = msgspec.json.decode(data, type=list[Offer])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerLost(f"a report that makes no sense: {error}", where="carrier link", fix="use one version") from error
    return Reply(msgspec.to_builtins(hear(report, offers)))


def in_loop(post: Callable[[Callable[[], None]], None], work: Callable[[], Order]) -> Order:
    """What the loop of this carrier makes of a report. Raises the PacktrainError that `work` raises there."""
    answers: queue.SimpleQueue[Order | PacktrainError] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put(work())
        except PacktrainError as error:
            answers.put(error)

    post(answer)
    try:
        found = answers.get(timeout=HEAR_S)
    except queue.Empty:
        raise PeerLost("this carrier has no time to answer", where="carrier link", fix="it is asked again") from None
    if isinstance(found, PacktrainError):
        raise found
    return found


def require_ours(report: Report, begin: Commit, publishes: bool) -> None:
    """Raises CommitStale for a report of an older attempt, PeerLost for one that this carrier cannot answer."""
    if report.attempt < begin.attempt:
        raise other_attempt(begin, report.attempt)
    ours = (report.attempt, report.begin) == (begin.attempt, begin.nonce) and publishes
    if not (ours and report.makes_sense(begin.writers)):
        raise PeerLost(
            f"the carrier of attempt {begin.attempt} there is not the one to publish that", where="carrier link",
            fix="nothing: it is asked again",
        )


def other_attempt(begin: Commit, attempt: int) -> CommitStale:
    return CommitStale(
        f"this carrier serves attempt {begin.attempt}, not {attempt}", where="carrier", fix="stop this process"
    )


class Ends:
    """How the latest saves ended, for the carriers that took part and have not heard it."""

    def __init__(self) -> None:
        self._ends: deque[tuple[frozenset[str], Order]] = deque(maxlen=OVER_MAX)

    def remember(self, save: OpenSave, end: Order) -> None:
        if save.joint.rounds:
            self._ends.append((save.joint.rounds, end))

    def known(self, report: Report) -> Order | None:
        """None: it goes on, or never was, or this is a later save of the same step: each save has rounds of its own."""
        return next((end for rounds, end in self._ends if report.round in rounds), None)


class FarParts(Others):
    """The parts of one save that carriers of other nodes write. `post` brings work to the carrier's loop."""

    def __init__(self, platform: Platform, save: OpenSave, post: Callable[[Callable[[], None]], None]) -> None:
        self._platform, self._save, self._post = platform, save, post
        self._trial = Trial("", 0, "", 0)
        self._left: list[str] = []

    def begin(self, rank: int, folder: str, end_ns: int) -> None:
        trial = self._trial = Trial(self._platform.token(), rank, folder, end_ns)

        def begin() -> None:
            self._save.joint = joint.begun(self._save.joint, trial)

        self._post(begin)

    def parts(self) -> list[PartEntry]:
        while True:
            self._save.news.clear()
            now = self._save.joint
            here = now.trial == self._trial
            if here and now.obstacle:
                raise _final(now.obstacle) if now.final else OSError(now.obstacle)
            if here and not joint.missing(now):
                return list(now.entries.values())
            if self._save.gate.is_shut or self._platform.boot_ns() >= self._trial.end_ns:
                raise OSError(self._unwritten())
            self._save.news.wait(LOOK_S)

    def leave(self, path: str) -> None:
        self._left.append(path)

    def left(self, home: str) -> list[str]:
        here = [path for path in self._left if path.startswith(f"{home}/")]
        self._left = [path for path in self._left if path not in here]
        return here

    def _unwritten(self) -> str:
        """Whose parts there are not."""
        writers = joint.missing(self._save.joint)
        nodes = sorted({self._save.joint.nodes[writer] for writer in writers})
        return f"not written in time: {', '.join(writers)} (node {', '.join(nodes)})"


def _final(obstacle: str) -> SaveFailed:
    return SaveFailed(
        obstacle, where="another node", fix="the next save uses new buffers; see whether the workers there still run"
    )
