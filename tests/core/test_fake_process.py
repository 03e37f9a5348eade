"""Fake children and sockets: what a supervisor can be tested with, in virtual time."""

from __future__ import annotations

import errno
import signal
from collections.abc import Generator

import pytest

from packtrain.core.fake import (
    Baton,
    Choices,
    FakeDisk,
    FakePlatform,
    FakeProcess,
    Fault,
    duplicate,
    later,
    lose,
    tear,
)


def worker(child: FakeProcess) -> Generator[float, None, int]:
    """Ten steps of ten seconds; finishes its step when told to stop."""
    child.catches.add(signal.SIGTERM)
    for step in range(10):
        child.print(f"step {step}\n")
        yield 10
        if child.signals:
            return 75
    return 0


def saver(child: FakeProcess) -> Generator[float, None, int]:
    """Saves for thirty seconds when told to stop."""
    child.catches.add(signal.SIGTERM)
    while not child.signals:
        yield 100
    yield 30
    return 75


def deaf(child: FakeProcess) -> None:
    """Lives until it is killed."""


def dies(child: FakeProcess) -> None:
    """Is killed in the middle of what it does."""
    child.platform.kill()
    child.platform.exists("/")


def parent(disk: FakeDisk | None = None) -> FakePlatform:
    programs = {"worker": worker, "deaf": deaf, "saver": saver, "three": 3, "dies": dies}
    return FakePlatform(disk or FakeDisk(), "a", programs=lambda argv: programs.get(argv[0]))  # type: ignore[arg-type]


def test_a_program_runs_in_virtual_time() -> None:
    """A child sleeps and ends by the clock of its world; its log is a file; it has its own door."""
    platform = parent()
    child = platform.spawn(["worker", "x"], {"A": "1"}, log_path="/tmp/log")
    assert isinstance(child, FakeProcess)
    assert (child.argv, child.env, child.poll()) == (["worker", "x"], {"A": "1"}, None)
    assert child.wait(35) is None
    assert platform.read("/tmp/log") == b"step 0\nstep 1\nstep 2\nstep 3\n"
    assert child.wait() == 0
    assert round(platform.disk.clock.now_ns / 1e9) == 100
    assert child.platform.dead


def test_signals_end_or_wake() -> None:
    """A caught signal wakes the program, which ends as it likes; others end it; the dead ignore them all."""
    platform = parent()
    child, other = platform.spawn(["worker"], {}), platform.spawn(["deaf"], {})
    platform.sleep(15)
    child.send_signal(signal.SIGTERM)
    assert child.poll() == 75
    other.send_signal(signal.SIGTERM)
    assert other.wait() == -signal.SIGTERM
    other.send_signal(signal.SIGKILL)
    assert other.poll() == -signal.SIGTERM
    third = platform.spawn(["worker"], {})
    third.send_signal(signal.SIGKILL)
    assert third.poll() == -signal.SIGKILL


def test_a_woken_program_sleeps_its_new_sleep() -> None:
    """A program woken by a signal sleeps as long as it says from there on; the sleep it left does not wake it."""
    platform = parent()
    child = platform.spawn(["saver"], {})
    platform.sleep(95)
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 75
    assert round(platform.disk.clock.now_ns / 1e9) == 95 + 30


def test_codes_and_programs_that_are_not_there() -> None:
    """An exit code stands for a program; what is not there ends like from the shell, or raises when untied."""
    platform = parent()
    assert platform.spawn(["three"], {}).wait() == 3
    assert platform.spawn(["nothing"], {}, log_path="/tmp/log").wait() == 127
    assert platform.read("/tmp/log") == b"nothing: no such program\n"
    with pytest.raises(FileNotFoundError):
        platform.spawn(["nothing"], {}, die_with_parent=False)
    assert platform.spawn(["dies"], {}).wait() == -signal.SIGKILL


def test_tied_children_die_with_their_parent() -> None:
    """When the parent is killed its tied children are, and theirs; the others live on."""
    platform = parent()
    tied, free = platform.spawn(["deaf"], {}), platform.spawn(["deaf"], {}, die_with_parent=False)
    assert isinstance(tied, FakeProcess) and isinstance(free, FakeProcess)
    grandchild = tied.platform.spawn(["deaf"], {})
    assert isinstance(grandchild, FakeProcess)
    platform.kill()
    assert [child.platform.dead for child in (tied, grandchild, free)] == [True, True, False]


def test_writers_can_wait_for_children_under_the_baton() -> None:
    """A writer waiting for its child lets the others run, and goes on when the child ends."""
    disk = FakeDisk()
    baton = Baton(Choices(), disk.clock)
    platform = parent(disk)
    platform.scheduler = baton
    other = FakePlatform(disk, "b", baton)
    order: list[str] = []

    def waiter() -> None:
        platform.spawn(["worker"], {}).wait()
        order.append("child ended")

    def sleeper() -> None:
        other.sleep(50)
        order.append("slept")

    baton.run(waiter, sleeper)
    assert order == ["slept", "child ended"]


# --- datagrams ---------------------------------------------------------------------------------------


def beats(*faults: Fault | None) -> list[bytes]:
    """What arrives of the messages 0, 1, 2, ... sent with these faults."""
    disk = FakeDisk()
    agent = FakePlatform(disk, "agent")
    script = iter(faults)
    sender = FakePlatform(disk, "worker", faults=lambda op, path, n: next(script) if op == "send" else None)
    receiver = agent.datagram_receiver("/tmp/beats")
    for i in range(len(faults)):
        try:
            sender.send_datagram("/tmp/beats", b"beat %d" % i)
        except OSError as error:
            assert error.errno == errno.EIO
    arrived = []
    for _ in range(len(faults) + 3):
        try:
            arrived.append(receiver.recv(100))
        except BlockingIOError:
            continue
    return arrived


def test_messages_are_lost_doubled_reordered_and_torn() -> None:
    """Each thing a network does to a message can be scripted."""
    assert beats(None, None) == [b"beat 0", b"beat 1"]
    assert beats(None, lose(), None) == [b"beat 0", b"beat 2"]
    assert beats(duplicate(), None) == [b"beat 0", b"beat 0", b"beat 1"]
    assert beats(later(after=1), None) == [b"beat 1", b"beat 0"]
    assert beats(duplicate(after=1), None) == [b"beat 0", b"beat 1", b"beat 0"]
    assert beats(tear(0.5), None) == [b"bea", b"beat 1"]


def test_a_datagram_queue_is_short_and_needs_a_reader() -> None:
    """The eleventh datagram is refused, as is one to nobody; a receiver never blocks."""
    platform = parent()
    with pytest.raises(FileNotFoundError):
        platform.send_datagram("/tmp/beats", b"x")
    receiver = platform.datagram_receiver("/tmp/beats")
    with pytest.raises(BlockingIOError):
        receiver.recv(10)
    for _ in range(10):
        platform.send_datagram("/tmp/beats", b"0123456789abc")
    with pytest.raises(BlockingIOError):
        platform.send_datagram("/tmp/beats", b"x")
    assert receiver.recv(10) == b"0123456789", "a datagram is cut to the buffer"
    receiver.close()
    with pytest.raises(ConnectionRefusedError):
        platform.send_datagram("/tmp/beats", b"x")
    with pytest.raises(OSError, match="Address already in use"):
        platform.datagram_receiver("/tmp/beats")
    with pytest.raises(OSError, match="Bad file"):
        receiver.recv(10)


# --- streams -----------------------------------------------------------------------------------------


def test_a_stream_carries_bytes_both_ways() -> None:
    """Bytes arrive in order and in pieces; an end closed shows as end of stream; who dies hangs up."""
    disk = FakeDisk()
    carrier, trainer = FakePlatform(disk, "carrier"), FakePlatform(disk, "trainer")
    listener = carrier.stream_listener("/tmp/s")
    client = trainer.stream_connect("/tmp/s", 5)
    server, _ = listener.accept()
    client.sendall(b"offer")
    assert (server.recv(3), server.recv(10)) == (b"off", b"er")
    server.send(b"busy")
    assert client.recv(10) == b"busy"
    with pytest.raises(TimeoutError):
        client.recv(10)
    assert round(disk.clock.now_ns / 1e9) == 5
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.recv(1)
    trainer.kill()
    assert server.recv(10) == b""
    with pytest.raises(BrokenPipeError):
        server.sendall(b"x")


def test_streams_to_nobody_and_torn_ones() -> None:
    """Connecting needs a living listener; a torn send delivers its first part and then the end."""
    disk = FakeDisk()
    carrier = FakePlatform(disk, "carrier")
    trainer = FakePlatform(disk, "trainer", faults=lambda op, path, n: tear(0.5) if op == "send" else None)
    with pytest.raises(FileNotFoundError):
        trainer.stream_connect("/tmp/s", 5)
    listener = carrier.stream_listener("/tmp/s")
    client = trainer.stream_connect("/tmp/s", 5)
    server, _ = listener.accept()
    with pytest.raises(OSError, match="Input/output"):
        client.sendall(b"12345678")
    assert (server.recv(100), server.recv(100)) == (b"1234", b"")
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        trainer.stream_connect("/tmp/s", 5)
    with pytest.raises(OSError, match="too long"):
        carrier.stream_listener("/tmp/" + "x" * 107)


def test_two_processes_talk_under_the_baton() -> None:
    """A server that blocks in accept and recv and a client that blocks on the answer meet in every schedule."""
    for seed in range(50):
        disk = FakeDisk()
        baton = Baton(Choices(seed=seed, rate=0.5), disk.clock, preemptions_max=10)
        carrier, trainer = FakePlatform(disk, "carrier", baton), FakePlatform(disk, "trainer", baton)
        listener = carrier.stream_listener("/tmp/s")

        def serve(listener=listener) -> bytes:  # type: ignore[no-untyped-def]
            server, _ = listener.accept()
            asked = server.recv(100)
            server.sendall(asked.upper())
            return asked

        def ask(trainer=trainer) -> bytes:  # type: ignore[no-untyped-def]
            sock = trainer.stream_connect("/tmp/s", 60)
            sock.sendall(b"offer")
            return sock.recv(100)

        assert [outcome.value for outcome in baton.run(serve, ask)] == [b"offer", b"OFFER"], seed
