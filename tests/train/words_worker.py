"""One of a world of ranks that are told things at different moments: `words_worker.py FOLDER EPISODES SEED`.

Each episode runs the shipped loop, orders, signal handler and step until it is told to stop; then one line says after
which step. What happens is drawn from (seed, episode), one draw for all ranks: orders that reach the control of each
rank at moments of its own, a SIGTERM really sent to a random rank before one of its batches, seeded waits.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from dataclasses import dataclass

import jax
import numpy as np

from packtrain.core.contract import Beats, Order, Place, Word
from packtrain.core.errors import StoppedOnRequest
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform
from packtrain.train import assemble
from packtrain.train.heldout import HeldOut
from packtrain.train.loop import Loop, Parts
from packtrain.train.mesh import make_mesh
from packtrain.train.orders import Orders, Wire
from packtrain.train.sample import Sampler
from packtrain.train.saving import Saves, Standing
from packtrain.train.state import State
from packtrain.train.step import make_step
from packtrain.train.worker import Signals
from tests.train import rig

SPEC = rig.with_train(rig.SPEC, steps=1_000_000)
CALLS = 6
"""Orders and signals come within so many polls of an episode."""
WAIT_S_MAX = 0.005


class Scaled(LocalPlatform):
    """The real machine, whose pauses are 50 times shorter."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / 50)


@dataclass(frozen=True)
class Episode:
    """What happens to whom: drawn once, the same on every rank."""

    polls: dict[int, dict[int, Order]]
    """rank -> poll -> the order its control file holds from then on."""
    victim: int
    """Rank that gets a SIGTERM, -1: none."""
    fetch: int
    """Before which of its batches."""
    seed: int


def draw(seed: int, episode: int, ranks: int) -> Episode:
    """One to three orders, the last a STOP, or only a SIGTERM, or both."""
    chance, earliest = np.random.default_rng([seed, episode]), 2 if episode % 10 else 1
    kind = ("order", "signal", "both")[int(chance.integers(3))]
    words = [Word(int(w)) for w in chance.choice([Word.SAVE, Word.PAUSE, Word.RESUME], int(chance.integers(3)))]
    orders = [] if kind == "signal" else [Order(n + 1, w) for n, w in enumerate([*words, Word.STOP])]
    polls = {
        rank: {int(at): order for at, order in zip(sorted(chance.integers(earliest, CALLS, len(orders))), orders)}
        for rank in range(ranks)
    }
    victim = -1 if kind == "order" else int(chance.integers(ranks))
    return Episode(polls, victim, int(chance.integers(1, CALLS)), int(chance.integers(2**31)))


class Skewed(rig.Feed):
    """Batches after waits of this rank's own, and its SIGTERM."""

    def __init__(self, episode: Episode, rank: int) -> None:
        super().__init__()
        self._chance = np.random.default_rng([episode.seed, rank])
        self._sigterm_at = episode.fetch if rank == episode.victim else -1
        self._fetched = 0

    def get(self, index: int) -> rig.Batch:
        self._fetched += 1
        LocalPlatform().sleep(float(self._chance.random() * WAIT_S_MAX))
        if self._fetched == self._sigterm_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().get(index)


def play(parts: functools.partial[Parts], episode: Episode, rank: int, state: State, index: int) -> Loop:
    """Run one episode to its end; the loop, stopped."""
    orders = Orders(rig.Script(episode.polls[rank]))
    Signals(by_hand=False).forward(orders.terminate)
    saves = Saves(rig.Kept(), rig.specs(), Scaled(), parts.keywords["journal"], {}, speaks=rank == 0)
    loop = Loop(parts(orders=orders, feed=Skewed(episode, rank), saves=saves), state, Standing(index))
    try:
        loop.run()
    except StoppedOnRequest:
        return loop
    raise AssertionError("an episode ends by being told to stop")


def main(folder: str, episodes: int, seed: int) -> None:
    place = Place.from_env(os.environ)
    assemble.join_world(place)
    mesh = make_mesh({"replica": place.world_size})
    step = rig.Quick(make_step(SPEC.model, SPEC.optim, SPEC.guard, SPEC.train, mesh))
    parts = functools.partial(
        Parts, spec=SPEC, mesh=mesh, platform=Scaled(), beats=Beats(None), wire=Wire(mesh), step=step,
        journal=Journal(Scaled(), folder, rank=place.rank), held_out=HeldOut(SPEC, mesh),
        sampler=Sampler(SPEC, mesh, rig.byte_tokenizer()), rank=place.rank,
    )
    state, index = rig.fresh_state(mesh), 0
    for n in range(episodes):
        loop = play(parts, draw(seed, n, place.world_size), place.rank, state, index)
        state, index = loop.state, loop.index
        said = {"episode": n, "step": index, "state": int(jax.device_get(state.step)), "calls": loop.calls}
        print(json.dumps(said), flush=True)
    assemble.leave_world(place)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
