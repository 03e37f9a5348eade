"""Attention forward and backward under interval masks, beside that of other libraries.

Command:  make bench-attention
          TORCH=/path/to/python (with torch 2.13.0) and TOKAMAX=/path/to/python (with tokamax) add those; the absence of
          either is said. ROUNDS=5 takes more turns.

One row, 8 heads of 64, f32, as a training step runs it: value and three gradients. At 2,048, 4,096 and 8,192 tokens:
causal, packed (four documents), prefix (half), encoder, and at 8,192 `quarter`, documents that leave a quarter of
causal's pairs of blocks. Contenders take turns, a run each. Medians are printed by the clock and in core seconds,
which a busy machine disturbs less; others as multiples of ours. The goal: a mask takes at most 1.15 x the
time of causal x (live pairs / causal's live pairs), and `quarter` at most 0.35 x causal.

Each contender is a process (bench/attention_peer.py). Others compute every pair under every mask but causal, in
quadratic memory, so they stop at 4,096. FlexAttention has no backward on CPU: its figure is forward only.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import attention_peer
import numpy as np

MASKS = ("causal", "packed", "prefix", "encoder", "quarter")
LENGTHS, PEER_LENGTH_MAX = (2048, 4096, 8192), 4096
BLOCK = 256
GOAL, GOAL_QUARTER = 1.15, 0.35
PEER = attention_peer.__file__


def ours(mask: str, length: int) -> attention_peer.Run:
    from packtrain.train.blockwise import blockwise

    return attention_peer.in_jax(lambda *given: blockwise(*given, BLOCK), mask, length)


def live_pairs(mask: str, length: int) -> int:
    """Pairs of blocks that ours visits, counted from the dense mask."""
    starts, ends = attention_peer.intervals(mask, length)
    firsts = np.arange(0, length, BLOCK)
    rows_NM = np.maximum(starts[:, None], firsts) < np.minimum(ends[:, None], firsts + BLOCK)
    return int(rows_NM.reshape(-1, 2 * BLOCK, len(firsts)).any(1).sum())


@dataclass
class Contender:
    """A process that runs a mask when told to. `failed`: what it said instead of seconds."""

    name: str
    argv: list[str]
    seconds: dict[tuple[int, str], list[tuple[float, float]]] = field(default_factory=dict)
    """(length, mask) -> runs: by the clock, and of all cores together."""
    version: str = ""
    failed: str = ""

    def start(self) -> None:
        env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
        self._process = subprocess.Popen(
            self.argv, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.version = self._answer().get("version", "")

    def run(self, mask: str, length: int) -> None:
        assert self._process.stdin is not None
        if self.failed or not self.version:
            return
        self._process.stdin.write(json.dumps({"mask": mask, "length": length}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.failed = answer.get("failed", "")
        if "seconds" in answer:
            self.seconds.setdefault((length, mask), []).append((answer["seconds"], answer["busy_s"]))

    def stop(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {"failed": "the process ended"}

    def medians(self, length: int, mask: str) -> tuple[float, float]:
        clock, busy = zip(*self.seconds.get((length, mask), [(float("nan"),) * 2]))
        return statistics.median(clock), statistics.median(busy)


def contenders() -> list[Contender]:
    here = [sys.executable, __file__, "serve"], [sys.executable, PEER, "jax.nn"]
    found = [Contender(name, argv) for name, argv in zip(("ours", "jax.nn"), here)]
    for variable, names in (("TOKAMAX", ("tokamax",)), ("TORCH", ("torch SDPA", "torch Flex"))):
        if python := os.environ.get(variable):
            found += [Contender(name, [python, PEER, name]) for name in names]
        else:
            print(f"{' and '.join(names)} absent: give {variable}=/path/to/python")
    return found


def turn(found: list[Contender], length: int, rounds: int) -> None:
    for _ in range(rounds):
        for mask in MASKS if length == LENGTHS[-1] else MASKS[:-1]:
            for one in found:
                if one.name == "ours" or length <= PEER_LENGTH_MAX:
                    one.run(mask, length)


def beside(name: str, theirs_s: tuple[float, float], ours_s: tuple[float, float]) -> str:
    return f"{name} {theirs_s[0] / ours_s[0]:.2f} (cores {theirs_s[1] / ours_s[1]:.2f})"


def report(found: list[Contender], length: int) -> None:
    us = found[0]
    for mask in (mask for at, mask in us.seconds if at == length):
        ours_s, causal_s = us.medians(length, mask), us.medians(length, "causal")
        pairs, to_causal = live_pairs(mask, length), [mine / base for mine, base in zip(ours_s, causal_s)]
        share = pairs / live_pairs("causal", length)
        others = "  ".join(beside(one.name, one.medians(length, mask), ours_s) for one in found[1:] if one.seconds)
        print(
            f"{length:6d} {mask:8} {ours_s[0] * 1e3:8.1f} {ours_s[1] * 1e3:8.1f} {pairs:6d}  "
            f"{to_causal[0]:6.3f} {to_causal[0] / share:6.2f}  {to_causal[1]:6.3f} {to_causal[1] / share:6.2f} "
            f"(goal {GOAL_QUARTER if mask == 'quarter' else GOAL})  {others if length <= PEER_LENGTH_MAX else ''}",
            flush=True,
        )


def main() -> None:
    rounds, found = int(os.environ.get("ROUNDS", "3")), contenders()
    for one in found:
        one.start()
        print(f"{one.name}: {one.version or 'did not start'}")
    print(f"medians of {rounds} runs, taken in turn; forward and backward (torch Flex: forward only)")
    print(f"{'length':>6} {'mask':8} {'ms':>8} {'core ms':>8} {'pairs':>6}  / causal, / share  the same in core ms")
    for length in LENGTHS:
        turn(found, length, rounds)
        report(found, length)
    for one in found:
        one.stop()
        if one.failed:
            print(f"{one.name} failed: {one.failed}")


if __name__ == "__main__":
    attention_peer.serve(ours, attention_peer.about("jax")) if len(sys.argv) > 1 else main()
