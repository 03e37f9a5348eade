"""A Platform made of nothing but choices: files that forget, a clock that only moves when told, children by script.

    disk = FakeDisk()
    a = FakePlatform(disk, "a", faults=lambda op, path, n: crash() if n == 7 else None)

Search every interleaving of two writers with at most two preemptions, one fault anywhere, and every power cut:

    for choices in explore():
        disk = FakeDisk()
        baton = Baton(choices, disk.clock, preemptions_max=2, shared=lambda op, path: "/commits" in path)
        faults = chosen_faults(choices, lambda op, path: [crash(), lost_reply()] if op == "link" else [crash()])
        a, b = (FakePlatform(disk, name, baton, faults) for name in "ab")
        outcomes = baton.run(lambda: write(a), lambda: write(b))
        after = FakePlatform(disk.after_power_cut(choices), "c")
        ...look at what `after` finds, assert with `choices` in the message...

Operations are counted per process from 1 (`platform.ops`), so "crash at operation k" is a loop over k. Reading clocks,
names and tokens is shown to the faults as operation 0 and is no place to be preempted.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from packtrain.core.bulk import Crew, Image, Mapped
from packtrain.core.fake_disk import (
    WALL_START_S,
    DirNode,
    FakeDisk,
    Fault,
    FileNode,
    crash,
    delay,
    duplicate,
    fail,
    full,
    late,
    later,
    lose,
    lost_reply,
    os_error,
    power_cut,
    stale,
    tear,
)
from packtrain.core.fake_process import FakeProcess, FakeSocket, Program
from packtrain.core.fake_schedule import (
    Baton,
    Chance,
    Choices,
    FakeClock,
    FakeCrash,
    Outcome,
    explore,
    sample,
)
from packtrain.core.kernel_log import KernelLog
from packtrain.core.platform import SOCKET_PATH_BYTES_MAX, File, Lock, Platform, Process
from packtrain.core.units import NS

__all__ = [
    "Baton", "Choices", "FakeClock", "FakeCrash", "FakeDisk", "FakePlatform", "FakeProcess", "FakeSocket", "Fault",
    "Outcome", "chosen_faults", "crash", "delay", "duplicate", "explore", "fail", "late", "later", "lose",
    "lost_reply", "power_cut", "sample", "stale", "tear",
]

T = TypeVar("T")
Faults = Callable[[str, str, int], "Fault | None"]
UPTIME_NS = 100 * NS
"""A node has been up this long when its first process starts."""


def chosen_faults(choices: Choices, menu: Callable[[str, str], Sequence[Fault]], faults_max: int = 1) -> Faults:
    """Faults for `FakePlatform`: before each counted operation `choices` may take one of `menu(op, path)`, at most
    `faults_max` times in all (share the result between writers to share the budget)."""
    left = [faults_max]

    def strike(op: str, path: str, n: int) -> Fault | None:
        if n == 0 or not left[0]:
            return None
        options = menu(op, path)
        pick = choices.pick(1 + len(options), rare=True)
        if not pick:
            return None
        left[0] -= 1
        return options[pick - 1]

    return strike


def _nothing() -> Any:
    return None


class _FakeKernelLog(KernelLog):
    """What is said from now on."""

    def __init__(self, platform: FakePlatform) -> None:
        self._platform, self._heard = platform, len(platform.kernel)

    def read(self) -> list[str]:
        return self._platform.step("kernel_log_read", "", self._new)

    def _new(self) -> list[str]:
        new = self._platform.kernel[self._heard :]
        self._heard += len(new)
        return new

    def close(self) -> None:
        return None


class FakePlatform(Platform):
    """One process `name` on `disk`; processes of one name are on one node and share its boot.

    `programs(argv)` gives the `Program` a child runs (see `FakeProcess`), or an exit code; None: no such program.
    """

    def __init__(
        self, disk: FakeDisk, name: str = "a", scheduler: Baton | None = None, faults: Faults | None = None,
        programs: Callable[[Sequence[str]], Program | int | None] | None = None,
    ) -> None:
        self.disk, self.name = disk, name
        self.scheduler, self.faults, self.programs = scheduler, faults, programs
        disk.processes += 1
        self.serial = disk.processes
        self.ops = 0
        self.dead = False
        self.children: list[FakeProcess] = []
        self.sockets: list[FakeSocket] = []
        self.kernel: list[str] = []
        """What its kernel has said."""
        self._chance = Chance(disk.seed, name, self.serial)
        self._boots = disk.boots.setdefault(name, 1)
        self._changes_ago = 0

    # --- every operation passes here ---

    def step(
        self, op: str, path: str, do: Callable[[], T] = _nothing, torn: Callable[[float], None] | None = None
    ) -> T:
        """One operation: others may go first, a fault may strike, then `do`. FakeCrash when this process is dead."""
        self._check_alive()
        if self.scheduler is not None and op != "close":
            self.scheduler.point(op, path)
            self._check_alive()
        disk = self.disk
        self.ops += 1
        disk.operations += 1
        disk.trace.append((self.name, op, path))
        disk.clock.tick()
        disk.run_deferred()
        self._check_alive()
        fault = self.faults(op, path, self.ops) if self.faults is not None else None
        return do() if fault is None else self._strike(fault, path, do, torn)

    def _glance(self, op: str, do: Callable[[], T]) -> T:
        """An operation nobody else can see: shown to the faults as number 0."""
        self._check_alive()
        fault = self.faults(op, "", 0) if self.faults is not None else None
        return do() if fault is None else self._strike(fault, "", do, None)

    def _check_alive(self) -> None:
        if self.dead or self.disk.dark:
            raise FakeCrash

    def _strike(self, fault: Fault, path: str, do: Callable[[], T], torn: Callable[[float], None] | None) -> T:
        kind = fault.kind
        if kind == "tear" and torn is not None:
            torn(fault.share)
        if kind == "tear":
            kind = fault.then
        if kind == "delay":
            self.pause(fault.seconds)
            return do()
        if kind in ("stale", "duplicate"):
            return self._stale(fault, do) if kind == "stale" else self._duplicate(fault, do)
        if kind in ("lose", "later"):
            self._postpone(fault, do) if kind == "later" else None
            return None  # type: ignore[return-value]
        if kind == "crash":
            self.kill()
            raise FakeCrash
        if kind == "power_cut":
            self.disk.power_off()
            raise FakeCrash
        if kind == "late":
            self.disk.defer(fault.after, do)
        if kind == "lost_reply":
            self._quietly(do)
        raise os_error(fault.errno, path)

    def _stale(self, fault: Fault, do: Callable[[], T]) -> T:
        self._changes_ago = fault.after
        try:
            return do()
        finally:
            self._changes_ago = 0

    def _duplicate(self, fault: Fault, do: Callable[[], T]) -> T:
        result = do()
        if fault.after == 0:
            return do()
        self.disk.defer(fault.after, do)
        return result

    def _postpone(self, fault: Fault, do: Callable[[], object]) -> None:
        if fault.seconds:
            clock = self.disk.clock
            clock.at(clock.now_ns + int(fault.seconds * NS), lambda: self._quietly(do))
        else:
            self.disk.defer(fault.after, do)

    @staticmethod
    def _quietly(do: Callable[[], object]) -> None:
        try:
            do()
        except OSError:
            return

    def kill(self) -> None:
        """kill -9: the kernel keeps what was written, drops the locks, closes the sockets; tied children die too."""
        if self.dead:
            return
        self.dead = True
        for lock in [lock for lock in self.disk.locks.values() if lock.platform is self]:
            lock.drop()
        for sock in self.sockets:
            sock.close()
        for child in self.children:
            child.exit(-9)

    def crash(self, choices: Choices | None = None) -> FakePlatform:
        """The power fails and comes back: this node's next process, over what the disk kept (`choices` decides).

        It runs free of faults and of the baton: the one who looks at what is left.
        """
        disk = self.disk.after_power_cut(choices or Choices(seed=(self.disk.seed, self.disk.operations)))
        disk.clock.advance(disk.clock.now_ns + 30 * NS)
        return FakePlatform(disk, self.name, programs=self.programs)

    # --- time and chance ---

    def boot_ns(self) -> int:
        def now() -> int:
            self.disk.clock.tick()
            return UPTIME_NS + self.disk.clock.now_ns - self.disk.booted_ns

        return self._glance("boot_ns", now)

    def boot_id(self) -> str:
        return self._glance("boot_id", lambda: f"{Chance(self.name, self._boots).bits():016x}{self._boots:016x}")

    def wall_s(self) -> float:
        return self._glance("wall_s", lambda: WALL_START_S + self.disk.clock.now_ns / NS)

    def sleep(self, seconds: float) -> None:
        self.step("sleep", "", lambda: self.pause(seconds))

    def token(self, n_bytes: int = 8) -> str:
        def draw() -> str:
            return "".join(f"{self._chance.bits():016x}" for _ in range(0, n_bytes, 8))[: 2 * n_bytes]

        return self._glance("token", draw)

    def node(self) -> str:
        return self._glance("node", lambda: self.name)

    def pause(self, seconds: float) -> None:
        """Virtual time passes; no operation."""
        self.until(lambda: False, seconds)

    def until(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Virtual time passes until `ready()` or `timeout_s` (None: no end; AssertionError when nothing can come)."""
        clock = self.disk.clock
        wake = None if timeout_s is None else clock.now_ns + int(timeout_s * NS)
        if self.scheduler is not None and self.scheduler.running:
            self.scheduler.wait(ready, wake)
            self._check_alive()
            return
        while not ready() and (wake is None or clock.now_ns < wake):
            times = [when for when in (clock.next_ns(), wake) if when is not None]
            assert times, "waits for what can never come"
            clock.advance(min(times))
        self._check_alive()

    # --- files ---

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        self.step("mkdir", path, lambda: self.disk.mkdir(path))

    def mkdir_new(self, path: str) -> None:
        self.step("mkdir", path, lambda: self.disk.mkdir_new(path))

    def create(self, path: str, mode: int = 0o644) -> File:
        return self.step("create", path, lambda: _FakeFile(self, self.disk.create(path), path))

    def reopen(self, path: str) -> File:
        return self.step("reopen", path, lambda: _FakeFile(self, self.disk.find_file(path), path))

    def create_image(self, path: str, size: int, mode: int = 0o644) -> Image:
        return _FakeImage(_FakeFile(self, self.step("create", path, lambda: self.disk.create(path)), path))

    def map_file(self, path: str, size: int) -> Mapped:
        def make() -> Mapped:
            node = self.disk.find_file(path) if self._look(path) is not None else self.disk.create(path)
            self.disk.resize(node, size, path)
            return _FakeMapped(self, node, path)

        return self.step("map_file", path, make)

    def crew(self, threads: int) -> Crew:
        return _FakeCrew()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        data = self.read(path, offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        def get() -> bytes:
            node = self.disk.find_file(path, self._changes_ago)
            if offset < 0:
                raise os_error(errno.EINVAL, path)
            return bytes(node.data[offset:] if size < 0 else node.data[offset : offset + size])

        return self.step("read", path, get)

    def size(self, path: str) -> int:
        def get() -> int:
            node = self.disk.find(path, self._changes_ago)
            return len(node.data) if isinstance(node, FileNode) else 4096

        return self.step("size", path, get)

    def exists(self, path: str) -> bool:
        return self.step("exists", path, lambda: self._look(path) is not None)

    def is_dir(self, path: str) -> bool:
        return self.step("is_dir", path, lambda: isinstance(self._look(path), DirNode))

    def is_private(self, path: str) -> bool:
        """Modes and owners are not kept: any folder is."""
        return self.step("is_private", path, lambda: isinstance(self.disk.find(path), DirNode))

    def _look(self, path: str) -> FileNode | DirNode | None:
        try:
            return self.disk.find(path, self._changes_ago)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def listdir(self, path: str) -> list[str]:
        def get() -> list[str]:
            return sorted(self.disk.find_dir(path).seen(self._changes_ago))

        return self.step("listdir", path, get)

    def link(self, source: str, target: str) -> None:
        self.step("link", target, lambda: self.disk.link(source, target))

    def replace(self, source: str, target: str) -> None:
        self.step("replace", target, lambda: self.disk.replace(source, target))

    def unlink(self, path: str) -> None:
        self.step("unlink", path, lambda: self.disk.remove_file(path))

    def rmdir(self, path: str) -> None:
        self.step("rmdir", path, lambda: self.disk.remove_dir(path))

    def fsync_dir(self, path: str) -> None:
        self.step("fsync_dir", path, lambda: self.disk.fsync_dir(path))

    def free_bytes(self, path: str) -> int:
        def get() -> int:
            self.disk.find(path)
            return max(0, self.disk.capacity_bytes - self.disk.used_bytes)

        return self.step("free_bytes", path, get)

    def modified_s(self, path: str) -> float:
        return self.step("modified_s", path, lambda: WALL_START_S + self.disk.find(path).modified_ns / NS)

    def touch(self, path: str) -> None:
        self.step("touch", path, lambda: self.disk.touch(path))

    def lock(self, path: str, note: str) -> Lock | None:
        def take() -> Lock | None:
            disk = self.disk
            node = disk.find_file(path) if self._look(path) is not None else disk.create(path)
            if node in disk.locks:
                return None
            disk.overwrite(node, note.encode())
            lock = disk.locks[node] = _FakeLock(self, node)
            return lock

        return self.step("lock", path, take)

    # --- processes ---

    def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], *, cwd: str | None = None, log_path: str | None = None,
        die_with_parent: bool = True,
    ) -> Process:
        return self.step("spawn", argv[0], lambda: self._start(argv, env, log_path, die_with_parent))

    def _start(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: str | None, die_with_parent: bool
    ) -> FakeProcess:
        program = self.programs(argv) if self.programs is not None else None
        if program is None and not die_with_parent:
            raise os_error(errno.ENOENT, argv[0])
        if log_path is not None and self._look(log_path) is None:
            self.disk.create(log_path)
        own = FakePlatform(self.disk, self.name, None, self.faults, self.programs)
        child = FakeProcess(self, own, argv, env)
        child.log_path = log_path
        if die_with_parent:
            self.children.append(child)
        if program is None:
            child.print(f"{argv[0]}: no such program\n")
            child.exit(127)
        elif isinstance(program, int):
            child.exit(program)
        else:
            child.start(program)
        return child

    # --- the kernel ---

    def kernel_log(self) -> KernelLog:
        return self.step("kernel_log", "", lambda: _FakeKernelLog(self))

    # --- unix sockets ---

    def datagram_receiver(self, path: str) -> FakeSocket:
        return self.step("datagram_receiver", path, lambda: self._bind(path, "datagram", 0.0))

    def stream_listener(self, path: str) -> FakeSocket:
        return self.step("stream_listener", path, lambda: self._bind(path, "listener", None))

    def _bind(self, path: str, kind: str, timeout_s: float | None) -> FakeSocket:
        if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
            raise os_error(errno.ENAMETOOLONG, path)
        try:
            node = self.disk.create(path)
        except FileExistsError:
            raise os_error(errno.EADDRINUSE, path) from None
        sock = FakeSocket(self, full(path), kind)
        sock.settimeout(timeout_s)
        node.listener = sock
        return sock

    def _listening(self, path: str) -> FakeSocket:
        """Whoever is bound to `path`; ECONNREFUSED when nobody lives there."""
        listener = self.disk.find_file(path).listener
        if not isinstance(listener, FakeSocket) or listener.ended:
            raise os_error(errno.ECONNREFUSED, path)
        return listener

    def stream_connect(self, path: str, timeout_s: float) -> FakeSocket:
        def connect() -> FakeSocket:
            listener = self._listening(path)
            client = FakeSocket(self, full(path), "stream")
            client.settimeout(timeout_s)
            listener.join(client)
            return client

        return self.step("stream_connect", path, connect)

    # --- the network: this machine has none ---

    def tcp_listener(self, host: str) -> FakeSocket:
        raise os_error(errno.ENETDOWN, host)

    def tcp_connect(self, host: str, port: int, timeout_s: float) -> FakeSocket:
        raise os_error(errno.ENETDOWN, host)

    def send_datagram(self, path: str, data: bytes) -> None:
        """What a program that beats does (its client has no Platform); raises as a non-blocking sendto would."""

        def torn(share: float) -> None:
            self._listening(path).put(data[: int(len(data) * share)])

        self.step("send", path, lambda: self._listening(path).put(data), torn)


class _FakeFile(File):
    def __init__(self, platform: FakePlatform, node: FileNode, path: str) -> None:
        self._platform, self._node, self._path = platform, node, path
        self._closed = False
        self._at = 0

    def _open(self) -> None:
        if self._closed:
            raise os_error(errno.EBADF, self._path)

    def write(self, data: bytes | memoryview) -> None:
        content = bytes(data)

        def put(part: bytes = content) -> None:
            self._open()
            disk, before = self._platform.disk, len(self._node.data)
            if self._at != before:
                disk.write_at(self._node, self._at, part, self._path)
                self._at += len(part)
                return
            try:
                disk.append(self._node, part, self._path)
            finally:
                self._at = len(self._node.data)

        self._platform.step("write", self._path, put, lambda share: put(content[: int(len(content) * share)]))

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        content = bytes(data)

        def put(part: bytes = content) -> None:
            self._open()
            self._platform.disk.write_at(self._node, offset, part, self._path)

        self._platform.step("write_at", self._path, put, lambda share: put(content[: int(len(content) * share)]))

    def fsync(self) -> None:
        def sync() -> None:
            self._open()
            self._node.synced = len(self._node.data)

        self._platform.step("fsync", self._path, sync)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._platform.step("close", self._path)


class _FakeImage(Image):
    """Written front to back, as a crew of one does it."""

    def __init__(self, file: _FakeFile) -> None:
        self._file, self._end = file, 0

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        assert offset == self._end, f"written at {offset}, not at {self._end}"
        self._file.write(data)
        self._end += len(data)

    def fsync(self) -> None:
        self._file.fsync()

    def close(self) -> None:
        self._file.close()


class _FakeMapped(Mapped):
    """What was written into `buffer` is in the file once `filled` was told of it, or a first part of it."""

    def __init__(self, platform: FakePlatform, node: FileNode, path: str) -> None:
        self._platform, self._node, self._path = platform, node, path
        self.buffer = bytearray(node.data)

    def filled(self, start: int, stop: int) -> None:
        def put(end: int = stop) -> None:
            self._node.data[start:end] = self.buffer[start:end]
            self._node.modified_ns = self._platform.disk.clock.now_ns

        self._platform.step("filled", self._path, put, lambda share: put(start + int((stop - start) * share)))


class _FakeCrew(Crew):
    """Does work at once, in the caller's turn; what it raised comes when the caller waits for it."""

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            work()
        except Exception as error:
            return partial(_raise, error)
        return _nothing

    def close(self) -> None:
        pass


def _raise(error: Exception) -> None:
    raise error


class _FakeLock(Lock):
    def __init__(self, platform: FakePlatform, node: FileNode) -> None:
        self.platform, self._node = platform, node

    def drop(self) -> None:
        if self.platform.disk.locks.get(self._node) is self:
            del self.platform.disk.locks[self._node]

    def release(self) -> None:
        self.platform.step("release", "", self.drop)
