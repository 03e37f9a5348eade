"""How long `packtrain --help` takes as a whole process, beside a Python that does nothing.

Command:  make bench-help
The two run in turn, so that a machine that becomes slower slows both. Medians are printed, and their ratio, which
travels between machines better than seconds do.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

RUNS = 15
TOOL = os.path.join(os.path.dirname(sys.executable), "packtrain")
COMMANDS = {"packtrain --help": [TOOL, "--help"], "python -c pass": [sys.executable, "-c", "pass"]}


def seconds(argv: list[str]) -> float:
    # Without this variable Python keeps compiled modules, as it does for a user.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begun_s = time.perf_counter()
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun_s


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for argv in COMMANDS.values():
        seconds(argv)
    for _ in range(RUNS):
        for name, argv in COMMANDS.items():
            taken[name].append(seconds(argv))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    for name, values in taken.items():
        print(f"{name:18s} median {medians[name]:.3f} s   min {min(values):.3f}   max {max(values):.3f}")
    print(f"{RUNS} runs each")
    tool, nothing = medians.values()
    print(f"ratio {tool / nothing:.1f}; budget for packtrain --help: 0.3 s")


if __name__ == "__main__":
    main()
