"""One word for a whole world: what this rank asks for, what all ranks heard, and when it is obeyed.

Each rank puts one row (id, word, a, b, ended) into every dispatched step; the step returns the rows of all ranks to all
ranks. The highest id not yet obeyed in the output of call k is obeyed by every rank after it has dispatched call
k + ORDER_LAG, and nobody dispatches further ahead than that, so all ranks act between the same two calls. A call is one
dispatch of the jitted step, reruns and no-ops included: all ranks make the same calls because every branch they take
comes from outputs that are the same everywhere.

Three sources merge into one id space by bands, so that their ids cannot collide and the more urgent band wins:

    band 0  OWN    rank 0's own clock decided: SAVE when checkpoint.every_s has passed, FINISH at train.minutes_max
    band 1  AGENT  the control file; the agent clears it before an attempt and counts its ids up from 1, which may be
                   GO: that was obeyed before the first call (`contract.wait_for_go`), and is passed over here
    band 2  TERM   SIGTERM at this rank; always STOP

`row id = band * 2**28 + id within the band`. What has been obeyed is remembered per band: an order of a lower band that
lost to a higher one stays in its sender's row and is obeyed next. An id means one word: an own order, once sent,
is latched until it has been obeyed. `ended` is no order: it says how the last round of copies to other nodes ended at
this rank (checkpoint/rounds.py).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from packtrain.core.contract import ORDER_LAG, Order, Word
from packtrain.train import axes
from packtrain.train.step import place_orders

BAND = 1 << 28
OWN, AGENT, TERM = 0, 1, 2
Row = tuple[int, int, int, int, int]
SILENCE: Row = (0, 0, 0, 0, 0)


class ControlSource(Protocol):
    """Where the agent's orders come from: `core.contract.Control`, or a script in tests."""

    def poll(self) -> Order | None: ...


class Orders:
    """This rank's side of the agreement. Pure bookkeeping but for the poll of the control file."""

    def __init__(self, control: ControlSource | None) -> None:
        self._control = control
        self._term = False
        self._own: Word | None = None
        self._obeyed = [0, 0, 0]
        self._heard: deque[tuple[int, list[Order]]] = deque()
        self.ended: tuple[int, ...] = ()
        """Of each rank, as heard last."""

    def terminate(self) -> None:
        """SIGTERM arrived. Called from a signal handler, so it only sets a flag."""
        self._term = True

    @property
    def terminated(self) -> bool:
        return self._term

    def wish(self, word: Word) -> None:
        """Ask for `word` from this rank's own clock (rank 0 only); kept until it has been obeyed."""
        if self._own is None:
            self._own = word

    def row(self, ended: int = 0) -> Row:
        """What this rank sends with its next call: its most urgent order that was not obeyed yet, and `ended`."""
        return (*self._most_urgent(), ended)

    def _most_urgent(self) -> tuple[int, int, int, int]:
        if self._term and self._obeyed[TERM] == 0:
            return (TERM * BAND + 1, Word.STOP, 0, 0)
        order = self._control.poll() if self._control is not None else None
        if order is not None and self._obeyed[AGENT] < order.id < BAND and order.word is not Word.GO:
            return (AGENT * BAND + order.id, order.word, order.a, order.b)
        if self._own is not None:
            return (OWN * BAND + self._obeyed[OWN] + 1, self._own, 0, 0)
        return (0, 0, 0, 0)

    def hear(self, call: int, rows_R5: np.ndarray) -> None:
        """Remember the rows that came out of `call`; most calls carry no order."""
        self.ended = _ended(rows_R5)
        orders = _orders(rows_R5)
        if orders:
            self._heard.append((call, orders))

    def due(self, dispatched: int) -> Order | None:
        """The order to obey now that call `dispatched` is the last one dispatched. Ids come back within their band."""
        while self._heard and self._heard[0][0] + ORDER_LAG <= dispatched:
            order = self._obey(self._heard.popleft()[1])
            if order is not None:
                return order
        return None

    def heard_now(self, rows_R5: np.ndarray) -> Order | None:
        """The order to obey from rows that every rank reads before it does anything else (a pulse)."""
        self._heard.clear()
        self.ended = _ended(rows_R5)
        return self._obey(_orders(rows_R5))

    def _obey(self, orders: list[Order]) -> Order | None:
        fresh = [o for o in orders if o.id % BAND > self._obeyed[o.id // BAND]]
        if not fresh:
            return None
        order = max(fresh, key=lambda o: o.id)
        band, within = divmod(order.id, BAND)
        self._obeyed[band] = within
        if band == OWN:
            self._own = None
        return order._replace(id=within)


def _orders(rows_R5: np.ndarray) -> list[Order]:
    return [Order(int(id), Word(word), int(a), int(b)) for id, word, a, b, _ in rows_R5 if id > 0]


def _ended(rows_R5: np.ndarray) -> tuple[int, ...]:
    return tuple(int(ended) for ended in rows_R5[:, 4])


class Wire:
    """Rows to the devices and back: one row per process, whichever mesh it trains on."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._gather = jax.jit(lambda rows_R5: rows_R5, out_shardings=axes.replicated(mesh))
        self._row, self._placed = SILENCE, place_orders(SILENCE, mesh)

    def place(self, row: Row) -> jax.Array:
        """This process's part of the i32 [ranks, 5] array that a step takes. Most rows are those of the call before."""
        if row != self._row:
            self._row, self._placed = row, place_orders(row, self._mesh)
        return self._placed

    def pulse(self, row: Row) -> np.ndarray:
        """All ranks' rows, exchanged and read at once: for when no step is dispatched (start, pause, evaluation)."""
        return np.asarray(self._gather(self.place(row)))
