"""A pytest command as two sessions side by side: one of some paths, one of all others.

What the first said is printed when both have ended. The exit code is the higher of the two; a session that hangs is
interrupted after LIMIT_S, and that is 124. Ctrl-C interrupts both, once each.
Usage: python -m tests.two_sessions LIMIT_S "PATHS ..." COMMAND...
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import threading

HUNG, SIGNALLED = 124, 128
"""Exit codes, as `timeout` and shells give them."""
ENDING_S = 60.0
"""What an interrupted session has to end."""


def main(limit_s: float, paths: list[str], command: list[str]) -> int:
    with tempfile.TemporaryFile("w+") as said:
        others = [f"--ignore={path}" for path in paths]
        # groups of their own: a terminal's Ctrl-C would reach them beside the one that is passed on
        first = subprocess.Popen([*command, *paths], stdout=said, stderr=subprocess.STDOUT, process_group=0)
        second = subprocess.Popen([*command, *others], process_group=0)
        sessions = (first, second)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: interrupt(sessions))
        hung = threading.Event()
        limit = threading.Timer(limit_s, lambda: (hung.set(), interrupt(sessions)))
        limit.daemon = True
        limit.start()
        codes = [code if code >= 0 else SIGNALLED - code for code in (one.wait() for one in (second, first))]
        limit.cancel()
        print(f"\n--- the other session, which ran beside this one: {' '.join(paths)}", flush=True)
        said.seek(0)
        shutil.copyfileobj(said, sys.stdout)
    worst = max(*codes, HUNG if hung.is_set() else 0)
    if worst:
        print(f"\nexit codes: {codes[1]} of this session, {codes[0]} of the one above it")
    return worst


def interrupt(sessions: tuple[subprocess.Popen[bytes], ...]) -> None:
    """Those that live; what does not end then is killed."""
    living = [one for one in sessions if one.poll() is None]
    for one in living:
        one.send_signal(signal.SIGINT)
    for one in living:
        kill = threading.Timer(ENDING_S, one.kill)
        kill.daemon = True
        kill.start()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2].split(), sys.argv[3:]))
