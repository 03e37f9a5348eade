"""Held-out loss: every document token of a store once, in nats a token and bits a byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from packtrain.core.records import EvalDone
from packtrain.data.loader import Batch, held_out_batches
from packtrain.train.model import Tree
from packtrain.train.sections import Sections
from packtrain.train.step import make_eval, place_batch


def bits_per_byte(nll_sum: float, n_bytes: int) -> float:
    """Nats over a text of `n_bytes` -> bits a byte; 0 for an empty text."""
    return nll_sum / math.log(2) / n_bytes if n_bytes else 0.0


@dataclass(frozen=True)
class Sums:
    """Totals over some batches: nats, target weights, and the bytes those targets stand for."""

    nll_sum: float = 0.0
    weight_sum: float = 0.0
    n_bytes: int = 0

    def plus(self, nll_sum: float, weight_sum: float, n_bytes: int) -> Sums:
        return Sums(self.nll_sum + nll_sum, self.weight_sum + weight_sum, self.n_bytes + n_bytes)

    def record(self, step: int, store: str, final: bool) -> EvalDone:
        return EvalDone(
            step=step, store=store, loss=self.nll_sum / max(self.weight_sum, 1.0),
            bits_per_byte=bits_per_byte(self.nll_sum, self.n_bytes), tokens=round(self.weight_sum), final=final,
        )


class HeldOut:
    """The compiled evaluation of one run and the stores it is asked about."""

    def __init__(self, spec: Sections, mesh: Mesh) -> None:
        self.stores = spec.data.held_out
        self._data, self._mesh, self._microbatches = spec.data, mesh, spec.train.microbatches
        self._evaluate: Callable[[Tree, Any], Any] = make_eval(spec.model, spec.train, mesh)

    def sums(self, params: Tree, store: str, rows_max: int, between: Callable[[], None]) -> Sums:
        """Over the first `rows_max` rows of a store, 0: all. `between` is called after each batch and may raise."""
        total = Sums()
        for batch in self._batches(store, rows_max):
            nll_sum, weight_sum = self._evaluate(params, place_batch(batch, self._mesh, self._microbatches))
            total = total.plus(float(nll_sum), float(weight_sum), batch.n_bytes)
            between()
        return total

    def _batches(self, store: str, rows_max: int) -> Iterator[Batch]:
        return held_out_batches(store, self._data.length, self._data.batch_rows, rows_max)
