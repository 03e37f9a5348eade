"""Processes to kill: a server that has imported everything forks workers and carriers, each in milliseconds, and
reaps them.

    python -m tests.checkpoint.children REPORTS_FD      reads JSON lines on stdin: a child to fork, or {"kill": ID}

Every child, and the server about its children, writes short lines `ID EVENT...` to the one pipe REPORTS_FD.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import sys
from collections.abc import Callable
from typing import Any

from packtrain.checkpoint.carrier import open_carrier
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.neighbours import Neighbours
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.checkpoint.rounds import Round
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import choose_buffer_folder
from packtrain.core.bulk import Image, Mapped
from packtrain.core.contract import CarrierClient
from packtrain.core.platform import File, LocalPlatform
from tests.checkpoint.worlds import big_state, same_bits

Report = Callable[[str], object]


class _MortalFile(File):
    def __init__(self, file: File, mortal: MortalPlatform) -> None:
        self._file, self._mortal = file, mortal

    def write(self, data: bytes | memoryview) -> None:
        """Two operations, so that death can come between the halves."""
        half = len(data) // 2
        self._mortal.count()
        self._file.write(data[:half])
        self._mortal.count()
        self._file.write(data[half:])

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._mortal.count()
        self._file.write_at(offset, data)

    def fsync(self) -> None:
        self._mortal.count()
        self._file.fsync()

    def close(self) -> None:
        self._file.close()


class _MortalImage(Image):
    def __init__(self, image: Image, mortal: MortalPlatform) -> None:
        self._image, self._mortal = image, mortal

    def write_at(self, offset: int, data: memoryview) -> None:
        """Two operations, so that death can come between the halves."""
        half = len(data) // 2
        self._mortal.count()
        self._image.write_at(offset, data[:half])
        self._mortal.count()
        self._image.write_at(offset + half, data[half:])

    def fsync(self) -> None:
        self._mortal.count()
        self._image.fsync()

    def close(self) -> None:
        self._image.close()


class _MortalMapped(Mapped):
    def __init__(self, mapped: Mapped, mortal: MortalPlatform) -> None:
        self.buffer, self._mortal = mapped.buffer, mortal

    def filled(self, start: int, stop: int) -> None:
        self._mortal.count()


class MortalPlatform(LocalPlatform):
    """The real machine, on which this process gets a real signal right before its k-th change of a file; 0: never."""

    def __init__(self, k: int, signum: int = signal.SIGKILL, node: str = "") -> None:
        self._left, self._signum, self._node = k, signum, node
        self.before: Callable[[], object] = lambda: None
        """Called right before the signal."""

    def node(self) -> str:
        return self._node or super().node()

    def count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.before()
            os.kill(os.getpid(), self._signum)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        self.count()
        super().mkdir(path, mode)

    def mkdir_new(self, path: str) -> None:
        self.count()
        super().mkdir_new(path)

    def create(self, path: str, mode: int = 0o644) -> File:
        self.count()
        return _MortalFile(super().create(path, mode), self)

    def create_image(self, path: str, size: int, mode: int = 0o644) -> Image:
        self.count()
        return _MortalImage(super().create_image(path, size, mode), self)

    def map_file(self, path: str, size: int) -> Mapped:
        self.count()
        return _MortalMapped(super().map_file(path, size), self)

    def replace(self, source: str, target: str) -> None:
        self.count()
        super().replace(source, target)

    def link(self, source: str, target: str) -> None:
        self.count()
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self.count()
        super().unlink(path)

    def fsync_dir(self, path: str) -> None:
        self.count()
        super().fsync_dir(path)


def carrier(spec: dict[str, Any], report: Report) -> None:
    platform = MortalPlatform(spec["dies_at"], spec.get("signal", signal.SIGKILL), spec.get("node", ""))
    platform.before = lambda: report("signalled")
    neighbours = Neighbours(platform, spec["peers"], "127.0.0.1", trusted=False) if "peers" in spec else None
    serving = open_carrier(platform, spec["run"], spec["socket"], spec["begin"], neighbours=neighbours)
    signal.signal(signal.SIGUSR1, lambda signum, frame: serving.hurry())
    signal.signal(signal.SIGTERM, lambda signum, frame: serving.stop())
    report("ready")
    serving.serve()


def worker(spec: dict[str, Any], report: Report) -> None:
    """Restores what its attempt begins from, then saves every step until it is killed, or a save fails."""
    platform = LocalPlatform()
    log = CommitLog(platform, f"{spec['run']}/commits")
    begin = log.read(spec["begin"])
    assert begin is not None
    if begin.step >= 0:
        point = next(commit for commit in log.follow(begin.number) if commit.kind == "save")
        checkpoint = open_checkpoint(platform, spec["run"], point)
        for piece in big_state(point.attempt, point.step, spec["writers"], None):
            assert same_bits(checkpoint.read(piece.spec.name), piece.array)
    saver = Saver(platform, spec["buffers"], CarrierClient(spec["socket"], 10.0), begin.attempt, spec["writer"], 30.0)
    for step in range(begin.step + 1, begin.step + 1 + spec["saves"]):
        pieces = big_state(begin.attempt, step, spec["writers"], spec["writer"])
        report(f"fills {step}")
        saver.save(step, pieces, {"data_index": step})
        report(f"offered {step}")
        for result in saver.wait_all(30.0):
            report(f"failed {result.step} {result.error['name']}" if result.error else f"published {result.commit}")
            if result.error:
                return


def _furthest(platform: LocalPlatform, path: str, step: int) -> int:
    """The step that all are at: whoever was held up goes on where the others are."""
    known = int(platform.read(path)) if platform.exists(path) else -1
    if step > known:
        platform.write_replacing(path, str(step).encode())
    return max(step, known)


def stayer(spec: dict[str, Any], report: Report) -> None:
    """Saves step after step, whatever becomes of carriers, until a step is published that the file `until` names."""
    platform, until = LocalPlatform(), f"{spec['run']}/until"
    attempt, deadline_s = spec["attempt"], spec["deadline_s"]
    saver = Saver(platform, spec["buffers"], CarrierClient(spec["socket"], 2.0), attempt, spec["writer"], deadline_s)
    step = 0
    while True:
        step = _furthest(platform, f"{spec['run']}/furthest{attempt}", step)
        if saver.save(step, big_state(attempt, step, spec["writers"], spec["writer"]), {"data_index": step}) is None:
            platform.sleep(0.02)
            continue
        report(f"offered {step}")
        for result in saver.wait_all(deadline_s + 60.0):
            error = result.error or {"name": "", "what": ""}
            report(f"failed {result.step} {error['what']}" if result.error else f"published {result.step}")
            ended = not result.error and platform.exists(until) and result.step >= int(platform.read(until))
            if ended or error["name"] == "commits.stale":
                return
            step += result.step == step and error["name"] != "checkpoint.carrier_lost"


def rememberer(spec: dict[str, Any], report: Report) -> None:
    """Copies every step into memory until it is killed."""
    platform = LocalPlatform()
    begin = CommitLog(platform, f"{spec['run']}/commits").begun()
    assert begin is not None
    where = choose_buffer_folder(platform, spec["run"], 1 << 20, spec["writer"], begin)
    saver = Saver(platform, where, CarrierClient(spec["socket"]), begin.attempt, spec["writer"], 30.0, begin)
    for step in itertools.count(begin.step + 1):
        pieces = big_state(begin.attempt, step, spec["writers"], spec["writer"])
        report(f"fills {step}")
        saver.remember(step, pieces, {"data_index": step})


def member(spec: dict[str, Any], report: Report) -> None:
    """One writer of several nodes: remembers each step that the file `go` allows, and tells when its peer has it."""
    os.environ["PACKTRAIN_NODE"] = spec["node"]
    platform = LocalPlatform()
    begin = CommitLog(platform, f"{spec['run']}/commits").begun()
    assert begin is not None
    where = choose_buffer_folder(platform, spec["run"], 1 << 20, spec["writer"], begin, peer=True)
    saver = Saver(platform, where, CarrierClient(spec["socket"]), begin.attempt, spec["writer"], 30.0, begin, True)
    last = 0
    for step in itertools.count(max(1, begin.step + 1)):
        while int(platform.read(f"{spec['run']}/go") or b"-1") < step:
            platform.sleep(0.002)
        pieces = big_state(begin.attempt, step, len(begin.writers), spec["writer"])
        saver.remember(step, pieces, {"data_index": step}, Round(step, last))
        last = step
        report(f"fills {step}")
        before = saver.copied, saver.not_copied
        while (saver.copied, saver.not_copied) == before:
            saver.poll()
            platform.sleep(0.002)
        report(f"copied {step}" if saver.copied > before[0] else f"missed {step}")


ROLES = {"worker": worker, "carrier": carrier, "rememberer": rememberer, "stayer": stayer, "member": member}


def _fork(spec: dict[str, Any], reports: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ROLES[spec["role"]](
            spec, lambda event: os.write(reports, f"{spec['id']} {event}\n".encode())
        )
        status = 0
    except BaseException as error:
        text = f"{spec['id']} raised {type(error).__name__}: {error}".replace("\n", " ")
        os.write(reports, text[:4000].encode() + b"\n")
    finally:
        os._exit(status)


def _reap(children: dict[int, str], reports: int) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        os.write(reports, f"{children.pop(pid)} exit {os.waitstatus_to_exitcode(status)}\n".encode())


def main() -> None:
    reports = int(sys.argv[1])
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    children: dict[int, str] = {}
    selector = selectors.DefaultSelector()
    selector.register(woken, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    partial = b""
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if woken in ready:
            os.read(woken, 4096)
            _reap(children, reports)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "kill" in message:
                    for pid in [pid for pid, name in children.items() if name == message["kill"]]:
                        os.kill(pid, message.get("signal", signal.SIGKILL))
                else:
                    children[_fork(message, reports)] = message["id"]
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
