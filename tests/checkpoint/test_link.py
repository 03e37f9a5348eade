"""The link between carriers: what arrives is what was sent, by nobody but the run's own, and nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import struct
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint import link
from packtrain.checkpoint.link import (
    CHUNK_BYTES,
    Body,
    LinkClient,
    LinkServer,
    Reply,
    Request,
    address_of,
    body_of,
    parse_address,
    render_address,
    write_address,
)
from packtrain.core.errors import PeerLost, SaveFailed
from packtrain.core.fake import FakePlatform
from packtrain.core.fake_disk import FakeDisk
from packtrain.core.pinned import Pinned, make_pinned
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from tests.checkpoint.cable import Cable

LONG_S = 60.0
"""Never waited out."""


class PatientPlatform(LocalPlatform):
    """The real machine, where sleeping takes no time, but is counted."""

    def __init__(self) -> None:
        self.slept_ns = 0

    def sleep(self, seconds: float) -> None:
        self.slept_ns += int(seconds * NS)

    def boot_ns(self) -> int:
        return super().boot_ns() + self.slept_ns


class Ends:
    """A server that echoes, and clients of it."""

    def __init__(self, folder: str, pinned: bool) -> None:
        self.platform = PatientPlatform()
        self.pem = f"{folder}/run.pem"
        if pinned:
            make_pinned(self.platform, self.pem)
        self.pinned = Pinned(self.pem) if pinned else None
        self.asked: list[dict[str, object]] = []
        self.answers = {"echo": self.echo, "refuse": self.refuse, "fault": self.fault, "choke": self.choke}
        self.server = LinkServer(self.platform, "127.0.0.1", self.pinned, self.answers)
        self.server.start()
        self.closing: list[object] = []

    def echo(self, request: Request) -> Reply:
        self.asked.append(request.header)
        return Reply({"was": request.header}, body_of(request.data(1 << 30)) if request.bytes else None)

    def refuse(self, request: Request) -> Reply:
        raise SaveFailed("not now", where="here", fix="later")

    def fault(self, request: Request) -> Reply:
        return {}["nothing"]

    def choke(self, request: Request) -> Reply:
        def write(offset: int, chunk: memoryview) -> None:
            raise OSError(28, "no space")

        request.take(write)
        return Reply({})

    def client(self, address: str = "", pinned: Pinned | None = None, **options: object) -> LinkClient:
        client = LinkClient(
            self.platform, lambda: address or self.server.address, pinned or self.pinned, **options
        )
        self.closing.append(client.close)
        return client

    def cable(self) -> Cable:
        cable = Cable(lambda: self.server.address)
        self.closing.append(cable.close)
        return cable

    def works(self) -> bool:
        """Whether a client is served."""
        return self.client().ask({"op": "echo"}, timeout_s=LONG_S) == {"was": {"op": "echo"}}

    def close(self) -> None:
        for close in self.closing:
            close()
        self.server.stop()


@pytest.fixture(params=["pinned", "plain"])
def ends(request, tmp_path) -> Iterator[Ends]:
    ends = Ends(str(tmp_path), request.param == "pinned")
    yield ends
    ends.close()


@pytest.fixture
def pinned(tmp_path) -> Iterator[Ends]:
    ends = Ends(str(tmp_path), True)
    yield ends
    ends.close()


@pytest.fixture
def plain(tmp_path) -> Iterator[Ends]:
    ends = Ends(str(tmp_path), False)
    yield ends
    ends.close()


def received(client: LinkClient, body: bytes) -> bytes:
    found = bytearray()

    def take(size: int) -> link.Write:
        found.extend(bytes(size))

        def write(offset: int, chunk: memoryview) -> None:
            found[offset : offset + len(chunk)] = chunk

        return write

    reply = client.ask({"op": "echo", "n": len(body)}, body_of(body), take, timeout_s=LONG_S)
    assert reply == {"was": {"op": "echo", "n": len(body)}}
    return bytes(found)


# --- what arrives --------------------------------------------------------------------------------------


def test_what_is_sent_arrives(ends):
    """Headers and bodies of any size go there and come back over one connection as they were."""
    client = ends.client()
    for size in (0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5):
        body = os.urandom(size)
        assert received(client, body) == body
    assert not ends.server.dropped


def test_a_cap_is_kept(plain):
    """What is sent under a cap takes the time it must; without one nothing waits."""
    received(plain.client(), bytes(3 << 20))
    assert plain.platform.slept_ns == 0
    received(plain.client(rate=lambda: float(1 << 20)), bytes(3 << 20))
    assert 2 * NS < plain.platform.slept_ns <= 4 * NS


def test_a_refusal_is_the_error_that_was_raised(ends):
    """An error that the other side raises arrives as that error, and the connection serves on, a body or not."""
    client = ends.client()
    for body in (None, body_of(bytes(3 * CHUNK_BYTES))):
        with pytest.raises(SaveFailed, match="not now") as caught:
            client.ask({"op": "refuse"}, body, timeout_s=LONG_S)
        assert (caught.value.where, caught.value.fix) == ("here", "later")
    assert received(client, b"x") == b"x" and not ends.server.dropped


@pytest.mark.parametrize(("op", "said"), [("fault", "KeyError"), ("nonsense", "nobody"), ("choke", "no space")])
def test_a_fault_costs_one_request(ends, op, said):
    """A fault of the one who answers, a disk that refuses what was sent, or a word nobody knows is told to the one who
    asked; the connection serves on."""
    client = ends.client()
    with pytest.raises(PeerLost, match=said):
        client.ask({"op": op}, body_of(bytes(3 * CHUNK_BYTES)), timeout_s=LONG_S)
    assert received(client, b"x") == b"x" and not ends.server.dropped


def test_what_nobody_wants_ends_the_connection(plain):
    """A body too large to be thrown away, or larger than whoever answers can hold, ends the conversation."""
    vast = Body(link.DRAIN_BYTES_MAX + 1, lambda offset, chunk: None)
    with pytest.raises(PeerLost):
        plain.client().ask({"op": "refuse"}, vast, timeout_s=LONG_S)
    with pytest.raises(PeerLost):
        plain.client().ask({"op": "echo"}, Body(1 << 40, lambda offset, chunk: None), timeout_s=LONG_S)
    assert plain.works()


def test_a_body_that_cannot_be_read_is_the_askers_error(ends):
    """Where the bytes to send cannot be read the one who asks gets that error, and the next request works."""

    def read(offset: int, chunk: memoryview) -> None:
        raise OSError(5, "disk")

    client = ends.client()
    with pytest.raises(OSError, match="disk"):
        client.ask({"op": "echo"}, Body(10, read), timeout_s=LONG_S)
    assert received(client, b"x") == b"x"


# --- strangers -----------------------------------------------------------------------------------------


def other_key(folder: str) -> Pinned:
    make_pinned(LocalPlatform(), f"{folder}/other.pem")
    return Pinned(f"{folder}/other.pem")


def signed_by(pem: str, folder: str) -> Pinned:
    """Another key whose certificate the run's own key has signed."""
    with open(pem, "rb") as file:
        data = file.read()
    issuer, signer = x509.load_pem_x509_certificate(data), serialization.load_pem_private_key(data, None)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(issuer.subject)
        .public_key(key.public_key()).serial_number(7).not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC)).sign(signer, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with open(f"{folder}/signed.pem", "wb") as file:
        file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
    chain = Pinned(pem)
    for context in chain._contexts.values():
        context.load_cert_chain(f"{folder}/signed.pem")
    return chain


@pytest.mark.parametrize("who", ["other key", "signed by the run's", "no certificate", "plain"])
def test_a_stranger_is_not_served(pinned, tmp_path, who):
    """Whoever does not show the run's own certificate is counted and never answered, even one that it has signed."""
    strangers = {
        "other key": lambda: other_key(str(tmp_path)), "signed by the run's": lambda: signed_by(pinned.pem, tmp_path),
    }
    if who in strangers:
        with pytest.raises(PeerLost):
            pinned.client(pinned=strangers[who]()).ask({"op": "echo"}, timeout_s=LONG_S)
    else:
        with contextlib.suppress(OSError):
            speak_bare(pinned.server.address, tls=who == "no certificate")
    assert pinned.works() and pinned.asked == [{"op": "echo"}]
    assert pinned.server.dropped["stranger"] == 1


def speak_bare(address: str, tls: bool) -> None:
    """A request without a certificate, until the other side hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    bare = socket.create_connection(parse_address(address), LONG_S)
    with context.wrap_socket(bare) if tls else bare as sock:
        sock.sendall(frame(b'{"op":"echo"}'))
        while sock.recv(1 << 16):
            pass


@pytest.mark.parametrize("who", ["other key", "signed by the run's"])
def test_nobody_asks_an_impostor(pinned, tmp_path, who):
    """A server that shows another certificate than the run's is refused by the one who asks."""
    key = other_key(str(tmp_path)) if who == "other key" else signed_by(pinned.pem, tmp_path)
    impostor = LinkServer(pinned.platform, "127.0.0.1", key, pinned.answers)
    impostor.start()
    with pytest.raises(PeerLost):
        pinned.client(impostor.address).ask({"op": "echo"}, timeout_s=LONG_S)
    impostor.stop()
    assert pinned.asked == []


def test_the_key_file_is_private_and_never_replaced(tmp_path):
    """The key of a run is for its user alone, and a second launch does not write over the first one's."""
    platform, path = LocalPlatform(), f"{tmp_path}/run.pem"
    make_pinned(platform, path)
    before = platform.read(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_pinned(platform, path)
    assert platform.read(path) == before
    for junk in (b"", b"junk", before[: len(before) // 2]):
        (tmp_path / "junk.pem").write_bytes(junk)
        with pytest.raises(OSError):
            Pinned(f"{tmp_path}/junk.pem")


# --- broken cables and nonsense ------------------------------------------------------------------------


def frame(header: bytes, body_bytes: int = 0, *, magic: bytes = b"PTL1", size: int = -1, crc: int = -1) -> bytes:
    crc = link.fmt.crc32c(header) if crc < 0 else crc
    return struct.pack(">4sIQI", magic, len(header) if size < 0 else size, body_bytes, crc) + header


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n and more", frame(b"{}", magic=b"PTL2"), frame(b"{}", size=1 << 30),
        frame(b"{}", 1 << 60), frame(b"{}", crc=1), frame(b"[]"), frame(b"\xff\xff"), frame(b"[" * 9000),
        frame(b'{"op":"echo"}', 4) + b"abcd" + b"\0\0\0\0",
    ],
)
def test_nonsense_is_dropped_and_counted(plain, nonsense):
    """What is no frame, too large, or not what its checksum says ends its connection, is counted, and harms nobody."""
    with socket.create_connection(parse_address(plain.server.address), LONG_S) as sock:
        sock.sendall(nonsense)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert plain.works() and dict(plain.server.dropped) == {"malformed": 1}


def test_a_byte_changed_on_the_way_is_found(ends):
    """A bit that flips in a body on the wire is found there; nothing is answered, and the next request works."""
    cable = ends.cable()
    client = ends.client(cable.address)
    assert received(client, b"x") == b"x"
    cable.tamper = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(PeerLost):
        received(client, bytes(1000))
    cable.tamper = lambda data: data
    assert received(client, b"y") == b"y"
    assert sum(ends.server.dropped.values()) == 1 and len(ends.asked) <= 3


@pytest.mark.parametrize("after", [0, 1, 30, 3000, 1 << 16, (1 << 20) - 1])
def test_a_cut_cable_is_an_error_and_the_next_call_connects_anew(ends, after):
    """Wherever a cable is cut the one who asks hears of it, and its next request goes over a new connection."""
    cable = ends.cable()
    client = ends.client(cable.address)
    assert received(client, b"x") == b"x"
    cable.cut_after = after
    with pytest.raises(PeerLost):
        received(client, bytes(1 << 20))
    assert received(client, b"y") == b"y" and cable.joined == 2


def test_silence_has_a_bound(plain):
    """A peer that takes the connection and never answers costs the time given; one that is gone costs none."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = render_address(*silent.getsockname())
        with pytest.raises(PeerLost):
            plain.client(address).ask({"op": "echo"}, timeout_s=0.05)
    with pytest.raises(PeerLost):
        plain.client(address).ask({"op": "echo"}, timeout_s=LONG_S)


def test_too_many_connections_are_refused(plain):
    """Beyond its bound a server closes new connections and counts them; when one ends there is room again."""
    server = LinkServer(plain.platform, "127.0.0.1", None, plain.answers, connections_max=2)
    server.start()
    clients = [plain.client(server.address) for _ in range(3)]
    for client in clients[:2]:
        assert received(client, b"x") == b"x"
    with pytest.raises(PeerLost):
        received(clients[2], b"x")
    assert server.dropped["crowded"] == 1
    clients[0].close()
    found = b""
    while not found:  # until the server has seen it go
        with contextlib.suppress(PeerLost):
            found = received(clients[2], b"x")
    server.stop()
    assert found == b"x"


def test_a_stopped_server_leaves_nobody_waiting(ends):
    """When a server stops, who is connected hears it at once."""
    client = ends.client()
    assert received(client, b"x") == b"x"
    ends.server.stop()
    with pytest.raises(PeerLost):
        received(client, b"x")


def test_without_a_network_it_is_said():
    """A machine without a network opens no link, and the error says so."""
    platform = FakePlatform(FakeDisk())
    with pytest.raises(OSError, match="own"):
        LinkServer(platform, "127.0.0.1", None, {})
    with pytest.raises(PeerLost):
        LinkClient(platform, lambda: "127.0.0.1:9", None).ask({"op": "echo"}, timeout_s=1.0)


# --- addresses -----------------------------------------------------------------------------------------


@given(st.sampled_from(["127.0.0.1", "::1", "node-7.cluster", "fe80::1"]), st.integers(1, 65535))
def test_addresses_come_back(host, port):
    """An address written is read as it was."""
    assert parse_address(render_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:x"])
def test_what_is_no_address_is_refused(text):
    """Anything but host and port is an error of the network, not a crash."""
    with pytest.raises(OSError):
        parse_address(text)


def test_the_file_of_peers_is_read_anew(tmp_path):
    """A node's address is what the file says now; where it is away, broken or silent, the error says who is sought."""
    platform, path = LocalPlatform(), f"{tmp_path}/peers"
    for data in (None, b"{", b'{"n1":3}', b"\xff", b'{"n2":"h:1"}'):
        if data is not None:
            (tmp_path / "peers").write_bytes(data)
        with pytest.raises(PeerLost, match="n1"):
            address_of(platform, path, "n1")
    for address in ("h:1", "h:2"):
        (tmp_path / "peers").write_bytes(msgspec.json.encode({"n1": address}))
        assert address_of(platform, path, "n1") == address
    write_address(platform, f"{tmp_path}/socket", "h:3")
    assert platform.read_json(f"{tmp_path}/socket.address") == {"address": "h:3"}
