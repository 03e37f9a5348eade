"""Tokens per second and share of the machine's matmul peak of a whole training step, beside the same model in torch.

Command:  make bench-train          (PEER=/path/to/python: an interpreter with torch 2.13.0; without it torch is absent)
About 30M parameters, 4 rows of 512 tokens, f32, AdamW and clipping on both sides, FLOPs counted by one formula. The
contenders take a few steps each in turn, so that a machine that becomes slower slows all. Packtrain and torch eager run
the batch whole and row by row (microbatches whose activations fit the caches); the loss is of the same batch. The peak
is the best square matmul of jax, torch and numpy. On a machine that does other work, `taskset -c 1` before the command
and the processor seconds: with one thread there is no waiting in them.

Each contender is a process: sizes as JSON in its arguments, a number of steps on each line of its input, a line of
JSON back for each, and one about itself first.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SIZES = {
    "vocab": 8192, "layers": 8, "embed": 512, "heads": 8, "head": 64, "mlp": 1408, "rows": 4, "length": 512,
    "peak_size": 2048, "parts": 1,
}
"""`parts`: microbatches."""
BY_ROW = SIZES | {"parts": 4}
LOSS_TOKENS = 256
"""Of a chunk of the loss, by row: as many as first-light takes."""
WARM_STEPS, ROUNDS, STEPS_A_ROUND = 2, 5, 2
HERE = os.path.dirname(os.path.abspath(__file__))
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""As `packtrain train` sets it for its workers; torch gets it, too."""


class Ours:
    """The shipped step on the shipped recipe's execution, with guard and digest."""

    def __init__(self, sizes: dict[str, int]) -> None:
        import jax

        from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig
        from packtrain.train.flops import measure_peak, step_flops
        from packtrain.train.mesh import make_mesh
        from packtrain.train.orders import SILENCE, Wire
        from packtrain.train.state import count_parameters, init_state
        from packtrain.train.step import make_step, place_batch

        names = ("vocab", "layers", "embed", "heads", "head", "mlp")
        model = ModelConfig(**{n: sizes[n] for n in names}, kv_heads=sizes["heads"], qk_norm=False)
        loss_tokens = LOSS_TOKENS if sizes["parts"] > 1 else 0
        train = TrainConfig(unroll=True, microbatches=sizes["parts"], loss_tokens=loss_tokens)
        optim = OptimConfig(learning_rate=1e-5)
        mesh, batch = make_mesh({}, jax.devices()[:1]), Rows(sizes)
        self._jax = jax
        self._program = make_step(model, optim, GuardConfig(), train, mesh)
        self._state, self._orders = init_state(model, optim, 0, mesh), Wire(mesh).place(SILENCE)
        self._batch = place_batch(batch, mesh, train.microbatches)
        self.about = {
            "version": f"jax {jax.__version__}", "parameters": count_parameters(model),
            "flops": step_flops(model, batch),
            "peak": measure_peak(jax.devices()[:1], time.perf_counter_ns, size=sizes["peak_size"]),
        }

    def step(self) -> float:
        self._state, out = self._program(self._state, self._batch, self._orders, 0)
        self._jax.block_until_ready((self._state, out))
        return float(out.loss)


class Rows:
    """A batch of random tokens, each row one document."""

    def __init__(self, sizes: dict[str, int]) -> None:
        B, L = sizes["rows"], sizes["length"]
        text_BL = np.random.default_rng(0).integers(0, sizes["vocab"], (B, L + 1), dtype=np.int32)
        self.tokens_BL, self.targets_BL = text_BL[:, :-1], text_BL[:, 1:]
        self.weights_BL = np.ones((B, L), np.float32)
        self.positions_BL = np.tile(np.arange(L, dtype=np.int32), (B, 1))
        self.starts_BL, self.ends_BL = np.zeros((B, L), np.int32), self.positions_BL + 1


def contend(sizes: dict[str, int]) -> None:
    """Ours, as a contender's process."""
    ours = Ours(sizes)
    print(json.dumps(ours.about), flush=True)
    for line in sys.stdin:
        seconds, processor, loss = [], [], 0.0
        for _ in range(int(line)):
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            loss = ours.step()
            seconds.append(time.perf_counter() - begun_s)
            processor.append(time.process_time() - begun_cpu_s)
        print(json.dumps({"seconds": seconds, "processor": processor, "loss": loss}), flush=True)


@dataclass
class Contender:
    """A process that trains when told to. `about`: what it said of itself; empty where it could not start."""

    name: str
    argv: list[str]
    about: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    first_s: float = 0.0
    loss: float = 0.0

    def start(self) -> None:
        env = os.environ | {"GLIBC_TUNABLES": HUGE_PAGES, "PYTHONPATH": os.path.dirname(HERE)}
        self._process = subprocess.Popen(
            self.argv, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.about = self._answer()
        if self.about:
            self.first_s = self._steps(WARM_STEPS)["seconds"][0]

    def run(self) -> None:
        if self.about:
            answer = self._steps(STEPS_A_ROUND)
            self.seconds += answer["seconds"]
            self.processor += answer["processor"]

    def stop(self) -> None:
        self._process.communicate()

    def _steps(self, n: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{n}\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.loss = answer["loss"]
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line else {}


def numpy_peak(size: int, tries: int = 5) -> float:
    x, best_s = np.full((size, size), 1 / size, np.float32), float("inf")
    for _ in range(tries):
        begun_s = time.perf_counter()
        np.matmul(x, x)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 2 * size**3 / best_s


def contenders(peer: str) -> list[Contender]:
    """Packtrain by row is the first: others are compared with it."""
    whole, by_row = json.dumps(SIZES), json.dumps(BY_ROW)
    ours = [Contender("packtrain by row", [sys.executable, __file__, by_row])]
    ours += [Contender("packtrain whole", [sys.executable, __file__, whole])]
    cases = ("eager", whole), ("eager", by_row), ("compile", whole)
    argv = [peer, f"{HERE}/train_torch.py"]
    names = "torch eager", "torch eager by row", "torch compile"
    return ours + [Contender(name, [*argv, sizes, mode]) for name, (mode, sizes) in zip(names, cases) if peer]


def row(one: Contender, flops: int, peak: float, ours_s: float) -> str:
    if not one.about:
        return f"{one.name:18s} absent: it did not start"
    median_s = statistics.median(one.seconds)
    rates = f"{SIZES['rows'] * SIZES['length'] / median_s:6.0f} tokens/s {flops / median_s / 1e9:6.1f} GFLOP/s"
    seconds = f"step {median_s:.3f} s ({min(one.seconds):.3f} to {max(one.seconds):.3f})"
    about = f"{one.about['version']}, {one.about['parameters'] / 1e6:.2f}M, first step {one.first_s:.0f} s"
    processor = f"processor {statistics.median(one.processor):.2f} s"
    share, ratio = f"{flops / median_s / peak:5.1%} of peak", f"{ours_s / median_s:.2f} x ours"
    return f"{one.name:18s} {rates} = {share}  {seconds}  {ratio}  {processor}  ({about})"


def main() -> None:
    found = contenders(os.environ.get("PEER", ""))
    for one in found:
        one.start()
        print(f"{one.name}: {one.about or 'did not start'}, first step {one.first_s:.1f} s", flush=True)
    for _ in range(ROUNDS):
        for one in found:
            one.run()
    peaks = {one.about["version"]: one.about["peak"] for one in found if one.about}
    peaks["numpy"] = numpy_peak(SIZES["peak_size"])
    for one in found:
        one.stop()
    print("peak: " + ", ".join(f"{name} {peak / 1e9:.0f}" for name, peak in peaks.items()) + " GFLOP/s")
    print(f"medians of {ROUNDS * STEPS_A_ROUND} steps, taken in turn; shares are of the highest peak")
    for one in found:
        print(row(one, found[0].about["flops"], max(peaks.values()), statistics.median(found[0].seconds)))
    if not os.environ.get("PEER"):
        print("torch is absent: give PEER=/path/to/python of an environment with torch 2.13.0")


if __name__ == "__main__":
    contend(json.loads(sys.argv[1])) if len(sys.argv) > 1 else main()
