"""The process that carries saves away: `python -m packtrain.checkpoint.carrier --run RUN --socket PATH --begin N
--checkpoint JSON`.

One per attempt and node, a sibling of the workers. One thread turns a selector loop over a unix stream (clients.py);
each save is written and published by a thread of its own (publish.py), one save after the other, because steps are
published in order. Nothing a client sends, and no save that fails, ends this process; it ends by a signal, or with its
parent.

Of a run over several nodes (`--peers FILE`) the carrier on the node that `begin` names publishes; the others report to
it (far.py) what their own workers offer, and write those parts where it tells them to (joint.py).
On SIGUSR1 what is due on the mirrors some time is due now: the run is done.
On SIGTERM nothing more is taken and what was taken whole is finished; a second one ends at once.
"""

from __future__ import annotations

import argparse
import queue
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any

import msgspec

from packtrain.checkpoint.clients import Client, Offer, Retain, Stand, accept_offer, decode, failure, success
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import DEADLINE_S_MAX, CheckpointConfig
from packtrain.checkpoint.far import CONFIRM_S, PATIENCE_S, Far, part_of
from packtrain.checkpoint.homes import HUNG_MAX, Homes, Hung
from packtrain.checkpoint.joint import Order, Report, Source, again_s, heard, offered, order
from packtrain.checkpoint.mirroring import Mirroring
from packtrain.checkpoint.neighbours import (
    Ends,
    FarParts,
    Neighbours,
    asking,
    elsewhere,
    in_loop,
    lending_of,
    other_attempt,
    require_ours,
)
from packtrain.checkpoint.open_save import OpenSave
from packtrain.checkpoint.publish import Others, Save, carry, overtaken
from packtrain.checkpoint.purge import execute
from packtrain.checkpoint.where import fall_back_home, require_outside
from packtrain.core.errors import CommitUnknown, PacktrainError, PeerLost, SaveFailed
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.records import ErrorSeen
from packtrain.core.sick import SickPlatform
from packtrain.core.units import NS

OPEN_SAVES_MAX = 2
"""One being written, one waiting: as many as a worker has buffers."""
HANG_S = 0.5
"""After its deadline a save's own thread has this long to say what held it, before the loop gives it up as hung."""


class Carrier:
    """The loop and its few tables. Threads hand results back through a queue; only the loop changes the tables."""

    def __init__(
        self, platform: Platform, run_folder: str, begin: Commit, latest: Commit | None, listener: socket.socket,
        mirroring: Mirroring | None = None, homes: Homes | None = None, neighbours: Neighbours | None = None,
    ) -> None:
        self._platform = platform
        self._run_folder = run_folder
        self._begin = begin
        self._log = CommitLog(platform, f"{run_folder}/commits")
        self._saves: dict[int, OpenSave] = {}
        self._latest = latest
        self._mirroring = mirroring
        self._homes = homes or Homes(platform, [run_folder])
        self._hung: dict[OpenSave, int] = {}
        """Saves given up whose own thread hangs, as in the log, and when."""
        self._neighbours = neighbours
        self._publishes = publishes(platform, begin, neighbours)
        self._began_ns = platform.boot_ns()
        self._ends = Ends()
        self._retaining = False
        self._verified: set[int] = set()
        self._stops = 0
        self._hurries = self._run_over = False
        self._clients: set[Client] = set()
        self._ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._waker.setblocking(False)
        for sock in (listener, self._woken):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)

    def serve(self) -> None:
        """Turn until `stop`, and then on until every save taken whole is over; what is half written then is debris."""
        if self._mirroring is not None:
            self._mirroring.start()
        self._homes.watch()
        while self._stops == 0 or (self._stops == 1 and self._unfinished()):
            self.turn()
        if self._neighbours is not None:
            self._neighbours.stop(self._run_over)
        if self._mirroring is not None:
            self._mirroring.stop()
        for sock in (self._listener, self._woken, self._waker, *(client.sock for client in self._clients)):
            sock.close()
        self._selector.close()

    def stop(self) -> None:
        """Make `serve` return once what it took whole is over, or at once when asked twice; from any thread."""
        self._stops += 1
        self._wake()

    def hurry(self) -> None:
        """The run is done: its last checkpoint is due on every mirror now. From a signal handler, too."""
        self._hurries = self._run_over = True
        self._wake()

    def turn(self) -> None:
        """Wait for something to happen, then handle it."""
        for key, events in self._selector.select(self._wait_s()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(1 << 16)
            elif events & selectors.EVENT_READ:
                self._read(key.data)
        while not self._ended.empty():
            self._ended.get()()
        if self._hurries and self._mirroring is not None:
            self._hurries = False
            self._mirroring.hurry()
        self._expire()
        self._start_next()
        self._tend_clients()

    # --- clients ---

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        client = Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _read(self, client: Client) -> None:
        for line in client.receive():
            try:
                message = decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                client.open = False
                return
            match message:
                case Offer():
                    self._on_offer(client, message)
                case Retain():
                    self._on_retain(client, message)
                case Stand():
                    client.send(self._stands(message.id))
                case _:
                    elsewhere(self._neighbours, message, lambda said: self._post(lambda: client.send(said)))

    def _tend_clients(self) -> None:
        """Close those that are gone, and watch for room in the sockets of those with lines unsent."""
        for client in list(self._clients):
            client.flush()
            if client.open:
                write = selectors.EVENT_WRITE if client.wants_to_write else 0
                self._selector.modify(client.sock, selectors.EVENT_READ | write, client)
            else:
                self._selector.unregister(client.sock)
                client.sock.close()
                self._clients.discard(client)

    # --- offers ---

    def _on_offer(self, client: Client, offer: Offer) -> None:
        problem = self._problem(offer)
        if problem is not None:
            accept_offer(client, offer)
            client.send(failure(offer.id, offer.step, problem))
        elif self._latest is not None and self._latest.step == offer.step:
            accept_offer(client, offer)
            client.send(success(offer.id, self._latest, offer.bytes, 0.0))
        elif self._take(client, offer):
            accept_offer(client, offer)
        else:
            client.send({"re": "busy", "id": offer.id})

    def _problem(self, offer: Offer) -> PacktrainError | None:
        begin = self._begin
        if offer.attempt != begin.attempt:
            return other_attempt(begin, offer.attempt)
        sane = 0 <= offer.step < 1 << 48 and 0 < offer.deadline_s <= DEADLINE_S_MAX and 0 <= offer.bytes < 1 << 50
        if offer.writer not in begin.writers or not sane or not offer.buffer.startswith("/"):
            return SaveFailed(
                f"an offer by writer {offer.writer!r} for step {offer.step} makes no sense", where=offer.buffer,
                fix=f"writers of this attempt: {', '.join(begin.writers)}; the buffer's path must be absolute",
            )
        return None

    def _take(self, client: Client, offer: Offer) -> bool:
        """Add the offer to the save of its step. False: busy."""
        save = self._saves.get(offer.step)
        known = save.parts.get(offer.writer) if save else None
        if save is None:
            self._fail_passed_over(offer)
            if not self._has_room():
                return False
            save = self._open(offer.step, offer.deadline_s)
        elif known is not None and known.buffer != offer.buffer:
            return False
        save.parts.setdefault(offer.writer, offer)
        save.askers.append((client, offer.id))
        save.news.set()
        if not (self._publishes or save.running):
            self._report(save)
        return True

    def _has_room(self) -> bool:
        return not self._stops and len(self._saves) < OPEN_SAVES_MAX and len(self._hung) < HUNG_MAX

    def _open(self, step: int, deadline_s: float) -> OpenSave:
        now_ns = self._platform.boot_ns()
        save = self._saves[step] = OpenSave(step, now_ns, now_ns + int(deadline_s * NS))
        return save

    def _fail_passed_over(self, offer: Offer) -> None:
        """Writers go forward: an earlier save that still waits for this one will never be whole."""
        for save in list(self._saves.values()):
            if save.step < offer.step and offer.writer not in save.parts:
                self._fail(save, self._incomplete(save, f"{offer.writer} went on to step {offer.step} without it"))

    # --- saves ---

    def _start_next(self) -> None:
        """The earliest whole save, when none is being written: steps are published in order."""
        if not self._publishes or any(save.running for save in self._saves.values()):
            return
        self._fail_overtaken()
        whole = self._whole_saves()
        if whole:
            save = min(whole, key=lambda save: save.step)
            save.running = True
            self._in_thread(lambda: self._tried(save, self._carry), lambda result: self._on_carried(save, result))

    def _fail_overtaken(self) -> None:
        """What became whole after a later step of its attempt was published is not written any more: all nodes would
        write it, only to be refused by the log. That refuses (publish.py) what this carrier cannot know: a later step
        that the one before it publishes at last."""
        latest = self._latest
        for save in self._whole_saves():
            if latest is not None and latest.attempt == self._begin.attempt and save.step < latest.step:
                self._fail(save, overtaken(save.step, latest.step, self._run_folder))

    def _whole_saves(self) -> list[OpenSave]:
        return [save for save in self._saves.values() if set(save.parts) == set(self._begin.writers)]

    def _unfinished(self) -> bool:
        return bool(self._whole_saves()) or any(save.running for save in self._saves.values())

    def _carry(self, save: OpenSave) -> Commit:
        others = FarParts(self._platform, save, self._post) if save.joint.sources else Others()
        whole = _whole(save, self._begin, others)
        return carry(self._platform, self._log, self._run_folder, whole, save.gate, self._homes, self.warn)

    def _tried(self, save: OpenSave, carry: Callable[[OpenSave], Commit]) -> Commit | PacktrainError:
        """In the save's thread. Whatever goes wrong is a result."""
        try:
            return carry(save)
        except PacktrainError as error:
            return error
        except Exception as error:  # a fault of ours must cost one save, not the carrier
            return SaveFailed(
                f"step {save.step}: {type(error).__name__}: {error}", where="carrier", fix="please report this"
            )

    def warn(self, error: PacktrainError) -> None:
        """In a thread: on record, from where it comes to the screen."""
        with suppress(OSError), closing(Journal(self._platform, f"{self._run_folder}/journal", "carrier")) as journal:
            journal.write(
                ErrorSeen(severity="warning", name=error.name, what=error.what, where=error.where, fix=error.fix),
                durable=True,
            )

    def _on_carried(self, save: OpenSave, result: Commit | PacktrainError) -> None:
        if self._saves.get(save.step) is not save:
            self._hung.pop(save, None)  # given up before; its thread has come back
        elif isinstance(result, PacktrainError):
            self._fail(save, result)
        else:
            del self._saves[save.step]
            self._latest = result
            self._ends.remember(save, Order(do="over", commit=result))
            if self._mirroring is not None:
                self._mirroring.published()
            write_s = (self._platform.boot_ns() - save.begun_ns) / NS
            for client, ticket in save.askers:
                client.send(success(ticket, result, sum(part.bytes for part in save.parts.values()), write_s))

    def _fail(self, save: OpenSave, error: PacktrainError) -> None:
        del self._saves[save.step]
        self._ends.remember(save, Order(do="over", error=error.as_dict()))
        if not self._all_hung():  # the log may lie on the very disk that hangs, or is full
            with suppress(OSError):
                print(error.render(), file=sys.stderr, flush=True)
        for client, ticket in save.askers:
            client.send(failure(ticket, save.step, error))

    def _expire(self) -> None:
        """Fail what is past its deadline. A thread notices its own deadline; one that has not by now hangs."""
        now_ns = self._platform.boot_ns()
        for save in list(self._saves.values()):
            if now_ns < self._expiry_ns(save):
                continue
            if not save.running:
                missing = sorted(set(self._begin.writers) - set(save.parts))
                said = f"no answer from {', '.join(missing)}" if missing else "an earlier save took all its time"
                self._fail(save, self._incomplete(save, said))
            elif save.gate.shut() and not self._publishes:
                self._fail(save, self._incomplete(save, self._unheard()))
            elif save.gate.shut():
                self._hung[save] = now_ns
                self._fail(save, self._incomplete(save, "the disk hangs"))
            elif now_ns >= self._expiry_ns(save) + CONFIRM_S * NS:
                self._hung[save] = now_ns
                self._fail(save, self._incomplete(save, "the commit log hangs; it may be published all the same"))

    def _expiry_ns(self, save: OpenSave) -> int:
        patience_s = HANG_S if self._publishes else PATIENCE_S
        return save.end_ns + (int(patience_s * NS) if save.running else 0)

    def _unheard(self) -> str:
        return f"no word from the carrier of node {self._begin.node}, which publishes; it may be all the same"

    def _incomplete(self, save: OpenSave, said: str) -> SaveFailed:
        return SaveFailed(
            f"step {save.step} was not published: {said}", where=f"{self._run_folder}/checkpoints",
            fix="training goes on and the next save is tried as usual; see whether that disk and those ranks are well",
        )

    # --- other nodes ---

    def _report(self, save: OpenSave) -> None:
        """Carry it as one of several that do not publish."""
        assert self._neighbours is not None, "a carrier alone publishes"
        save.running = True
        source = Source(self._platform.boot_id(), self._began_ns, self._platform.token())
        client = self._neighbours.client(self._begin.node)

        def carry(save: OpenSave) -> Commit:
            with closing(client):
                return Far(
                    self._platform, self._log, self._homes, self._begin, source, save, asking(client)
                ).carry()

        self._in_thread(lambda: self._tried(save, carry), lambda result: self._on_carried(save, result))

    def hear(self, report: Report, offers: list[Offer]) -> Order:
        """Another carrier's report, in the thread of its connection; the loop answers. Raises PacktrainError."""
        return in_loop(self._post, lambda: self._on_report(report, offers))

    def _on_report(self, report: Report, offers: list[Offer]) -> Order:
        require_ours(report, self._begin, self._publishes)
        known = self._ends.known(report)
        if known is None and self._latest is not None and self._latest.step == report.step:
            known = Order(do="over", commit=self._latest)
        if known is not None:
            return known
        save = self._saves.get(report.step)
        if offers:
            save = self._offered_far(report, offers, save)
        pause_s = again_s(len(self._begin.writers))
        if save is None:
            asks = not offers and report.left_s > 0 and self._has_room()
            return Order(do="tell") if asks else Order(do="wait", again_s=pause_s)
        save.joint = heard(save.joint, report)
        save.news.set()
        said = order(save.joint, report, self._platform.boot_ns(), pause_s)
        return msgspec.structs.replace(said, publishing=save.gate.is_passed)

    def _offered_far(self, report: Report, offers: list[Offer], save: OpenSave | None) -> OpenSave | None:
        """Take what lies on another node; None: no room. Raises PacktrainError for offers that make no sense."""
        for offer in offers:
            problem = self._problem(offer)
            if problem is not None or offer.step != report.step:
                raise problem or PeerLost("offers of another step", where=report.node)
            if save is None:
                self._fail_passed_over(offer)
        if save is None and not self._has_room():
            return None
        save = save or self._open(report.step, report.left_s)
        save.end_ns = min(save.end_ns, self._platform.boot_ns() + int(report.left_s * NS))
        here = {writer for writer, offer in save.parts.items() if offer.buffer}
        far = [msgspec.structs.replace(offer, buffer="") for offer in offers if offer.writer not in here]
        save.joint = offered(save.joint, report, far)
        for offer in far:
            save.parts.setdefault(offer.writer, offer)
        return save

    # --- how it stands ---

    def _all_hung(self) -> list[Hung]:
        """Threads of saves that hang in a home, and those that hang on their way into the log."""
        own = [Hung(self._run_folder, len(self._hung), min(self._hung.values()))] if self._hung else []
        return own + self._homes.hung()

    def _stands(self, ticket: int) -> dict[str, Any]:
        now_ns = self._platform.boot_ns()
        return {
            "re": "stands", "id": ticket, "saves": len(self._saves), "quarantine": self._homes.quarantine,
            "hung": [
                {"path": one.path, "threads": one.threads, "s": (now_ns - one.since_ns) / NS}
                for one in self._all_hung()
            ],
        }

    # --- retention ---

    def _on_retain(self, client: Client, message: Retain) -> None:
        if self._retaining:
            client.send({"re": "busy", "id": message.id})
            return
        self._retaining = True
        client.send({"re": "accepted", "id": message.id})
        self._in_thread(lambda: self._retain(message), lambda done: self._on_retained(client, message.id, done))

    def _retain(self, message: Retain) -> list[dict[str, Any]] | PacktrainError:
        try:
            busy = self._mirroring.busy if self._mirroring is not None else frozenset()
            done = execute(
                self._platform, self._run_folder, self._begin.attempt, message.actions, message.grace_s, self._verified,
                busy,
            )
            return [{**msgspec.structs.asdict(one.action), "error": one.error} for one in done]
        except Exception as error:
            return SaveFailed(f"retention: {type(error).__name__}: {error}", where="carrier", fix="please report this")

    def _on_retained(self, client: Client, ticket: int, done: list[dict[str, Any]] | PacktrainError) -> None:
        self._retaining = False
        if isinstance(done, PacktrainError):
            client.send({"re": "outcome", "id": ticket, "ok": False, "error": done.as_dict()})
        else:
            client.send({"re": "outcome", "id": ticket, "ok": True, "done": done})

    # --- threads and time ---

    def _in_thread(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        def run() -> None:
            result = work()
            self._post(lambda: then(result))

        threading.Thread(target=run, daemon=True).start()

    def _post(self, work: Callable[[], None]) -> None:
        """Let the loop do it, soon; from any thread."""
        self._ended.put(work)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake; closed: it has ended
            self._waker.send(b"!")

    def _wait_s(self) -> float | None:
        """Until the next deadline; None: until something arrives."""
        if not self._saves:
            return None
        now_ns = self._platform.boot_ns()
        left_ns = [self._expiry_ns(save) - now_ns for save in self._saves.values()]
        return max(min((ns for ns in left_ns if ns > 0), default=NS) / NS, 0.001)


def publishes(platform: Platform, begin: Commit, neighbours: Neighbours | None) -> bool:
    """Whether the carrier on this node is the one that publishes: alone it is."""
    return neighbours is None or platform.node() == begin.node


def _whole(save: OpenSave, begin: Commit, others: Others) -> Save:
    """The first writer's word counts for what all say alike."""
    offers = [save.parts[writer] for writer in begin.writers]
    first = offers[0]
    about = {
        "data_index": first.data_index, "plan_hash": first.plan_hash, "seed": first.seed, "code_hash": first.code_hash,
        "meta": first.meta,
    }
    return Save(save.step, begin.attempt, tuple(part_of(offer) for offer in offers), about, save.end_ns, others)


def open_carrier(
    platform: Platform, run_folder: str, socket_path: str, begin_number: int, config: CheckpointConfig | None = None,
    quarantine: Sequence[str] = (), neighbours: Neighbours | None = None,
) -> Carrier:
    """Look up the attempt, make the folders, listen. Raises CommitUnknown when that record is no `begin`, Contradiction
    for a place to fall back to in the run folder.

    A save that an earlier carrier of this attempt published without living to say so is known from the start. Without
    `config` nothing is mirrored, and nothing that is lost is looked for. `quarantine`: homes that the carrier before it
    hung in. `neighbours`: the run has several nodes, and only one of its carriers publishes, mirrors and mends.
    """
    log = CommitLog(platform, f"{run_folder}/commits")
    begin = log.read(begin_number)
    if begin is None or begin.kind != "begin":
        raise CommitUnknown(
            f"record {begin_number} begins no attempt", where=log.path(begin_number), fix="start the run again"
        )
    if run_folder not in quarantine:  # an earlier carrier has made them
        for name in ("checkpoints", "tombstones"):
            platform.mkdir(f"{run_folder}/{name}")
        platform.fsync_dir(run_folder)
    last = log.last()
    latest = last if last is not None and (last.kind, last.attempt) == ("save", begin.attempt) else None
    mirrors = config is not None and publishes(platform, begin, neighbours)
    mirroring = Mirroring(platform, run_folder, begin.attempt, config) if config is not None and mirrors else None
    homes = Homes(platform, [run_folder, *_homes(platform, run_folder, log, config)], quarantine)
    listener = platform.stream_listener(socket_path)
    carrier = Carrier(platform, run_folder, begin, latest, listener, mirroring, homes, neighbours)
    if neighbours is not None:
        lending = lending_of(platform, run_folder, begin, neighbours, config, carrier.warn)
        neighbours.start(socket_path, carrier.hear, lending)
    return carrier


def _homes(platform: Platform, run_folder: str, log: CommitLog, config: CheckpointConfig | None) -> list[str]:
    """Where saves of this run go that its own disk will not take."""
    first = log.read(1)
    roots = config.fallback if config is not None else ()
    require_outside(roots, run_folder)
    return [fall_back_home(root, run_folder, first) for root in roots] if first is not None else []


def main(argv: Sequence[str] | None = None) -> int:
    hurried: list[int] = []  # before there is a carrier that can hurry
    signal.signal(signal.SIGUSR1, lambda signum, frame: hurried.append(signum))
    parser = argparse.ArgumentParser(prog="packtrain.checkpoint.carrier")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--socket", required=True, help="path of the unix stream to listen on; must not exist")
    parser.add_argument("--begin", required=True, type=int, help="number of the attempt's begin record")
    parser.add_argument("--quarantine", action="append", default=[], help="a home that the carrier before it hung in")
    parser.add_argument("--checkpoint", help="JSON of the run's checkpoint section; without it nothing is mirrored")
    parser.add_argument("--peers", help="JSON, node -> host:port of the carriers of this run; run.pem lies beside it")
    parser.add_argument("--listen", default="127.0.0.1", help="address of this node at which other carriers reach it")
    parser.add_argument("--faults", help="file that says how ill the run's disk is on purpose, where that is allowed")
    args = parser.parse_args(argv)
    config = msgspec.json.decode(args.checkpoint, type=CheckpointConfig) if args.checkpoint else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever watches; the agent decides what ends when
    try:
        platform = SickPlatform(args.run, args.faults) if args.faults else LocalPlatform()
        trusted = config is not None and config.trusted_network
        neighbours = Neighbours(platform, args.peers, args.listen, trusted) if args.peers else None
        carrier = open_carrier(platform, args.run, args.socket, args.begin, config, args.quarantine, neighbours)
        signal.signal(signal.SIGTERM, lambda signum, frame: carrier.stop())
        signal.signal(signal.SIGUSR1, lambda signum, frame: carrier.hurry())
        if hurried:
            carrier.hurry()
        carrier.serve()
    except PacktrainError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        failed = SaveFailed(f"the carrier cannot work: {error}", where=args.run, fix="see that the folder is writable")
        print(failed.render(), file=sys.stderr)
        return failed.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
