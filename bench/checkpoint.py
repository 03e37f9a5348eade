"""Saves and restores of 2 GiB of state, beside orbax, torch's distributed checkpoint, dd and memcpy.

Command:  make bench-checkpoint     (PEER=/path/to/python: an interpreter with orbax-checkpoint and torch 2.13.0; what
          it lacks is said to be absent. ROUNDS=5, GIB=2, FOLDER=/path on the disk to measure, ONLY=fill for some
          figures alone, separated by `;`.)

`stall` is the time of 60 steps with three asynchronous saves less that of 60 steps without; the last save is waited for
after the clock has stopped. `save` is from the call to durable and published (orbax: finished; dd: fsynced), `restore`
is from a cold cache into the arrays of the same mesh, `other mesh` into arrays cut differently; `fill` is a save to the
memory tier, a copy of the state that training waits for, `fill, summed` the same with the checksums that follow it.
dd writes with bs=16M oflag=direct conv=fsync in as many streams as ours, and reads so.
Each round starts the contenders anew, one after the other, each for all of its figures (after a restore that is not
timed: programs compile): the state of one fits a small machine, that of all three does not. Who is first changes from
round to round; medians over the rounds, ratios to ours. Whatever is read was read once before, from a cold cache and
not timed: what lies behind the disk of a virtual machine may keep it, and then the second reader looks fast.
Goals on CPU: stall no worse than the best of the others, save and restore at 90% of dd's speed, fill at 60% of a warm
memcpy thread's, another mesh at most 1.2 times the same mesh, and faster than orbax.

Each contender is a process (bench/checkpoint_peer.py): a word on each line of its input, seconds back.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import checkpoint_peer
import numpy as np

ROUNDS, GIB = int(os.environ.get("ROUNDS", "5")), float(os.environ.get("GIB", "2"))
STREAMS = 2
"""Writers of one image of ours (checkpoint/pour.py), and so of dd."""
COPIED_BYTES = 256 << 20
"""By the memcpy that fills are compared with: far more than caches hold, and little beside three states in memory."""
FIGURES = ("plain", "saves", "save", "fill", "fill, summed", "restore", "other mesh")
ONLY = os.environ.get("ONLY", ";".join(FIGURES)).split(";")
REHEARSAL = "restore, not timed"
PEER = checkpoint_peer.__file__


@dataclass
class Contender:
    """A process that saves and restores when told to. `absent`: why it cannot."""

    name: str
    python: str
    can: tuple[str, ...]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    version: str = ""
    absent: str = ""

    def turn(self, folder: str, figures: Sequence[str]) -> None:
        """All its figures of one round, each from a cold cache, in a process and a folder of its own."""
        if self.absent:
            return
        os.mkdir(folder)
        self._start(folder)
        for figure in figures:
            if figure == "restore":
                self._take(REHEARSAL)
            self._take(figure)
        self._process.communicate()
        shutil.rmtree(folder)

    def _start(self, folder: str) -> None:
        env = os.environ | {
            "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={checkpoint_peer.DEVICES}",
        }
        self._process = subprocess.Popen(
            [self.python, PEER, self.name, folder, str(GIB)], env=env, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        answer = self._answer()
        self.version, self.absent = answer.get("version", ""), answer.get("absent", "it did not start")
        self.absent = "" if self.version else self.absent

    def _take(self, figure: str) -> None:
        if (figure in self.can or figure == REHEARSAL) and not self.absent:
            assert self._process.stdin is not None
            drop_cache()
            with suppress(BrokenPipeError):
                self._process.stdin.write(figure + "\n")
                self._process.stdin.flush()
            answer = self._answer()
            if "seconds" not in answer:
                self.absent = f"{figure}: {answer.get('failed', 'it ended')}"
            elif figure != REHEARSAL:
                self.seconds.setdefault(figure, []).append(float(answer["seconds"]))

    def median(self, figure: str) -> float:
        return statistics.median(self.seconds.get(figure, [float("nan")]))

    def stall(self) -> float:
        pairs = zip(self.seconds.get("saves", []), self.seconds.get("plain", []))
        return statistics.median([saves - plain for saves, plain in pairs] or [float("nan")])

    def _answer(self) -> dict[str, str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {"failed": "it ended"}


def drop_cache() -> bool:
    """Everything written is on disk and, if this user may ask for it (root may), out of the page cache."""
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as file:
            file.write("3")
    except OSError:
        return False
    return True


def dd(folder: str, reads: bool) -> float:
    """Seconds of STREAMS dd processes for all of the state."""
    count = int(GIB * 1024 / 16 / STREAMS)
    drop_cache()
    begun_s = time.perf_counter()
    commands = [dd_argv(f"{folder}/dd-{n}", count, reads) for n in range(STREAMS)]
    streams = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    assert all(stream.wait() == 0 for stream in streams)
    return time.perf_counter() - begun_s


def dd_argv(path: str, count: int, reads: bool) -> list[str]:
    if reads:
        return ["dd", f"if={path}", "of=/dev/null", "bs=16M", "iflag=direct"]
    return ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={count}", "oflag=direct", "conv=fsync"]


def memcpy(source: np.ndarray, target: np.ndarray) -> float:
    """Seconds of one thread for as many bytes as the state has, from the speed of a part of them."""
    begun_s = time.perf_counter()
    np.copyto(target, source)
    return (time.perf_counter() - begun_s) * GIB * 2**30 / source.nbytes


def contenders(peer: str) -> list[Contender]:
    found = [Contender("packtrain", sys.executable, FIGURES)]
    if peer:
        found += [
            Contender("orbax", peer, tuple(f for f in FIGURES if not f.startswith("fill"))),
            Contender("torch", peer, ("plain", "saves", "save", "restore")),
        ]
    return found


def machine_turn(folder: str, machine: dict[str, list[float]]) -> None:
    """What dd and memcpy make of it now."""
    source = np.ones(COPIED_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    machine["memcpy"].append(memcpy(source, target))
    if {"save", "restore"} & set(ONLY):
        machine["dd write"].append(dd(folder, reads=False))
        dd(folder, reads=True)
        machine["dd read"].append(dd(folder, reads=True))
        for n in range(STREAMS):
            os.unlink(f"{folder}/dd-{n}")


def table(found: list[Contender], machine: dict[str, list[float]], rounds: int) -> None:
    """What is known after so many rounds: who stops it early has that."""
    ours = found[0]
    print(f"medians of {rounds} of {ROUNDS} rounds; in brackets as multiples of ours")
    for one in found:
        if one.absent:
            print(f"{one.name:10s} absent: {one.absent}")
            continue
        cells = [f"stall {one.stall():6.2f} s"] if "saves" in one.seconds else []
        for figure in FIGURES[2:]:
            if figure in one.seconds:
                times = f" ({one.median(figure) / ours.median(figure):.2f} x)" if one is not ours else ""
                cells.append(f"{figure} {one.median(figure):.2f} s{times}")
        cells += [f"60 steps {one.median('plain'):.1f} s"] if "plain" in one.seconds else []
        print(f"{one.name:10s} " + ", ".join(cells) + f"  ({one.version})")
    medians = {name: statistics.median(seconds) for name, seconds in machine.items() if seconds}
    print("machine    " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in medians.items()))
    goals = (
        ("save", "dd write", "of dd's speed", "90%"), ("restore", "dd read", "of dd's", "90%"),
        ("fill", "memcpy", "of memcpy's", "60%"),
    )
    told = [
        f"{figure} at {medians[beside] / ours.median(figure):.0%} {of} (goal: {goal})"
        for figure, beside, of, goal in goals if figure in ours.seconds
    ]
    if "other mesh" in ours.seconds and "restore" in ours.seconds:
        told.append(f"another mesh {ours.median('other mesh') / ours.median('restore'):.2f} x the same (goal: 1.2)")
    print(", ".join(told), flush=True)


def main() -> None:
    if not drop_cache():
        print("the page cache cannot be dropped by this user: restores are not cold")
    with tempfile.TemporaryDirectory(dir=os.environ.get("FOLDER"), prefix="packtrain-bench-") as folder:
        found = contenders(os.environ.get("PEER", ""))
        machine: dict[str, list[float]] = {"dd write": [], "dd read": [], "memcpy": []}
        for number in range(ROUNDS):
            first = number % len(found)
            for one in found[first:] + found[:first]:
                one.turn(f"{folder}/{one.name}", ONLY)
            machine_turn(folder, machine)
            table(found, machine, number + 1)
        if len(found) == 1:
            print("orbax and torch are absent: give PEER=/path/to/python of an environment that has them")


if __name__ == "__main__":
    main()
