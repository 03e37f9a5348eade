"""One process holds a run: a lock on a file in its folder, which the kernel drops when that process ends."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime

from packtrain.core.errors import RunHeld
from packtrain.core.platform import Lock, Platform

WAIT = "wait for it, stop it with Ctrl-C or SIGTERM, or start another run with --new"


def hold(platform: Platform, run_folder: str, job: str, fix: str = WAIT) -> Lock:
    """The run's lock. Raises RunHeld naming who has it; OSError."""
    since = datetime.fromtimestamp(platform.wall_s(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    note = {"job": job, "pid": os.getpid(), "node": platform.node(), "since": since}
    lock = platform.lock(f"{run_folder}/holder", json.dumps(note))
    if lock is None:
        raise RunHeld(
            f"the run is held by {holder_text(platform, run_folder)}", where=run_folder, fix=fix,
        )
    return lock


def holder_text(platform: Platform, run_folder: str) -> str:
    """Who holds a run, in words, from the note in its holder file."""
    try:
        note = platform.read_json(f"{run_folder}/holder")
        return f"job {note['job']!r}: process {note['pid']} on {note['node']}, since {note['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process, which is just starting"
