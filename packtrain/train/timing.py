"""How long a step takes here: `python -m packtrain.train.timing SPEC.toml STEPS` runs a few and keeps nothing.

Prints a line `seconds S` for each timed step: the program, batches and prefetching of the loop, from a fresh state.
Exit codes as a worker's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing

import jax

from packtrain.core.errors import EXIT_DONE, PacktrainError
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.units import NS
from packtrain.data.loader import Prefetcher, open_loader
from packtrain.train import compiled
from packtrain.train.mesh import make_mesh
from packtrain.train.orders import SILENCE, Wire
from packtrain.train.sections import Sections, parse
from packtrain.train.state import init_state
from packtrain.train.step import Command, make_step, place_batch

WARM_STEPS = 3
"""Compilation, and caches that fill; not timed."""


def seconds_per_step(spec: Sections, steps: int, platform: Platform) -> Iterator[float]:
    mesh = make_mesh(spec.train.mesh)
    loader = open_loader(spec.data, spec.seed, spec.model.vocab, platform)
    step = make_step(spec.model, spec.optim, spec.guard, spec.train, mesh)
    state, orders_R5 = init_state(spec.model, spec.optim, spec.seed, mesh), Wire(mesh).place(SILENCE)
    with closing(Prefetcher(loader, 0, spec.data.prefetch_batches)) as feed:
        for index in range(WARM_STEPS + steps):
            begun_ns = platform.boot_ns()
            batch = place_batch(feed.get(index), mesh, spec.train.microbatches)
            state, out = step(state, batch, orders_R5, int(Command.RUN))
            jax.block_until_ready(out)
            if index >= WARM_STEPS:
                yield (platform.boot_ns() - begun_ns) / NS


def main(path: str, steps: int) -> int:
    platform = LocalPlatform()
    try:
        for seconds in seconds_per_step(parse(platform.read(path)), steps, platform):
            print(f"seconds {seconds:.6f}", flush=True)
    except PacktrainError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    compiled.keep(LocalPlatform(), os.environ, several=False)
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
