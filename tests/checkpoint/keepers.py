"""Nodes that keep each other's slots, on one fake disk, with a wire between their carriers that a test can cut."""

from __future__ import annotations

from packtrain.checkpoint.asking import Around
from packtrain.checkpoint.fetching import Fetch
from packtrain.checkpoint.lending import Lend, Lending
from packtrain.checkpoint.link import Body
from packtrain.checkpoint.rounds import Round
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import BufferFolder, held, memory_folder, peer_folder
from packtrain.core.errors import PacktrainError, PeerLost, SlotDamaged, error_named
from packtrain.core.fake import FakeCrash, FakeDisk, FakePlatform
from tests.checkpoint.test_slots import Client
from tests.checkpoint.worlds import RUN, make_run

PIECE_BYTES = 100


class Asked:
    """A request as the one who answers sees it."""

    def __init__(self, hop, header, body):
        self.header, self._hop, self._body = header, hop, body

    def data(self, bytes_max):
        came = bytearray()
        self.take(lambda offset, piece: came.extend(piece))
        assert len(came) <= bytes_max
        return bytes(came)

    def take(self, write):
        self._hop.pour(self._body or Body(0, lambda offset, view: None), write)


class Hop:
    """Asks the carrier of one node, in the caller's thread."""

    def __init__(self, nodes, node):
        self._nodes, self._node = nodes, node

    def pour(self, body, write):
        for offset in range(0, body.bytes, PIECE_BYTES):
            piece = memoryview(bytearray(min(PIECE_BYTES, body.bytes - offset)))
            body.read(offset, piece)
            self._nodes.pieces += 1
            beyond = self._nodes.pieces - self._nodes.cut_at
            if beyond == 0 or (self._nodes.cuts and beyond > 0):
                raise PeerLost("cut", where=self._node)
            try:
                write(offset, self._nodes.tamper(piece))
            except SlotDamaged as error:
                if self._nodes.drains:
                    raise
                raise PeerLost("too much was to come", where=self._node) from error

    def ask(self, header, body=None, take=None, *, timeout_s):
        assert timeout_s > 0
        self._nodes.asked.append((self._node, header["op"]))
        if self._node in self._nodes.dead:
            raise PeerLost("nobody listens", where=self._node)
        try:
            reply = self._nodes.lendings[self._node].answers[header["op"]](Asked(self, header, body))
        except PacktrainError as error:
            raise error_named(**error.as_dict()) from error
        except (OSError, FakeCrash) as error:
            raise PeerLost(f"it failed: {error!r}", where=self._node) from error
        if take is not None:
            self.pour(reply.body, take(reply.body.bytes))
        return reply.header

    def close(self):
        pass


class Nodes:
    """So many nodes with one writer each, which have begun an attempt."""

    def __init__(self, count=2, disk=None):
        self.disk = disk or FakeDisk()
        self.names = [f"n{i}" for i in range(count)]
        self.writers = tuple(f"r{i:05d}" for i in range(count))
        self.platforms = {name: FakePlatform(self.disk, name) for name in self.names}
        self.lendings, self.asked, self.dead, self.warned = {}, [], set(), []
        self.pieces, self.cut_at, self.tamper = 0, 0, lambda piece: piece
        self.cuts = False
        """Whether no piece after `cut_at` passes either."""
        self.savers = {}
        self.last = {}
        """Of each node the step of the round before."""
        self.drains = True
        """Whether the rest of a body that was not taken is read, so that the reason is heard."""
        self.log = make_run(self.platforms["n0"])
        self.platforms["n0"].mkdir("/dev/shm")
        self.begin()

    def begin(self, memory=None):
        """An attempt: new carriers and new workers everywhere."""
        self.last.clear()
        self.begun = self.log.begin(None if memory else 0, self.writers, "n0", memory=memory)
        for name in self.names:
            self.carrier(name)

    def carrier(self, name, faults=None):
        """A new one on this node, instead of the one before."""
        platform = FakePlatform(self.disk, name, faults=faults)
        around = Around(name, lambda node: Hop(self, node), lambda: self.names)
        lending = Lending(platform, RUN, self.begun, around, 60.0, self.warned.append)
        self.lendings[name] = lending
        lending.clean()
        return lending

    def saver(self, name):
        if name not in self.savers:
            writer = self.writers[self.names.index(name)]
            where = BufferFolder(memory_folder(RUN, name), slots=True, lends=True)
            platform = FakePlatform(self.disk, name)
            self.savers[name] = Saver(platform, where, Client(), self.begun.attempt, writer, 60.0, self.begun, True)
        return self.savers[name]

    def remember(self, name, step, state):
        """A slot of that node's writer in a round, and the words with which it is lent."""
        saver, before = self.saver(name), self.last.get(name, 0)
        assert saver.remember(step, state, {"data_index": step}, Round(step, before)) is not None
        self.last[name] = step
        saver.poll()
        line = saver._client.told[-1]
        assert line["step"] == step
        return Lend(**{key: value for key, value in line.items() if key != "op"})

    def returned(self, name, ok=True):
        """The lent slot comes back."""
        client = self.saver(name)._client
        client.ended.append({"id": client.told[-1]["id"], "ok": ok})

    def fetch(self, name, writer, source):
        assert isinstance(self.lendings[name].fetching.fetch(Fetch(1, {writer: source})), dict)

    def helds(self, *names):
        return [one for name in names or self.names for one in held(FakePlatform(self.disk, name), RUN)]

    def kept(self, name):
        """(writer, step) of the slots this node keeps for others, all of them true; and how many images lie there."""
        platform = FakePlatform(self.disk, name)
        folder = peer_folder(RUN, name)
        names = platform.listdir(folder) if platform.exists(folder) else []
        found = [(one.writer, one.step) for one in self.helds(name) if not one.own]
        return sorted(found), len([one for one in names if ".json" not in one])

    def lose(self, name):
        """The machine is gone, with its memory."""
        platform = FakePlatform(self.disk, name)
        for folder in (memory_folder(RUN, name), peer_folder(RUN, name)):
            for file in platform.listdir(folder) if platform.exists(folder) else ():
                platform.unlink(f"{folder}/{file}")
        self.dead.add(name)
