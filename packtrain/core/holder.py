"""One process holds a run: a lock on a file in its folder, which the kernel drops when that process ends."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime

from packtrain.core.errors import RunHeld
from packtrain.core.platform import Lock, Platform

HOLDER = "holder"
WAIT = "wait for it, stop it there (packtrain stop RUN), or start another run with --new"


def hold(platform: Platform, run_folder: str, job: str, fix: str = WAIT, file: str = HOLDER) -> Lock:
    """The run's lock, or another one in its folder. Raises RunHeld naming who has it; OSError."""
    since = datetime.fromtimestamp(platform.wall_s(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    note = {"job": job, "pid": os.getpid(), "node": platform.node(), "since": since}
    lock = platform.lock(f"{run_folder}/{file}", json.dumps(note))
    if lock is None:
        raise RunHeld(
            f"the run is held by {holder_text(platform, run_folder, file)}", where=run_folder, fix=fix,
        )
    return lock


def holder_text(platform: Platform, run_folder: str, file: str = HOLDER) -> str:
    """Who holds a run, in words, from the note in that file."""
    try:
        note = platform.read_json(f"{run_folder}/{file}")
        return f"job {note['job']!r}: process {note['pid']} on {note['node']}, since {note['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process, which is just starting"


def seems_held(platform: Platform, run_folder: str) -> bool:
    """Whether the process named in the holder file lives, for tables. Taking the lock to see would refuse a start."""
    pid = holder_pid(platform, run_folder)
    try:
        if pid is None:
            return False
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def holder_pid(platform: Platform, run_folder: str) -> int | None:
    """Of the process named in the holder file, which may have ended; None: nobody, or one on another node."""
    try:
        note = platform.read_json(f"{run_folder}/{HOLDER}")
        return int(note["pid"]) if note["node"] == platform.node() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
