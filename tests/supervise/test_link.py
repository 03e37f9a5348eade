"""The real link over loopback: who is let in, what is dropped and counted, and that nothing blocks."""

from __future__ import annotations

import os
import pathlib
import resource
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from packtrain.core.errors import BadValue, RunUnusable, TooFewFiles
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from packtrain.supervise import keys
from packtrain.supervise.keys import Address
from packtrain.supervise.link import (
    AT_ONCE_MAX,
    IMPOSTOR,
    MALFORMED,
    MESSAGE_BYTES_MAX,
    OTHER_VERSION,
    QUEUED_MAX,
    SPARE_FILES,
    STRANGER,
    UNSENT,
    Arrived,
    Caller,
    Guests,
    Listener,
    open_files,
    pack,
)
from packtrain.supervise.messages import Acknowledge, Pulse, Welcome

PLATFORM = LocalPlatform()
LOOPBACK = "tcp://127.0.0.1:0"


class Ends:
    """A listener, and callers with keys of their own."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        keys.make_keys(PLATFORM, self.home("coordinator"))
        os.mkdir(folder / "coordinator" / keys.ALLOWED)
        self.listener = Listener(PLATFORM, self.home("coordinator"), LOOPBACK)
        self.callers: list[Caller] = []

    def home(self, name: str) -> str:
        PLATFORM.mkdir(f"{self.folder}/{name}", 0o700)
        return f"{self.folder}/{name}"

    def caller(self, node: str, allowed: bool = True) -> Caller:
        public = keys.make_keys(PLATFORM, self.home(node))
        if allowed:
            keys.allow(PLATFORM, self.home("coordinator"), node, public)
        caller = Caller(PLATFORM, self.home(node))
        caller.call(self.listener.address)
        self.callers.append(caller)
        return caller

    def until(self, seen: Callable[[list[Arrived]], bool], again: Callable[[], object] = lambda: None) -> list[Arrived]:
        """Listen, calling `again` between looks, until `seen` says that all is there."""
        arrived: list[Arrived] = []
        for _ in range(1000):
            again()
            self.listener.wait(0.05)
            PLATFORM.sleep(0.01)
            arrived += self.listener.receive().arrived
            if seen(arrived):
                return arrived
        raise AssertionError(f"{len(arrived)} arrived, dropped {self.listener.dropped}")

    def close(self) -> None:
        for end in (*self.callers, self.listener):
            end.close()


@pytest.fixture
def ends(tmp_path: pathlib.Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


def pulse(node: str, step: int = 0) -> Pulse:
    return Pulse(node=node, agent="a", attempt=1, step=step)


def hear(caller: Caller) -> list:
    for _ in range(400):
        caller.wait(0.05)
        if arrived := caller.receive():
            return arrived
    raise AssertionError("nothing came")


def test_a_node_is_known_by_its_key_and_answered(ends: Ends) -> None:
    """What two nodes say arrives with the names of their keys, and answers find their way back."""
    one, two = ends.caller("n1"), ends.caller("n2")
    arrived = ends.until(
        lambda a: {x.node for x in a} == {"n1", "n2"}, lambda: (one.send(pulse("n1", 1)), two.send(pulse("n2", 2)))
    )
    for peer, node, message in arrived:
        assert message == pulse(node, int(node[1]))
        assert ends.listener.send(peer, Welcome(term=int(node[1]), seq=0))
    assert hear(one)[0] == Welcome(term=1, seq=0) and hear(two)[0] == Welcome(term=2, seq=0)


def test_strangers_get_nothing_through(ends: Ends) -> None:
    """A key that is not in the folder is refused and counted; once its file is there the next call is let in."""
    stranger = ends.caller("n1", allowed=False)
    sent: list[bool] = []
    ends.until(lambda _: ends.listener.dropped[STRANGER] > 0, lambda: sent.append(stranger.send(pulse("n1"))))
    ends.until(lambda _: len(sent) > 20, lambda: sent.append(stranger.send(pulse("n1"))))
    assert not any(sent), "the handshake itself fails: there is no connection to say anything on"
    keys.allow(PLATFORM, ends.home("coordinator"), "n1", keys.make_keys(PLATFORM, ends.home("n1")))
    stranger.call(ends.listener.address)
    assert ends.until(bool, lambda: stranger.send(pulse("n1")))[0].node == "n1"


def test_a_revoked_node_is_heard_no_more(ends: Ends) -> None:
    """Its connection lives; what it says is dropped and counted."""
    node = ends.caller("n1")
    ends.until(bool, lambda: node.send(pulse("n1")))
    keys.revoke(PLATFORM, ends.home("coordinator"), "n1")
    keys.revoke(PLATFORM, ends.home("coordinator"), "n1")
    ends.until(lambda _: ends.listener.dropped[STRANGER] >= 3, lambda: node.send(pulse("n1")))


def test_a_node_cannot_speak_for_another(ends: Ends) -> None:
    """A message that names another node than its key is dropped and counted."""
    node = ends.caller("n1")
    ends.until(lambda _: ends.listener.dropped[IMPOSTOR] > 0, lambda: node.send(pulse("n2")))
    assert ends.until(bool, lambda: node.send(pulse("n1")))[0].node == "n1"


@pytest.mark.parametrize("frames, cause", [
    ([b"\x01"], MALFORMED), ([b"\x01" + b"\xff" * 50], MALFORMED), ([b"\x01" + b"\x91" * 50_000], MALFORMED),
    ([b"\x01", b"\x01"], MALFORMED), ([b""], OTHER_VERSION), ([b"\x02" + pack(pulse("n1"))[1:]], OTHER_VERSION),
    ([pack(Acknowledge(term=1, seq=1))], MALFORMED), ([pack(pulse("n1")), b"", b"more"], MALFORMED),
])
def test_what_is_no_message_is_dropped_and_counted(ends: Ends, frames: list[bytes], cause: str) -> None:
    """Bytes, nesting, frames too many, another version, words of the other side: counted by cause, and no harm."""
    node = ends.caller("n1")
    ends.until(bool, lambda: node.send(pulse("n1")))
    node._sockets[0].send_multipart(frames)
    ends.until(lambda _: ends.listener.dropped[cause] == 1)
    assert ends.until(bool, lambda: node.send(pulse("n1")))


def test_a_message_that_is_too_long_ends_its_connection_only(ends: Ends) -> None:
    """It is never held in memory; the next connection of the same node is made by itself."""
    node, other = ends.caller("n1"), ends.caller("n2")
    ends.until(lambda a: len({x.node for x in a}) == 2, lambda: (node.send(pulse("n1")), other.send(pulse("n2"))))
    node._sockets[0].send(b"\x01" + b"x" * MESSAGE_BYTES_MAX)
    ends.until(lambda a: {"n1", "n2"} <= {x.node for x in a}, lambda: (node.send(pulse("n1")), other.send(pulse("n2"))))
    assert not ends.listener.dropped[MALFORMED]


def test_bytes_that_speak_no_zmq_do_no_harm(ends: Ends) -> None:
    """A port scanner and a caller without a key get nowhere, and nodes are heard meanwhile."""
    host, port = ends.listener.address.address.removeprefix("tcp://").split(":")
    raw = socket.create_connection((host, int(port)))
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    context: zmq.Context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(ends.listener.address.address)
    plain.send(pack(pulse("n1")))
    node = ends.caller("n1")
    assert {x.node for x in ends.until(bool, lambda: node.send(pulse("n1")))} == {"n1"}
    plain.close(0)
    context.term()
    raw.close()


def test_nothing_blocks_without_anybody_there(ends: Ends) -> None:
    """To nobody, to a peer that is gone, to one that does not read: the call returns, False, and it is counted."""
    caller = ends.caller("n1")
    idle = Caller(PLATFORM, ends.home("n1"))
    assert not idle.send(pulse("n1"))
    idle.close()
    caller.call(Address(address="tcp://127.0.0.1:1", server_key=ends.listener.address.server_key))
    assert not caller.send(pulse("n1")) and caller.dropped[UNSENT] == 1
    caller.call(Address(address="nonsense", server_key="short"))
    assert not caller.send(pulse("n1")) and not caller.receive()
    assert not ends.listener.send(b"nobody", Welcome(term=1, seq=0)) and ends.listener.dropped[UNSENT] == 1
    caller.call(ends.listener.address)
    peer = ends.until(bool, lambda: caller.send(pulse("n1")))[-1].peer
    big = Acknowledge(term=1, seq=1, agent="x" * (1 << 14))
    assert any(not ends.listener.send(peer, big) for _ in range(10 * QUEUED_MAX))


def test_a_flood_is_taken_in_bounded_pieces(ends: Ends) -> None:
    """One look takes `AT_ONCE_MAX` messages at most, and one connection holds a bounded number more: both queues, and
    what the kernel keeps for a connection, which no buffer of it makes as large as these."""
    node = ends.caller("n1")
    ends.until(bool, lambda: node.send(pulse("n1")))
    big = msgspec.structs.replace(pulse("n1"), phase="x" * (1 << 14))
    assert any(not node.send(big) for _ in range(10 * QUEUED_MAX))
    ends.listener.wait(1.0)
    assert len(ends.listener.receive().arrived) <= AT_ONCE_MAX


def test_what_is_dropped_was_taken_all_the_same(ends: Ends) -> None:
    """So whoever reads knows whether more may lie there."""
    node, taken = ends.caller("n1"), 0
    ends.until(bool, lambda: node.send(pulse("n1")))
    for words in (b"\x01", b"\x02", pack(pulse("n2")), pack(pulse("n1", 9))):
        node._sockets[0].send(words)
    arrived = list[Arrived]()
    while not arrived or arrived[-1].message != pulse("n1", 9):
        ends.listener.wait(0.05)
        read = ends.listener.receive()
        arrived, taken = arrived + read.arrived, taken + read.taken
    assert taken == len(arrived) + 3


def test_a_caller_finds_the_next_coordinator(ends: Ends, tmp_path: pathlib.Path) -> None:
    """The address file of the next one, with the same key, is all that is needed."""
    home = ends.home("coordinator")
    node = ends.caller("n1")
    ends.until(bool, lambda: node.send(pulse("n1")))
    ends.listener.close()
    ends.listener = Listener(PLATFORM, home, LOOPBACK)
    keys.write_address(PLATFORM, home, msgspec.structs.replace(ends.listener.address, term=2))
    found = keys.read_address(PLATFORM, f"{home}/{keys.ADDRESS}")
    assert found is not None and found.term == 2
    node.call(found)
    assert ends.until(bool, lambda: node.send(pulse("n1")))


def test_a_port_in_use_is_one_clear_error(ends: Ends) -> None:
    """It names the address and what to do; nothing is left open."""
    with pytest.raises(RunUnusable, match="in use") as caught:
        Listener(PLATFORM, ends.home("coordinator"), ends.listener.address.address)
    assert caught.value.where == ends.listener.address.address


def test_keys_are_made_once_and_kept_from_others(tmp_path: pathlib.Path) -> None:
    """The same pair at each call, 0600; what is no key is refused with the file's name."""
    home = str(tmp_path)
    assert keys.make_keys(PLATFORM, home) == keys.make_keys(PLATFORM, home)
    assert os.stat(f"{home}/{keys.SECRET}").st_mode & 0o777 == 0o600
    for bad in (b"", b"x" * 39, b"\xff" * 40):
        (tmp_path / keys.SECRET).write_bytes(bad)
        with pytest.raises(BadValue, match="no key"):
            keys.read_keys(PLATFORM, home)
    with pytest.raises(BadValue, match="cannot name a node"):
        keys.allow(PLATFORM, home, "../n1", "x" * 40)
    with pytest.raises(RunUnusable, match="no keys can be made"):
        keys.make_keys(PLATFORM, f"{home}/nowhere")


def test_too_few_files_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    """What may be open is raised as far as the machine lets it; where that is too few for the nodes, the message says
    how many are needed, and nothing is opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert open_files(10) == hard
        with pytest.raises(TooFewFiles, match=f"{hard} nodes need") as caught:
            Listener(PLATFORM, str(tmp_path), LOOPBACK, nodes=hard)
        assert str(hard + SPARE_FILES) in caught.value.fix
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Reads(FakePlatform):
    """Counts how often a key is read."""

    reads = 0

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        self.reads += "/allowed/" in path
        return super().read(path, offset, size)


def test_the_folder_of_keys_is_not_read_for_each_who_knocks() -> None:
    """A thousand nodes and a thousand strangers who knock within a second cost a handful of readings; whoever is
    allowed, or is not any more, is known at the next knock or a second later, also where the folder's time does not
    show it."""
    platform = Reads(FakeDisk())
    platform.mkdir("/c")
    publics = [keys.make_keys(platform, platform.mkdir(f"/n{n}") or f"/n{n}") for n in range(3)]
    keys.allow(platform, "/c", "n0", publics[0])
    guests, began_ns = Guests(platform, "/c"), platform.boot_ns()
    for n in range(1000):
        ns = began_ns + n * NS // 1000
        assert guests.name(publics[0], ns) == "n0" and not guests.name(f"stranger {n}", ns)
    assert platform.reads <= 6
    platform.sleep(5.0)
    keys.allow(platform, "/c", "n1", publics[1])
    assert guests.name(publics[1], platform.boot_ns()) == "n1", "the time of the folder says that it has changed"
    keys.allow(platform, "/c", "n2", publics[2])
    platform.sleep(1.2)
    assert guests.name(publics[2], platform.boot_ns()) == "n2"
    keys.revoke(platform, "/c", "n1")
    platform.sleep(1.2)
    guests.look(platform.boot_ns())
    assert guests.nodes == {"n0", "n2"} and not guests.name(publics[1], platform.boot_ns())
    platform.sleep(5.0)
    guests.look(platform.boot_ns())
    reads = platform.reads
    for _ in range(100):
        platform.sleep(1.0)
        guests.look(platform.boot_ns())
    assert platform.reads == reads


def test_files_in_the_folder_that_are_no_keys_are_left_out() -> None:
    """Unfinished writes, notes and odd names allow nobody."""
    platform = FakePlatform(FakeDisk())
    platform.mkdir("/c/allowed")
    public = keys.make_keys(platform, "/c")
    keys.allow(platform, "/c", "n1", public)
    platform.write_new("/c/allowed/README", b"hello")
    platform.write_new("/c/allowed/.hidden", keys.make_keys(platform, "/c").encode())
    assert keys.read_allowed(platform, "/c") == {public: "n1"}
    assert keys.read_address(platform, "/c/address") is None
    platform.write_new("/c/address", b"{")
    assert keys.read_address(platform, "/c/address") is None
