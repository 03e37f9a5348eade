"""The one door to the outside: clock, sleep, randomness, files, processes and sockets.

Everything that decides is pure; whatever touches the machine does it through a `Platform` it was handed, so that
tests and the simulator can hand in another world (`core/fake.py`). All file errors are `OSError` with an `errno`,
on both sides. Paths are `str`. This file is the only one that may name the wall clock, sleep, subprocess or random.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from packtrain.core.bulk import Crew, DirectImage, Image, Mapped, MappedFile, Threads
from packtrain.core.kernel_log import KernelLog, Kmsg

NODE_CHARS_MAX = 64
SOCKET_PATH_BYTES_MAX = 107
"""What sockaddr_un holds on Linux, less the final NUL (unix(7))."""
BACKLOG = 64
"""Connections the kernel holds for a listener that has not accepted them yet."""
SHIM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.py")


class File(Image):
    """A file open for writing by one process: `create` for appending, `reopen` for writing in places."""

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data` after what this object wrote before, or raise OSError."""


class Process(ABC):
    """A started child."""

    pid: int

    @abstractmethod
    def poll(self) -> int | None:
        """Exit status if it ended (negative: the signal that ended it), else None."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit status, or None when `timeout_s` passed first."""

    @abstractmethod
    def send_signal(self, signum: int) -> None:
        """No error when it is gone already."""


class Lock(ABC):
    """A held exclusive lock on a file; the kernel drops it when the holder dies."""

    @abstractmethod
    def release(self) -> None: ...


class Platform(ABC):
    """The door. Two implementations: `LocalPlatform` here and `FakePlatform` in core/fake.py."""

    # --- time and chance ---
    @abstractmethod
    def boot_ns(self) -> int:
        """Nanoseconds since boot, counting suspend (CLOCK_BOOTTIME)."""

    @abstractmethod
    def boot_id(self) -> str: ...

    @abstractmethod
    def wall_s(self) -> float:
        """Seconds since 1970: for showing dates and for grace periods that span reboots, never for ordering."""

    @abstractmethod
    def sleep(self, seconds: float) -> None: ...

    @abstractmethod
    def token(self, n_bytes: int = 8) -> str:
        """Fresh random hex."""

    @abstractmethod
    def node(self) -> str:
        """This node's name, safe in file names."""

    # --- files ---
    @abstractmethod
    def mkdir(self, path: str, mode: int = 0o755) -> None:
        """With parents; no error when it exists."""

    @abstractmethod
    def mkdir_new(self, path: str) -> None:
        """One folder that must not exist, for whoever may take it away again; EEXIST otherwise."""

    @abstractmethod
    def create(self, path: str, mode: int = 0o644) -> File:
        """Create a file that must not exist (O_EXCL); EEXIST otherwise."""

    @abstractmethod
    def reopen(self, path: str) -> File:
        """An existing file, for `write_at`: what an earlier process left unfinished is gone on with."""

    @abstractmethod
    def create_image(self, path: str, size: int, mode: int = 0o644) -> Image:
        """Create a large file that must not exist, to be written past the cache; EEXIST otherwise."""

    @abstractmethod
    def map_file(self, path: str, size: int) -> Mapped:
        """A file of `size` bytes, at least 1, to be written in place: made where it is not there, for its owner alone.
        """

    @abstractmethod
    def crew(self, threads: int) -> Crew: ...

    @abstractmethod
    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes: ...

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Bytes read: fewer than fit only where the file ends."""

    @abstractmethod
    def size(self, path: str) -> int: ...

    @abstractmethod
    def exists(self, path: str) -> bool:
        """False only on ENOENT/ENOTDIR; any other error is raised."""

    @abstractmethod
    def is_dir(self, path: str) -> bool:
        """False also on ENOENT/ENOTDIR; any other error is raised."""

    @abstractmethod
    def is_private(self, path: str) -> bool:
        """Whether it is a folder, no link to one, that belongs to this user and that nobody else may enter."""

    @abstractmethod
    def listdir(self, path: str) -> list[str]:
        """Sorted names."""

    @abstractmethod
    def link(self, source: str, target: str) -> None:
        """Hard link, EEXIST when the target exists: the create-if-absent of the commit log."""

    @abstractmethod
    def replace(self, source: str, target: str) -> None: ...

    @abstractmethod
    def unlink(self, path: str) -> None: ...

    @abstractmethod
    def rmdir(self, path: str) -> None: ...

    @abstractmethod
    def fsync_dir(self, path: str) -> None: ...

    @abstractmethod
    def free_bytes(self, path: str) -> int: ...

    @abstractmethod
    def modified_s(self, path: str) -> float:
        """Wall-clock time of the last change."""

    @abstractmethod
    def touch(self, path: str) -> None:
        """It was changed just now: what is written through a mapping does not say so. FileNotFoundError: it is gone."""

    @abstractmethod
    def lock(self, path: str, note: str) -> Lock | None:
        """Exclusive lock on `path` (created when absent) with `note` written inside; None when another holds it."""

    # --- processes ---
    @abstractmethod
    def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], *, cwd: str | None = None, log_path: str | None = None,
        die_with_parent: bool = True,
    ) -> Process:
        """Start a child in its own session; stdout and stderr go to `log_path` (appended), or are inherited.

        A command that cannot be started ends with 127 (not found) or 126, as from a shell, when it dies with its
        parent; otherwise OSError is raised here. Call from a thread that lives on: the tie is to the thread.
        """

    # --- the kernel ---
    @abstractmethod
    def kernel_log(self) -> KernelLog:
        """Its log from now on. Raises OSError where it may not be read."""

    # --- unix sockets ---
    @abstractmethod
    def datagram_receiver(self, path: str) -> socket.socket: ...

    @abstractmethod
    def stream_listener(self, path: str) -> socket.socket: ...

    @abstractmethod
    def stream_connect(self, path: str, timeout_s: float) -> socket.socket: ...

    # --- the network ---
    @abstractmethod
    def tcp_listener(self, host: str) -> socket.socket:
        """On a free port of that address of this node."""

    @abstractmethod
    def tcp_connect(self, host: str, port: int, timeout_s: float) -> socket.socket: ...

    # --- conveniences, built on the above ---
    def write_new(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Create `path` with `data`, fsynced; it must not exist."""
        with self.create(path, mode) as file:
            file.write(data)
            file.fsync()

    def write_replacing(self, path: str, data: bytes, durable: bool = True) -> None:
        """Replace `path` atomically (temp name, fsync, rename, fsync of the folder); a failed try leaves no temp.

        Not `durable`: nothing waits for the disk, and what a power cut leaves is old, new or empty.
        """
        temp = f"{path}.new-{self.token()}"
        try:
            with self.create(temp) as file:
                file.write(data)
                if durable:
                    file.fsync()
            self.replace(temp, path)
        except OSError:
            with suppress(OSError):
                self.unlink(temp)
            raise
        if durable:
            self.fsync_dir(os.path.dirname(path) or ".")

    def read_json(self, path: str) -> Any:
        return json.loads(self.read(path))


class _LocalFile(File):
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes | memoryview) -> None:
        self._check_open()
        view = _as_bytes(data)
        while view:
            n = os.write(self._fd, view)
            view = view[n:]

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._check_open()
        view = _as_bytes(data)
        while view:
            n = os.pwrite(self._fd, view, offset)
            view, offset = view[n:], offset + n

    def fsync(self) -> None:
        self._check_open()
        os.fsync(self._fd)

    def _check_open(self) -> None:
        if self._fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close
    """Who gives a file up while a thread hangs in it cannot close it: the number may be another file's by then."""


class _LocalProcess(Process):
    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, signum: int) -> None:
        try:
            self._popen.send_signal(signum)
        except ProcessLookupError:
            return


class _LocalLock(Lock):
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalPlatform(Platform):
    """The real machine."""

    def boot_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()

    def wall_s(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def token(self, n_bytes: int = 8) -> str:
        return secrets.token_hex(n_bytes)

    def node(self) -> str:
        name = (os.environ.get("PACKTRAIN_NODE") or socket.gethostname())[:NODE_CHARS_MAX]
        return "".join(c if c.isascii() and (c.isalnum() or c in "._") else "_" for c in name) or "node"

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        os.makedirs(path, mode=mode, exist_ok=True)

    def mkdir_new(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str, mode: int = 0o644) -> File:
        return _LocalFile(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))

    def reopen(self, path: str) -> File:
        return _LocalFile(os.open(path, os.O_WRONLY | os.O_CLOEXEC))

    def create_image(self, path: str, size: int, mode: int = 0o644) -> Image:
        return DirectImage(path, size, mode)

    def map_file(self, path: str, size: int) -> Mapped:
        return MappedFile(path, size)

    def crew(self, threads: int) -> Crew:
        return Threads(threads)

    def read(self, path: str, offset: int = 0, size: int = -1) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(size)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(buffer) and (n := file.readinto(buffer[done:])):
                done += n
            return done

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def exists(self, path: str) -> bool:
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_dir(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_private(self, path: str) -> bool:
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def fsync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: str) -> int:
        volume = os.statvfs(path)
        return volume.f_bavail * volume.f_frsize

    def modified_s(self, path: str) -> float:
        return os.stat(path).st_mtime

    def touch(self, path: str) -> None:
        os.utime(path)

    def lock(self, path: str, note: str) -> Lock | None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, note.encode(), 0)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return _LocalLock(fd)

    def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], *, cwd: str | None = None, log_path: str | None = None,
        die_with_parent: bool = True,
    ) -> Process:
        command = list(argv)
        if die_with_parent:
            command = [sys.executable, "-I", "-S", SHIM, str(os.getpid()), "--", *command]
        log = None if log_path is None else open(log_path, "ab")
        try:
            popen = subprocess.Popen(
                command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )
        finally:
            if log is not None:
                log.close()
        return _LocalProcess(popen)

    def kernel_log(self) -> KernelLog:
        return Kmsg()

    def datagram_receiver(self, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        _bind(sock, path)
        sock.setblocking(False)
        return sock

    def stream_listener(self, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _bind(sock, path)
        sock.listen(BACKLOG)
        return sock

    def stream_connect(self, path: str, timeout_s: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            _check_length(path)
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        return sock

    def tcp_listener(self, host: str) -> socket.socket:
        return socket.create_server((host, 0), family=_family(host), backlog=BACKLOG)

    def tcp_connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        sock = socket.create_connection((host, port), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _as_bytes(data: bytes | memoryview) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # cast refuses a zero in the shape


def _bind(sock: socket.socket, path: str) -> None:
    """Bind and keep others out; the socket is closed when that fails."""
    try:
        _check_length(path)
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise


def _check_length(path: str) -> None:
    """ENAMETOOLONG, where `socket` would raise an OSError without an errno."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
