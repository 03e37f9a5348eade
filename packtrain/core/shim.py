"""Exec shim: tie this process's life to its parent's, then become the command. `shim.py PPID -- COMMAND ...`.

Run by path with `python -I -S`, so it costs a bare interpreter start. PDEATHSIG survives execve of an ordinary program,
and setting it here, after fork and exec, is safe when the parent has threads. The parent must spawn from a thread that
lives on: the kernel signals when the *thread* that forked ends (prctl(2)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies; die at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parent, separator, *command = sys.argv[1:]
    assert separator == "--" and command, "usage: shim PPID -- COMMAND ..."
    die_with_parent(int(parent))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
