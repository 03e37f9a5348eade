"""A build in a process of its own, which can be made to die at a given point: `build_driver.py JSON`.

The argument: {"paths", "out", "options", "effects": [n, ...], "stages": n, "signal": n}. For each of `effects` a
forked child builds and kills itself with SIGKILL at its n-th open, rename, unlink or mkdir under the working folder.
Afterwards this process builds; at its n-th progress report, if `stages` is given, it sends itself `signal`
(SIGINT: its whole group, which it must lead). Prints the card, or the error.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from typing import Any

import msgspec

from packtrain.core.errors import PacktrainError
from packtrain.core.platform import LocalPlatform
from packtrain.data.build import BuildOptions, build

EFFECTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def die_at_effect(n: int, out: str) -> None:
    """From now on, the n-th effect on a file of the build is this process's last."""
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in EFFECTS and isinstance(args[0], str) and ".building-" in args[0]:
            seen += 1
            if seen == n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


class Signalled:
    """Progress that sends this process a signal at its n-th report, after telling who its workers are."""

    def __init__(self, n: int, signum: int) -> None:
        self._left, self._signum = n, signum

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._left -= 1
        if self._left == 0:
            print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
            # Ctrl-C reaches every process of the terminal, a kill only the one it is meant for.
            (os.killpg if self._signum == signal.SIGINT else os.kill)(os.getpid(), self._signum)


def peak_bytes() -> int:
    """Most memory this program held; not that of whoever started it, which ru_maxrss inherits."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def main() -> None:
    order = json.loads(sys.argv[1])
    options = msgspec.convert(order["options"], BuildOptions)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    progress = Signalled(order.get("stages", 0), order.get("signal", signal.SIGKILL))

    def run() -> str:
        return msgspec.json.encode(build(LocalPlatform(), order["paths"], order["out"], options, progress)).decode()

    ends = []
    for n in order.get("effects", ()):
        child = os.fork()
        if child == 0:
            die_at_effect(n, order["out"])
            run()
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(ends), flush=True)
    try:
        print(run())
    except PacktrainError as error:
        print(error.render())
        sys.exit(error.exit_code)
    finally:
        print(json.dumps(len(multiprocessing.active_children())))
        print(json.dumps(peak_bytes()), flush=True)


if __name__ == "__main__":
    main()
