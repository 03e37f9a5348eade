"""The whole step learns: on a language whose entropy is known, the loss comes down to it."""

from __future__ import annotations

import numpy as np

from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig
from packtrain.train.orders import SILENCE
from packtrain.train.state import init_state
from packtrain.train.step import Command, make_step, place_batch, place_orders
from tests.train.tiny import Rows, mesh_of

SYMBOLS, LENGTH, ROWS, STEPS = 4, 64, 16, 150


class Chain:
    """Order 2: the next symbol depends on the last two, so a model must attend to the one before."""

    def __init__(self, seed: int) -> None:
        self.p = np.random.default_rng(seed).dirichlet([0.5] * SYMBOLS, (SYMBOLS, SYMBOLS))

    def entropy_nats(self) -> float:
        """H = sum over contexts of their stationary share times the entropy of what follows."""
        share = np.full((SYMBOLS, SYMBOLS), 1 / SYMBOLS**2)
        for _ in range(2000):
            share = np.einsum("ab,abc->bc", share, self.p)
        return float(-(share[..., None] * self.p * np.log(np.maximum(self.p, 1e-300))).sum())

    def rows(self, index: int, rows: int) -> Rows:
        draw = np.random.default_rng([index, 7])
        text = np.zeros((rows, LENGTH + 51), np.int32)
        for t in range(2, text.shape[1]):
            below = self.p[text[:, t - 2], text[:, t - 1]].cumsum(-1)
            text[:, t] = np.minimum((draw.random((rows, 1)) > below).sum(-1), SYMBOLS - 1)
        text = text[:, 50:]  # past the start, contexts have their stationary shares
        at = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (rows, LENGTH))
        weights = (at >= 1).astype(np.float32)  # the first target has half its context only
        return Rows(text[:, :-1], text[:, 1:], weights, at, np.zeros_like(at), at + 1)


def test_loss_reaches_the_entropy_of_a_markov_chain() -> None:
    """After 150 steps the loss on fresh text is within 2% of the chain's entropy rate, above or below."""
    chain, mesh = Chain(1), mesh_of()
    model = ModelConfig(vocab=128, layers=2, embed=32, heads=2, kv_heads=2, head=16, mlp=64)
    optim, train = OptimConfig(learning_rate=1e-2, warmup_steps=20), TrainConfig(steps=STEPS)
    state, step = init_state(model, optim, 0, mesh), make_step(model, optim, GuardConfig(), train, mesh)
    orders = place_orders(SILENCE, mesh)
    for index in range(STEPS):
        state, _ = step(state, place_batch(chain.rows(index, ROWS), mesh, 1), orders, int(Command.RUN))
    losses = []
    for index in range(10**6, 10**6 + 16):
        state, out = step(state, place_batch(chain.rows(index, ROWS), mesh, 1), orders, int(Command.PROBE))
        losses.append(float(out.loss))
    assert state.updates == STEPS
    np.testing.assert_allclose(np.mean(losses), chain.entropy_nats(), rtol=0.02)
