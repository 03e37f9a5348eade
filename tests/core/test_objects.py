"""A bucket that misbehaves costs no more than our deadline, and only its own word makes a name absent."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from packtrain.core.errors import (
    BadValue,
    NameAbsent,
    NameTaken,
    PacktrainError,
    StoreRefused,
    StoreUnreachable,
)
from packtrain.core.fake import FakeDisk, FakePlatform, fail
from packtrain.core.objects import client_threads, wait_for_threads
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.stores import Plan, Store, StoreConfig, open_store, secret_of
from packtrain.core.units import NS
from tests.core.loopback import BadServer, Request, always, bad_server, error, hang, reply

GUARD_S = 20
pytestmark = pytest.mark.timeout(GUARD_S)  # a client's own patience is longer: 30 s for a request, minutes with retries

OPERATIONS: dict[str, Callable[[Store], Any]] = {
    "size": lambda store: store.size("a/b"),
    "read": lambda store: store.read("a/b", 0, 10),
    "create": lambda store: store.create("a/b", b"x"),
    "list": lambda store: store.list("a"),
    "erase": lambda store: store.erase("a/b"),
    "upload": lambda store: put_one(store),
}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ID", "an-id")
    monkeypatch.setenv("TEST_SECRET", "a-secret")


def bucket(server: BadServer, platform: Platform | None = None, deadline_s: float = 0.4) -> Store:
    config = StoreConfig(
        "s3://bucket/some/run", endpoint=server.url, region="r", key_id="env:TEST_ID", secret="env:TEST_SECRET",
        deadline_s=deadline_s, bytes_per_s_min=1e9,
    )
    return open_store(platform or LocalPlatform(), config)


def put_one(store: Store) -> None:
    upload = store.upload(Plan("a/b", 1, 1))
    upload.put(0, b"x")
    upload.finish(replace=True)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_store_that_hangs_is_given_up(operation: str) -> None:
    """Every operation on a store that never answers ends at our deadline, says so, and hangs up."""
    with bad_server(hang) as server:
        with pytest.raises(StoreUnreachable, match=r"no answer in 0\.4 s.*\n.*where: s3://bucket/some/run a.*\n"):
            OPERATIONS[operation](bucket(server))
        assert server.left.wait(GUARD_S)
        assert len(server.requests) <= 1


def test_a_store_that_trickles_is_given_up() -> None:
    """Bytes that arrive one by one, for ever, do not stretch the deadline."""
    over = threading.Event()

    def trickle(connection: socket.socket, request: Request, number: int) -> bool:
        connection.sendall(reply("206 Partial Content", b"", "Content-Range: bytes 0-9999/10000", length=10000))
        while not over.wait(0.02):
            connection.sendall(b"x")
        return False

    with bad_server(trickle) as server:
        try:
            with pytest.raises(StoreUnreachable, match="no answer"):
                bucket(server).read("a/b", 0, 10000)
        finally:
            over.set()


@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - {"create"}))
def test_a_broken_store_is_asked_again_until_the_deadline(operation: str) -> None:
    """A store that answers 500 is asked later and later: in 30 s of virtual time 11 times, then it is given up."""
    disk = FakeDisk()
    platform = FakePlatform(disk)
    with bad_server(always(error("500 Internal Server Error", "InternalError"))) as server:
        with pytest.raises(StoreUnreachable, match="500"):
            OPERATIONS[operation](bucket(server, platform, 30.0))
        assert len(server.requests) == 11
    assert 25 * NS < disk.clock.now_ns < 30.1 * NS


def test_a_create_is_never_repeated() -> None:
    """An answer of 500 to a create is told at once: repeated, it would find its own object and call it another's."""
    with bad_server(always(error("500 Internal Server Error", "InternalError"))) as server:
        with pytest.raises(StoreUnreachable):
            bucket(server).create("a/b", b"x")
        assert [method for method, _ in server.requests] == ["PUT"]


def test_a_connection_that_breaks_is_made_again() -> None:
    """A connection cut in the middle of an answer costs one more request and no byte of the result."""

    def cut_once(connection: socket.socket, request: Request, number: int) -> bool:
        whole = reply("206 Partial Content", b"0123456789", "Content-Range: bytes 0-9/10")
        connection.sendall(whole[:-4] if number == 1 else whole)
        return number > 1

    with bad_server(cut_once) as server:
        assert bucket(server, deadline_s=10.0).read("a/b", 0, 10) == b"0123456789"
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (error("404 Not Found", "NoSuchKey"), NameAbsent),
        (error("404 Not Found", "NoSuchBucket"), StoreRefused),
        (reply("404 Not Found", b"<html>not here</html>"), StoreUnreachable),
        (error("403 Forbidden", "AccessDenied"), StoreRefused),
        (error("401 Unauthorized", "Unauthorized"), StoreRefused),
        (error("400 Bad Request", "AuthorizationHeaderMalformed"), StoreRefused),
        (error("301 Moved Permanently", "PermanentRedirect"), StoreRefused),
        (error("501 Not Implemented", "NotImplemented"), StoreRefused),
    ],
)
@pytest.mark.parametrize("operation", ["size", "read"])
def test_only_the_stores_own_word_makes_a_name_absent(
    operation: str, response: bytes, expected: type[PacktrainError]
) -> None:
    """Absent is what the store calls NoSuchKey. A missing bucket, a proxy's 404 and refused rights are other errors,
    each told after one question (two where HEAD has no words), with where and next."""
    with bad_server(always(response)) as server:
        with pytest.raises(expected) as raised:
            OPERATIONS[operation](bucket(server))
        assert raised.value.where and raised.value.fix
        assert len(server.requests) <= 2
        with pytest.raises(PacktrainError) as raised:
            bucket(server).list("a")
        assert not isinstance(raised.value, NameAbsent)


def test_what_did_not_arrive_as_it_was_sent_is_sent_again() -> None:
    """400 BadDigest is damage on the way and no fault of ours: the same bytes go again."""

    def damaged_once(connection: socket.socket, request: Request, number: int) -> bool:
        connection.sendall(error("400 Bad Request", "BadDigest") if number == 1 else reply("200 OK", b"", 'ETag: "x"'))
        return True

    with bad_server(damaged_once) as server:
        put_one(bucket(server, deadline_s=10.0))
        assert [method for method, _ in server.requests] == ["PUT", "PUT"]


def test_a_store_without_ranges() -> None:
    """Where a range is answered by the whole object, it is taken only if the range means the whole object."""
    head = ('Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT', 'ETag: "x"')
    with bad_server(always(reply("200 OK", b"0123456789", *head))) as server:
        store = bucket(server, deadline_s=10.0)
        assert store.read("a/b", 0, 10) == store.read("a/b", 0, 99) == b"0123456789"
        for offset, size in ((0, 9), (1, 9)):
            with pytest.raises(StoreRefused, match="a range was asked for"):
                store.read("a/b", offset, size)


def test_taken_is_told_from_a_conflict() -> None:
    """412 to a create means that the name is taken; a conflict with another request in flight does not."""
    taken = always(error("412 Precondition Failed", "PreconditionFailed"))
    with bad_server(taken) as server, pytest.raises(NameTaken):
        bucket(server).create("a/b", b"x")
    conflict = always(error("409 Conflict", "ConditionalRequestConflict"))
    with bad_server(conflict) as server, pytest.raises(StoreUnreachable):
        bucket(server).create("a/b", b"x")


def test_nobody_there() -> None:
    """A port where nobody listens is unreachable, not empty."""
    with bad_server(hang) as server:
        pass
    with pytest.raises(StoreUnreachable):
        bucket(server).exists("a/b")


def test_secrets_are_references_and_stay_out_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret given itself, in the URL or by a reference to nothing, is refused without being repeated; errors of the
    store do not carry it either."""
    platform = LocalPlatform()
    for config in (
        StoreConfig("s3://bucket", secret="hunter2"), StoreConfig("s3://id:hunter2@bucket/x"),
        StoreConfig("s3://bucket/x?secret=hunter2"), StoreConfig("s3://bucket", secret="env:NO_SUCH_NAME"),
        StoreConfig("s3://bucket", secret="file:/nowhere/at/all"), StoreConfig("s3://"), StoreConfig("ftp://bucket"),
        StoreConfig("s3://bucket", secret="env:TEST_SECRET"), StoreConfig("az://bucket", secret="env:TEST_SECRET"),
    ):
        with pytest.raises(BadValue) as raised:
            open_store(platform, config)
        assert "hunter2" not in str(raised.value)
    with bad_server(always(error("403 Forbidden", "AccessDenied"))) as server:
        with pytest.raises(StoreRefused) as refused:
            bucket(server).read("a/b", 0, 10)
        assert "a-secret" not in str(refused.value) and "an-id" not in str(refused.value)


def test_a_secret_is_read_from_its_file() -> None:
    """`file:PATH` reads through the Platform, and a file that cannot be read is named."""
    platform = FakePlatform(FakeDisk())
    platform.write_new("/tmp/secret", b" words \n")
    assert secret_of(platform, "file:/tmp/secret") == "words"
    platform.faults = lambda op, path, n: fail(errno.EIO) if op == "read" else None
    with pytest.raises(BadValue, match="file:/tmp/secret cannot be read"):
        secret_of(platform, "file:/tmp/secret")


ASLEEP = ["7", "Name:\ttokio-rt-worker", "State:\tS (sleeping)", "voluntary_ctxt_switches:\t3"]
WOKE = [*ASLEEP[:3], "voluntary_ctxt_switches:\t4"]
RUNS = [*ASLEEP[:2], "State:\tR (running)", "voluntary_ctxt_switches:\t4"]


@pytest.mark.parametrize(
    ("looks", "needed"),
    [([[ASLEEP]], 2), ([[ASLEEP], [WOKE]], 3), ([[RUNS], [RUNS], [WOKE]], 4), ([[]], 1), ([[RUNS]], 5)],
)
def test_the_end_waits_for_the_threads_of_the_client(looks: list[list[list[str]]], needed: int) -> None:
    """All asleep at two looks, and none woke in between: one that waits for the interpreter wakes every 5 ms. For
    threads that never rest a bounded number of looks."""
    done: list[list[list[str]]] = []

    def look() -> list[list[str]]:
        done.append(looks[min(len(done), len(looks) - 1)])
        return done[-1]

    wait_for_threads(look, looks_max=5)
    assert len(done) == needed


def test_the_threads_of_the_client_are_found() -> None:
    """By the name that the kernel has of them; this thread is none of them."""
    store = open_store(LocalPlatform(), StoreConfig("memory://"))
    store.create("a/b", b"x")
    found = client_threads()
    assert found and all(len(one) == 5 for one in found)
    assert str(threading.get_native_id()) not in [task for task, *_ in found]
