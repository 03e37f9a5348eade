"""The process that carries saves away: `python -m packtrain.checkpoint.carrier --run RUN --socket PATH --begin N
--checkpoint JSON`.

One per attempt (later: per node), a sibling of the workers. One thread turns a selector loop over a unix stream; each
save is written and published by a thread of its own (publish.py), one save after the other, because steps are published
in order. Nothing a client sends, and no save that fails, ends this process; it ends by a signal, or with its parent.

The wire: lines of JSON, both ways. A client sends

    {"op":"offer","id":7,"attempt":3,"step":1200,"writer":"r00000","buffer":"/dev/shm/.../r00000.a0003.0.g0",
     "bytes":4096,"deadline_s":300.0,"tensors":[TensorSpec...],"boxes":[PlacedBox...],
     "data_index":1200,"plan_hash":"..","seed":0,"code_hash":"..","meta":{}}      types: checkpoint/format.py
    {"op":"retain","id":8,"grace_s":3600.0,"actions":[{"action":"purge","folder":"step-...","reason":"..."}...]}
    {"op":"stand","id":9}

and is answered at once, then, but for `stand`, once more when it is over:

    {"re":"accepted","id":7}    or    {"re":"busy","id":7}            busy: nothing was taken, offer it again later
    {"re":"outcome","id":7,"ok":true,"step":1200,"commit":41,"bytes":4096,"write_s":0.8}
    {"re":"outcome","id":7,"ok":false,"step":1200,"stop":false,"error":{"name":..,"what":..,"where":..,"fix":..}}
    {"re":"outcome","id":8,"ok":true,"done":[{"action":..,"folder":..,"reason":..,"error":null}...]}
    {"re":"stands","id":9,"saves":1,"hung":[{"path":"/run","threads":1,"s":71.5}...],"quarantine":["/scratch/run"...]}

`stands`: saves under way, homes in which threads of this process hang and for how long, homes it leaves alone because
threads of the carrier before it hung there (`--quarantine PATH`) and that have not answered yet (homes.py).

`stop` true: a newer attempt began, or a later step is published; this worker is over. A line that is no such message
closes its connection. What a client had accepted goes on when it leaves, and a client that offers the same buffer for
the same step again (it lost its connection) gets the outcome of the save under way.
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
from dataclasses import dataclass, field
from typing import Any

import msgspec

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import DEADLINE_S_MAX, CheckpointConfig
from packtrain.checkpoint.format import PlacedBox, TensorSpec
from packtrain.checkpoint.homes import HUNG_MAX, Homes, Hung
from packtrain.checkpoint.mirroring import Mirroring
from packtrain.checkpoint.publish import Gate, Part, Save, carry
from packtrain.checkpoint.purge import execute
from packtrain.checkpoint.retention import Action
from packtrain.checkpoint.where import fall_back_home, require_outside
from packtrain.core.errors import CommitStale, CommitUnknown, PacktrainError, SaveFailed
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.records import ErrorSeen
from packtrain.core.units import NS

OPEN_SAVES_MAX = 2
"""One being written, one waiting: as many as a worker has buffers."""
LINE_BYTES_MAX = 64 << 20
UNSENT_BYTES_MAX = 1 << 20
HANG_S = 0.5
"""After its deadline a save's own thread has this long to say what held it, before the loop gives it up as hung."""
CONFIRM_S = 30.0
"""A save that passed its gate in time may still wait this long for the log."""


class Offer(msgspec.Struct, frozen=True, tag_field="op", tag="offer"):
    id: int
    attempt: int
    step: int
    writer: str
    buffer: str
    bytes: int
    deadline_s: float
    tensors: tuple[TensorSpec, ...]
    boxes: tuple[PlacedBox, ...]
    data_index: int = 0
    plan_hash: str = ""
    seed: int = 0
    code_hash: str = ""
    meta: dict[str, Any] = {}


class Retain(msgspec.Struct, frozen=True, tag_field="op", tag="retain"):
    id: int
    actions: tuple[Action, ...]
    grace_s: float


class Stand(msgspec.Struct, frozen=True, tag_field="op", tag="stand"):
    id: int


_decode = msgspec.json.Decoder(Offer | Retain | Stand).decode
_encode = msgspec.json.Encoder().encode


class _Client:
    """One connection: lines in, lines out, neither without bound."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.open = True
        self._received = bytearray()
        self._unsent = bytearray()

    def receive(self) -> list[bytes]:
        """Whole lines that arrived; closes on end of stream, on errors, and on a line without end."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self._received += data
        *lines, rest = bytes(self._received).split(b"\n") if b"\n" in data else [bytes(self._received)]
        self._received = bytearray(rest)
        if not data or len(rest) > LINE_BYTES_MAX:
            self.open = False
        return lines

    def send(self, message: dict[str, Any]) -> None:
        self._unsent += _encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what goes without waiting; a client that does not read is dropped."""
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(self._unsent)]
        except BlockingIOError:
            self.open = self.open and len(self._unsent) <= UNSENT_BYTES_MAX
        except OSError:
            self.open = False

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)


@dataclass(eq=False)
class _Open:
    """A save that at least one writer has offered and that is not over."""

    step: int
    begun_ns: int
    end_ns: int
    parts: dict[str, Offer] = field(default_factory=dict)
    askers: list[tuple[_Client, int]] = field(default_factory=list)
    gate: Gate = field(default_factory=Gate)
    running: bool = False


class Carrier:
    """The loop and its few tables. Threads hand results back through a queue; only the loop changes the tables."""

    def __init__(
        self, platform: Platform, run_folder: str, begin: Commit, latest: Commit | None, listener: socket.socket,
        mirroring: Mirroring | None = None, homes: Homes | None = None,
    ) -> None:
        self._platform = platform
        self._run_folder = run_folder
        self._begin = begin
        self._log = CommitLog(platform, f"{run_folder}/commits")
        self._saves: dict[int, _Open] = {}
        self._latest = latest
        self._mirroring = mirroring
        self._homes = homes or Homes(platform, [run_folder])
        self._hung: dict[_Open, int] = {}
        """Saves given up whose own thread hangs, as in the log, and when."""
        self._retaining = False
        self._verified: set[int] = set()
        self._stops = 0
        self._hurries = False
        self._clients: set[_Client] = set()
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
        while self._stops == 0 or (self._stops == 1 and self._whole_saves()):
            self.turn()
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
        self._hurries = True
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
        client = _Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        for line in client.receive():
            try:
                message = _decode(line)
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

    def _on_offer(self, client: _Client, offer: Offer) -> None:
        problem = self._problem(offer)
        if problem is not None:
            _accept_offer(client, offer)
            client.send(_failure(offer.id, offer.step, problem))
        elif self._latest is not None and self._latest.step == offer.step:
            _accept_offer(client, offer)
            client.send(_success(offer.id, self._latest, offer.bytes, 0.0))
        elif self._take(client, offer):
            _accept_offer(client, offer)
        else:
            client.send({"re": "busy", "id": offer.id})

    def _problem(self, offer: Offer) -> PacktrainError | None:
        begin = self._begin
        if offer.attempt != begin.attempt:
            return CommitStale(
                f"this carrier serves attempt {begin.attempt}, not {offer.attempt}", where=self._run_folder,
                fix="stop this process",
            )
        sane = 0 <= offer.step < 1 << 48 and 0 < offer.deadline_s <= DEADLINE_S_MAX and 0 <= offer.bytes < 1 << 50
        if offer.writer not in begin.writers or not sane or not offer.buffer.startswith("/"):
            return SaveFailed(
                f"an offer by writer {offer.writer!r} for step {offer.step} makes no sense", where=offer.buffer,
                fix=f"writers of this attempt: {', '.join(begin.writers)}; the buffer's path must be absolute",
            )
        return None

    def _take(self, client: _Client, offer: Offer) -> bool:
        """Add the offer to the save of its step. False: busy."""
        save = self._saves.get(offer.step)
        known = save.parts.get(offer.writer) if save else None
        if save is None:
            self._fail_passed_over(offer)
            if self._stops or len(self._saves) >= OPEN_SAVES_MAX or len(self._hung) >= HUNG_MAX:
                return False
            now_ns = self._platform.boot_ns()
            save = self._saves[offer.step] = _Open(offer.step, now_ns, now_ns + int(offer.deadline_s * NS))
        elif known is not None and known.buffer != offer.buffer:
            return False
        save.parts.setdefault(offer.writer, offer)
        save.askers.append((client, offer.id))
        return True

    def _fail_passed_over(self, offer: Offer) -> None:
        """Writers go forward: an earlier save that still waits for this one will never be whole."""
        for save in list(self._saves.values()):
            if save.step < offer.step and offer.writer not in save.parts:
                self._fail(save, self._incomplete(save, f"{offer.writer} went on to step {offer.step} without it"))

    # --- saves ---

    def _start_next(self) -> None:
        """The earliest whole save, when none is being written: steps are published in order."""
        if any(save.running for save in self._saves.values()):
            return
        whole = self._whole_saves()
        if whole:
            save = min(whole, key=lambda save: save.step)
            save.running = True
            self._in_thread(lambda: self._carry(save), lambda result: self._on_carried(save, result))

    def _whole_saves(self) -> list[_Open]:
        return [save for save in self._saves.values() if set(save.parts) == set(self._begin.writers)]

    def _carry(self, save: _Open) -> Commit | PacktrainError:
        """In the save's thread. Whatever goes wrong is a result."""
        try:
            whole = _whole(save, self._begin)
            return carry(self._platform, self._log, self._run_folder, whole, save.gate, self._homes, self._warn)
        except PacktrainError as error:
            return error
        except Exception as error:  # a fault of ours must cost one save, not the carrier
            return SaveFailed(
                f"step {save.step}: {type(error).__name__}: {error}", where="carrier", fix="please report this"
            )

    def _warn(self, error: PacktrainError) -> None:
        """In a thread: on record, from where the foreground brings it to the screen."""
        with suppress(OSError), closing(Journal(self._platform, f"{self._run_folder}/journal", "carrier")) as journal:
            journal.write(
                ErrorSeen(severity="warning", name=error.name, what=error.what, where=error.where, fix=error.fix),
                durable=True,
            )

    def _on_carried(self, save: _Open, result: Commit | PacktrainError) -> None:
        if self._saves.get(save.step) is not save:
            self._hung.pop(save, None)  # given up before; its thread has come back
        elif isinstance(result, PacktrainError):
            self._fail(save, result)
        else:
            del self._saves[save.step]
            self._latest = result
            if self._mirroring is not None:
                self._mirroring.published()
            write_s = (self._platform.boot_ns() - save.begun_ns) / NS
            for client, ticket in save.askers:
                client.send(_success(ticket, result, sum(part.bytes for part in save.parts.values()), write_s))

    def _fail(self, save: _Open, error: PacktrainError) -> None:
        del self._saves[save.step]
        if not self._all_hung():  # the log may lie on the very disk that hangs, or is full
            with suppress(OSError):
                print(error.render(), file=sys.stderr, flush=True)
        for client, ticket in save.askers:
            client.send(_failure(ticket, save.step, error))

    def _expire(self) -> None:
        """Fail what is past its deadline. A thread notices its own deadline; one that has not by now hangs."""
        now_ns = self._platform.boot_ns()
        for save in list(self._saves.values()):
            if now_ns < _expiry_ns(save):
                continue
            if not save.running:
                missing = sorted(set(self._begin.writers) - set(save.parts))
                said = f"no answer from {', '.join(missing)}" if missing else "an earlier save took all its time"
                self._fail(save, self._incomplete(save, said))
            elif save.gate.shut():
                self._hung[save] = now_ns
                self._fail(save, self._incomplete(save, "the disk hangs"))
            elif now_ns >= _expiry_ns(save) + CONFIRM_S * NS:
                self._hung[save] = now_ns
                self._fail(save, self._incomplete(save, "the commit log hangs; it may be published all the same"))

    def _incomplete(self, save: _Open, said: str) -> SaveFailed:
        return SaveFailed(
            f"step {save.step} was not published: {said}", where=f"{self._run_folder}/checkpoints",
            fix="training goes on and the next save is tried as usual; see whether that disk and those ranks are well",
        )

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

    def _on_retain(self, client: _Client, message: Retain) -> None:
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

    def _on_retained(self, client: _Client, ticket: int, done: list[dict[str, Any]] | PacktrainError) -> None:
        self._retaining = False
        if isinstance(done, PacktrainError):
            client.send({"re": "outcome", "id": ticket, "ok": False, "error": done.as_dict()})
        else:
            client.send({"re": "outcome", "id": ticket, "ok": True, "done": done})

    # --- threads and time ---

    def _in_thread(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        def run() -> None:
            result = work()
            self._ended.put(lambda: then(result))
            self._wake()

        threading.Thread(target=run, daemon=True).start()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake; closed: it has ended
            self._waker.send(b"!")

    def _wait_s(self) -> float | None:
        """Until the next deadline; None: until something arrives."""
        if not self._saves:
            return None
        now_ns = self._platform.boot_ns()
        left_ns = [_expiry_ns(save) - now_ns for save in self._saves.values()]
        return max(min((ns for ns in left_ns if ns > 0), default=NS) / NS, 0.001)


def _expiry_ns(save: _Open) -> int:
    return save.end_ns + (int(HANG_S * NS) if save.running else 0)


def _whole(save: _Open, begin: Commit) -> Save:
    """The first writer's word counts for what all say alike."""
    offers = [save.parts[writer] for writer in begin.writers]
    first = offers[0]
    about = {
        "data_index": first.data_index, "plan_hash": first.plan_hash, "seed": first.seed, "code_hash": first.code_hash,
        "meta": first.meta,
    }
    parts = tuple(Part(offer.writer, offer.buffer, offer.bytes, offer.tensors, offer.boxes) for offer in offers)
    return Save(save.step, begin.attempt, parts, about, save.end_ns)


def _accept_offer(client: _Client, offer: Offer) -> None:
    client.send({"re": "accepted", "id": offer.id})


def _success(ticket: int, commit: Commit, size: int, write_s: float) -> dict[str, Any]:
    return {
        "re": "outcome", "id": ticket, "ok": True, "step": commit.step, "commit": commit.number, "bytes": size,
        "write_s": write_s,
    }


def _failure(ticket: int, step: int, error: PacktrainError) -> dict[str, Any]:
    return {
        "re": "outcome", "id": ticket, "ok": False, "step": step, "stop": isinstance(error, CommitStale),
        "error": error.as_dict(),
    }


def open_carrier(
    platform: Platform, run_folder: str, socket_path: str, begin_number: int, config: CheckpointConfig | None = None,
    quarantine: Sequence[str] = (),
) -> Carrier:
    """Look up the attempt, make the folders, listen. Raises CommitUnknown when that record is no `begin`, Contradiction
    for a place to fall back to in the run folder.

    A save that an earlier carrier of this attempt published without living to say so is known from the start. Without
    `config` nothing is mirrored, and nothing that is lost is looked for. `quarantine`: homes that the carrier before it
    hung in.
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
    mirroring = None if config is None else Mirroring(platform, run_folder, begin.attempt, config)
    homes = Homes(platform, [run_folder, *_homes(platform, run_folder, log, config)], quarantine)
    listener = platform.stream_listener(socket_path)
    return Carrier(platform, run_folder, begin, latest, listener, mirroring, homes)


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
    args = parser.parse_args(argv)
    config = msgspec.json.decode(args.checkpoint, type=CheckpointConfig) if args.checkpoint else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the foreground, which decides what ends when
    try:
        carrier = open_carrier(LocalPlatform(), args.run, args.socket, args.begin, config, args.quarantine)
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
