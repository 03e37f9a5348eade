"""What a process is doing, without its help where it gives none: its own stacks, then py-spy's, then the kernel's word.

    faulthandler    SIGUSR1, where the process has a handler for it; the stacks appear in its log
    py-spy          dump --nonblocking, where the machine lets one process read another
    /proc           what it waits for in the kernel; refused parts are left out

A process without a handler would die of the signal, so `SigCgt` of /proc/PID/status is asked first.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NamedTuple

from packtrain.core.platform import Platform
from packtrain.core.units import NS

FAULTHANDLER_S = 0.5
PY_SPY_S = 1.0
STACKS_S = FAULTHANDLER_S + PY_SPY_S + 0.4
"""All of it."""
LOOK_S = 0.02
TEXT_BYTES_MAX = 64 << 10
TASKS_MAX = 64
BEGINS = (b"Thread 0x", b"Current thread 0x", b"Stack (most recent call first)")
"""How faulthandler begins."""


class Taken(NamedTuple):
    """`how`: faulthandler, py-spy or /proc; `text` empty: unknown, and `how` says why."""

    how: str
    text: str


def take(platform: Platform, pid: int, log_path: str, scratch: str) -> Taken:
    """Stacks of a child, within `STACKS_S`. `log_path`: its log; `scratch`: a file that py-spy may write to."""
    refused = []
    for way in (
        lambda: _faulthandler(platform, pid, log_path), lambda: _py_spy(platform, pid, scratch), lambda: _kernel(pid),
    ):
        found = way()
        if found.text:
            return found._replace(text=found.text[:TEXT_BYTES_MAX])
        refused.append(found.how)
    return Taken("; ".join(refused), "")


def handles(status: str, signum: int) -> bool:
    """Whether a process with this /proc/PID/status has a handler for a signal of its own."""
    for line in status.splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            with suppress(ValueError):
                return bool(int(mask.strip(), 16) >> (signum - 1) & 1)
    return False


def dump_in(log: bytes) -> str:
    """The stacks that faulthandler wrote last into a log; empty: none."""
    starts = [at for begin in BEGINS if (at := log.find(begin)) >= 0]
    return log[min(starts):].decode(errors="replace") if starts else ""


def _faulthandler(platform: Platform, pid: int, log_path: str) -> Taken:
    if not handles(_proc(pid, "status"), signal.SIGUSR1):
        return Taken("no handler for SIGUSR1", "")
    try:
        start = platform.size(log_path)
        os.kill(pid, signal.SIGUSR1)
        text = _settled(platform, log_path, start)
        return Taken("faulthandler" if text else "faulthandler did not answer", text)
    except OSError as error:
        return Taken(f"faulthandler: {error.strerror}", "")


def _settled(platform: Platform, log_path: str, start: int) -> str:
    """What the log grew by, once it grows no more."""
    end_ns, text = platform.boot_ns() + round(FAULTHANDLER_S * NS), ""
    while platform.boot_ns() < end_ns:
        platform.sleep(LOOK_S)
        now = dump_in(platform.read(log_path, start, TEXT_BYTES_MAX))
        if now and now == text:
            break
        text = now
    return text


def _py_spy(platform: Platform, pid: int, scratch: str) -> Taken:
    command = (f"{os.path.dirname(sys.executable)}/py-spy", "dump", "--nonblocking", "--pid", str(pid))
    try:
        start = platform.size(scratch) if platform.exists(scratch) else 0
        spy = platform.spawn(command, dict(os.environ), log_path=scratch)
        status = spy.wait(PY_SPY_S)
        if status is None:
            spy.send_signal(signal.SIGKILL)
        said = platform.read(scratch, start, TEXT_BYTES_MAX).decode(errors="replace")
    except OSError as error:
        return Taken(f"py-spy: {error.strerror}", "")
    if "Thread" in said and "Error" not in said.partition("Thread")[0]:  # its status may be taken by who buries orphans
        return Taken("py-spy", said)
    why = said.strip().splitlines()[-1:] or ["no answer"]
    return Taken(f"py-spy: {why[0][:200]}", "")


def _kernel(pid: int) -> Taken:
    """Of each thread: name, state, what it waits for, and its stack in the kernel where we may read that."""
    lines = []
    for task in _tasks(pid):
        status = dict(line.partition(":")[::2] for line in _proc(pid, f"task/{task}/status").splitlines())
        if status:
            name, state = (status.get(key, "?").strip() for key in ("Name", "State"))
            lines.append(f"thread {task} {name}: {state}, waits in {_proc(pid, f'task/{task}/wchan') or '?'}")
            lines += [f"  {line}" for line in _proc(pid, f"task/{task}/stack").splitlines()]
    return Taken("/proc", "\n".join(lines)) if lines else Taken("/proc: it is gone", "")


def _tasks(pid: int) -> list[str]:
    with suppress(OSError):
        return sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:TASKS_MAX]
    return []


def _proc(pid: int, name: str) -> str:
    """Empty where it is refused."""
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read(TEXT_BYTES_MAX).decode(errors="replace")
    return ""
