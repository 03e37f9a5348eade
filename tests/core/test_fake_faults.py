"""Faults: each kind does what it says, at every operation of the door."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from packtrain.core.bulk import Image, Mapped
from packtrain.core.fake import (
    Choices,
    FakeCrash,
    FakeDisk,
    FakePlatform,
    Fault,
    chosen_faults,
    crash,
    delay,
    duplicate,
    explore,
    fail,
    late,
    later,
    lose,
    lost_reply,
    power_cut,
    stale,
    tear,
)
from packtrain.core.platform import File, Lock, Platform, Process

OPERATIONS: dict[str, Callable[[FakePlatform], Any]] = {
    "boot_ns": lambda p: p.boot_ns(),
    "boot_id": lambda p: p.boot_id(),
    "wall_s": lambda p: p.wall_s(),
    "sleep": lambda p: p.sleep(1),
    "token": lambda p: p.token(),
    "node": lambda p: p.node(),
    "mkdir": lambda p: p.mkdir("/tmp/new"),
    "create": lambda p: p.create("/tmp/new"),
    "reopen": lambda p: p.reopen("/tmp/file"),
    "read": lambda p: p.read("/tmp/file"),
    "size": lambda p: p.size("/tmp/file"),
    "exists": lambda p: p.exists("/tmp/file"),
    "is_dir": lambda p: p.is_dir("/tmp/file"),
    "listdir": lambda p: p.listdir("/tmp"),
    "link": lambda p: p.link("/tmp/file", "/tmp/new"),
    "replace": lambda p: p.replace("/tmp/file", "/tmp/new"),
    "unlink": lambda p: p.unlink("/tmp/file"),
    "rmdir": lambda p: p.rmdir("/tmp/folder"),
    "fsync_dir": lambda p: p.fsync_dir("/tmp"),
    "free_bytes": lambda p: p.free_bytes("/tmp"),
    "modified_s": lambda p: p.modified_s("/tmp/file"),
    "touch": lambda p: p.touch("/tmp/file"),
    "lock": lambda p: p.lock("/tmp/holder", "me"),
    "map_file": lambda p: p.map_file("/tmp/new", 1),
    "is_private": lambda p: p.is_private("/tmp/folder"),
    "spawn": lambda p: p.spawn(["program"], {}),
    "kernel_log": lambda p: p.kernel_log(),
    "datagram_receiver": lambda p: p.datagram_receiver("/tmp/beats"),
    "stream_listener": lambda p: p.stream_listener("/tmp/new"),
    "stream_connect": lambda p: p.stream_connect("/tmp/stream", 1),
}
HELD: dict[str, Callable[[FakePlatform], Callable[[], Any]]] = {
    "write": lambda p: partial(p.create("/tmp/open").write, b"x"),
    "write_at": lambda p: partial(p.create("/tmp/open").write_at, 7, b"x"),
    "filled": lambda p: partial(p.map_file("/tmp/open", 1).filled, 0, 1),
    "fsync": lambda p: p.create("/tmp/open").fsync,
    "close": lambda p: p.create("/tmp/open").close,
    "kernel_log_read": lambda p: p.kernel_log().read,
    "release": lambda p: p.lock("/tmp/holder", "me").release,  # type: ignore[union-attr]
    "poll": lambda p: p.spawn(["program"], {}).poll,
    "wait": lambda p: p.spawn(["program"], {}).wait,
    "signal": lambda p: partial(p.spawn(["program"], {}).send_signal, 15),
    "accept": lambda p: p.stream_listener("/tmp/new").accept,
    "recv": lambda p: partial(p.stream_connect("/tmp/stream", 1).recv, 1),
    "send": lambda p: partial(p.stream_connect("/tmp/stream", 1).sendall, b"x"),
}
EVERY: dict[str, Callable[[FakePlatform], Callable[[], Any]]] = {
    **{name: partial(partial, act) for name, act in OPERATIONS.items()}, **HELD,
}

BULK: dict[str, tuple[str, Callable[[FakePlatform], Callable[[], Any]]]] = {
    "mkdir_new": ("mkdir", lambda p: partial(p.mkdir_new, "/tmp/new")),
    "create_image": ("create", lambda p: partial(p.create_image, "/tmp/new", 1)),
    "read_into": ("read", lambda p: partial(p.read_into, "/tmp/file", 0, memoryview(bytearray(1)))),
    "write_at": ("write", lambda p: partial(p.create_image("/tmp/open", 1).write_at, 0, memoryview(b"x"))),
}
"""Bulk operations, and the plain ones that a plan of faults knows them as."""


class Script:
    """Faults for the operations named, from when it is armed; notes every question it was asked."""

    def __init__(self, **faults: Fault) -> None:
        self.faults, self.armed = faults, False
        self.asked: list[tuple[str, str, int]] = []

    def __call__(self, op: str, path: str, n: int) -> Fault | None:
        self.asked.append((op, path, n))
        return self.faults.get(op) if self.armed else None


def scene(**faults: Fault) -> tuple[FakePlatform, Script]:
    disk = FakeDisk()
    script = Script(**faults)
    platform = FakePlatform(disk, "a", faults=script, programs=lambda argv: 0)
    platform.write_new("/tmp/file", b"content")
    platform.mkdir("/tmp/folder")
    platform.stream_listener("/tmp/stream")
    disk.sync_all()
    return platform, script


def test_nothing_of_the_door_is_left_out() -> None:
    """Every abstract method of Platform, File, Image, Mapped, Process and Lock is among the operations tested below, or
    passes as one of them; a crew does nothing by itself, and the fake machine has no network: that always fails."""
    for kind in (Platform, File, Image, Mapped, Process, Lock):
        names = {"send_signal": "signal"} | {name: op for name, (op, _) in BULK.items()}
        beside = {"crew", "tcp_listener", "tcp_connect"}
        abstract = {names.get(name, name) for name in kind.__abstractmethods__ - beside}
        assert abstract <= set(EVERY), kind
    assert not inspect.isabstract(FakePlatform)


@pytest.mark.parametrize("name", BULK)
def test_a_bulk_operation_can_fail_as_the_plain_one(name: str) -> None:
    """A plan that strikes writes strikes those of images too; so with creating and reading."""
    op, ready = BULK[name]
    platform, script = scene(**{op: fail(errno.ENOSPC)})
    act = ready(platform)
    script.armed, before = True, len(script.asked)
    with pytest.raises(OSError) as raised:
        act()
    assert raised.value.errno == errno.ENOSPC and [question[0] for question in script.asked[before:]] == [op]


def test_what_a_crew_raised_comes_to_its_waiter() -> None:
    """Not to the one who started it: as with threads."""
    platform, script = scene(write=fail(errno.EIO))
    image = platform.create_image("/tmp/new", 1)
    script.armed = True
    wait = platform.crew(2).start(lambda: image.write_at(0, memoryview(b"x")))
    with pytest.raises(OSError):
        wait()


@pytest.mark.parametrize("op", EVERY)
def test_every_operation_can_fail_and_be_died_in(op: str) -> None:
    """Each operation asks once; a fault makes it raise the errno given, or ends the process before it is done."""
    for fault, expected in ((fail(errno.ENOSPC), OSError), (crash(), FakeCrash), (power_cut(), FakeCrash)):
        platform, script = scene(**{op: fault})
        act = EVERY[op](platform)
        script.armed, before = True, len(script.asked)
        with pytest.raises(expected) as raised:
            act()
        assert [question[0] for question in script.asked[before:]] == [op]
        assert not isinstance(raised.value, OSError) or raised.value.errno == errno.ENOSPC
        script.armed = False
        if expected is FakeCrash:
            with pytest.raises(FakeCrash):
                platform.exists("/")


@pytest.mark.parametrize("op", sorted(EVERY.keys() - {"accept", "recv"}))
def test_every_operation_can_take_long(op: str) -> None:
    """A delay is virtual time spent before the operation is done (accept and recv would wait for a peer besides)."""
    platform, script = scene(**{op: delay(50)})
    act = EVERY[op](platform)
    script.armed, before = True, platform.disk.clock.now_ns
    act()
    assert 50 <= (platform.disk.clock.now_ns - before) / 1e9 < 52


def test_operations_are_numbered_from_one() -> None:
    """What others can see is counted per process without holes; glances at clock and chance are number 0."""
    platform, script = scene()
    platform.boot_ns()
    platform.token()
    counted = [n for _, _, n in script.asked if n]
    assert counted == list(range(1, platform.ops + 1))
    assert [(op, n) for op, _, n in script.asked[-2:]] == [("boot_ns", 0), ("token", 0)]
    assert script.asked[0] == ("create", "/tmp/file", 1)


def test_a_lost_reply_is_done_all_the_same() -> None:
    """The caller sees an error, the disk the change; a failure whose reply is lost looks the same."""
    platform, script = scene(link=lost_reply(errno.ETIMEDOUT))
    script.armed = True
    for _ in range(2):
        with pytest.raises(TimeoutError):
            platform.link("/tmp/file", "/tmp/new")
    assert platform.read("/tmp/new") == b"content"


def test_a_torn_write_leaves_its_first_part() -> None:
    """A write stops part way and then fails, or the process or the machine dies with it."""
    for then, expected in (("fail", OSError), ("crash", FakeCrash), ("power_cut", FakeCrash)):
        platform, script = scene(write=tear(0.25, then))  # type: ignore[arg-type]
        file = platform.create("/tmp/new")
        script.armed = True
        with pytest.raises(expected):
            file.write(b"01234567")
        assert bytes(platform.disk.find_file("/tmp/new").data) == b"01"
        assert platform.dead == (then == "crash") and platform.disk.dark == (then == "power_cut")


def test_a_stale_view_is_of_the_past() -> None:
    """Listings and lookups may show a folder as it was some changes ago; the change itself stands."""
    platform, script = scene(listdir=stale(2), exists=stale(1), read=stale(1), size=stale(1), is_dir=stale(1))
    platform.unlink("/tmp/file")
    platform.write_new("/tmp/new", b"x")
    script.armed = True
    assert platform.listdir("/tmp") == ["file", "folder", "stream"]
    assert not platform.exists("/tmp/new") and not platform.is_dir("/tmp/new")
    for look in (platform.read, platform.size):
        with pytest.raises(FileNotFoundError):
            look("/tmp/new")
    script.armed = False
    assert platform.listdir("/tmp") == ["folder", "new", "stream"]


def test_a_duplicate_is_done_twice() -> None:
    """A request sent twice gives the second answer at once, or is done again when nobody thinks of it."""
    platform, script = scene(link=duplicate(), replace=duplicate(after=4))
    script.armed = True
    with pytest.raises(FileExistsError):
        platform.link("/tmp/file", "/tmp/new")
    assert platform.read("/tmp/new") == b"content"
    platform.replace("/tmp/new", "/tmp/other")
    script.armed = False
    platform.write_new("/tmp/new", b"made after the rename")
    assert not platform.exists("/tmp/new"), "the old rename came again and took the new file along"
    assert platform.read("/tmp/other") == b"made after the rename"


def test_a_late_operation_comes_after_its_failure() -> None:
    """The caller was told of a failure and the operation is done a few operations later all the same."""
    platform, script = scene(unlink=late(after=2))
    script.armed = True
    with pytest.raises(TimeoutError):
        platform.unlink("/tmp/file")
    assert [platform.exists("/tmp/file") for _ in range(4)] == [True, True, False, False]


def test_lost_and_postponed_effects() -> None:
    """An fsync may lie, and a change reported as done may come later, by operations or by seconds."""
    platform, script = scene(fsync_dir=lose(), unlink=later(after=1), rmdir=later(seconds=10))
    script.armed = True
    platform.unlink("/tmp/file")
    platform.rmdir("/tmp/folder")
    assert platform.exists("/tmp/folder") and not platform.exists("/tmp/file")
    platform.sleep(11)
    assert not platform.exists("/tmp/folder")
    platform.fsync_dir("/tmp")
    assert FakePlatform(platform.disk.after_power_cut(Choices())).exists("/tmp/file")


def test_chosen_faults_strike_everywhere_once() -> None:
    """With a budget of one, each fault on the menu strikes each operation in some run, and never two in one run."""
    menu = [fail(errno.ENOSPC), crash()]
    struck: list[tuple[str, Fault]] = []
    for choices in explore():
        faults = chosen_faults(choices, lambda op, path: menu if op != "fsync" else menu[1:])
        platform = FakePlatform(FakeDisk(), "a", faults=Noted(faults, struck))
        before = len(struck)
        with suppress(OSError, FakeCrash):
            platform.write_new("/tmp/a", b"x")
            platform.fsync_dir("/tmp")
        assert len(struck) - before == sum(pick > 0 for pick in choices.script) <= 1
    expected = {(op, fault) for op in ("create", "write", "fsync", "close", "fsync_dir") for fault in menu}
    assert set(struck) == expected - {("fsync", menu[0])}
    assert len(struck) == len(set(struck)), "a run was repeated"


class Noted:
    """Faults that write down what struck."""

    def __init__(self, faults: Callable[[str, str, int], Fault | None], struck: list[tuple[str, Fault]]) -> None:
        self.faults, self.struck = faults, struck

    def __call__(self, op: str, path: str, n: int) -> Fault | None:
        fault = self.faults(op, path, n)
        if fault is not None:
            self.struck.append((op, fault))
        return fault
