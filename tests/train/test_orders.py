"""Orders: three sources, one id space, one moment for all ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint.rounds import NEVER
from packtrain.core.contract import GO_ID, ORDER_LAG, Order, Word
from packtrain.train.orders import AGENT, BAND, OWN, SILENCE, TERM, Orders


class Script:
    """A control file whose content a test sets."""

    def __init__(self, order: Order | None = None) -> None:
        self.order = order

    def poll(self) -> Order | None:
        return self.order


def rows(*orders: Orders) -> np.ndarray:
    return np.array([o.row() for o in orders], np.int32)


def test_silence() -> None:
    """A rank that was told nothing sends an empty row, and nothing is obeyed."""
    orders = Orders(Script())
    assert orders.row() == SILENCE
    orders.hear(1, rows(orders))
    assert orders.due(100) is None


def test_obeyed_after_the_lag() -> None:
    """An order in the output of call k is due once call k + ORDER_LAG was dispatched, not earlier, and only once."""
    orders = Orders(Script(Order(3, Word.SAVE)))
    for call in (1, 2, 3):
        orders.hear(call, rows(orders))
    assert orders.due(ORDER_LAG) is None
    assert orders.due(1 + ORDER_LAG) == Order(3, Word.SAVE)
    assert orders.due(3 + ORDER_LAG) is None
    assert orders.row() == SILENCE


def test_go_is_no_order() -> None:
    """A control file that still says go is silence; the next id is obeyed."""
    script = Script(Order(GO_ID, Word.GO))
    orders = Orders(script)
    assert orders.row() == SILENCE
    script.order = Order(GO_ID + 1, Word.SAVE)
    assert orders.heard_now(rows(orders)) == Order(GO_ID + 1, Word.SAVE)


def test_sigterm_outranks_the_agent_and_the_agent_outranks_the_clock() -> None:
    """With all three sources speaking, each is obeyed, the most urgent first; none is lost to another's id."""
    orders = Orders(Script(Order(BAND - 1, Word.SKIP, 7, 5)))
    orders.wish(Word.SAVE)
    orders.terminate()
    obeyed = [orders.heard_now(rows(orders)) for _ in range(4)]
    assert obeyed == [Order(1, Word.STOP), Order(BAND - 1, Word.SKIP, 7, 5), Order(1, Word.SAVE), None]


def test_an_own_order_keeps_its_word_until_obeyed() -> None:
    """An id means one word: a second wish waits for the first and gets the next id."""
    orders = Orders(None)
    orders.wish(Word.SAVE)
    sent = orders.row()
    orders.wish(Word.FINISH)
    assert sent == (OWN * BAND + 1, Word.SAVE, 0, 0, 0)
    assert orders.row() == sent
    orders.heard_now(rows(orders))
    orders.wish(Word.FINISH)
    assert orders.row() == (OWN * BAND + 2, Word.FINISH, 0, 0, 0)


def test_older_and_outlandish_ids_are_ignored() -> None:
    """An id at or below the last obeyed one, or outside the agent's band, is not sent."""
    script = Script(Order(5, Word.PAUSE))
    orders = Orders(script)
    orders.heard_now(rows(orders))
    for stale in (5, 4, 0, BAND, BAND + 1):
        script.order = Order(stale, Word.STOP)
        assert orders.row() == SILENCE
    script.order = Order(6, Word.RESUME)
    assert orders.row() == (AGENT * BAND + 6, Word.RESUME, 0, 0, 0)


def test_rows_fit_int32() -> None:
    """The highest id there is fits the i32 array that carries it."""
    assert np.iinfo(np.int32).max >= TERM * BAND + BAND - 1


def test_all_hear_how_a_round_ended_at_each() -> None:
    """It travels beside orders and in silence alike, in steps and in pulses, the latest counts, and is no order."""
    world = [Orders(None), Orders(Script(Order(3, Word.HOLD, 7, 5))), Orders(None)]
    assert world[0].row(-40) == (0, 0, 0, 0, -40)
    sent = np.array([orders.row(ended) for orders, ended in zip(world, (30, -40, 0))], np.int32)
    world[0].hear(1, sent)
    assert world[1].heard_now(sent) == Order(3, Word.HOLD, 7, 5)
    assert world[0].ended == world[1].ended == (30, -40, 0) and world[2].ended == ()
    world[0].hear(2, np.array([world[0].row(NEVER)] * 3, np.int32))
    assert world[0].ended == (NEVER,) * 3


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["term", "agent", "own"])), max_size=6)


@given(EVENTS, st.integers(0, 2**32 - 1))
def test_all_ranks_obey_the_same_orders_at_the_same_calls(events: list[tuple[int, str]], seed: int) -> None:
    """Whatever reaches which rank when, and however late each reads, all obey the same orders after the same calls."""
    chance = np.random.default_rng(seed)
    when = sorted(int(chance.integers(1, 12)) for _ in events)
    scripts = [Script() for _ in range(4)]
    world = [Orders(script) for script in scripts]
    outputs: list[np.ndarray] = []
    obeyed: list[list[tuple[int, Order]]] = [[] for _ in world]
    read = [0] * len(world)
    for call in range(1, 24):
        for at, (rank, kind) in zip(when, events):
            if at == call:
                _happen(kind, world[rank if kind != "own" else 0], scripts[rank], call)
        outputs.append(rows(*world))
        for rank, orders in enumerate(world):
            reads = chance.integers(max(call - ORDER_LAG, read[rank]), call + 1)  # as late as allowed, or earlier
            for k in range(read[rank] + 1, reads + 1):
                orders.hear(k, outputs[k - 1])
            read[rank] = int(reads)
            while (order := orders.due(call)) is not None:
                obeyed[rank].append((call, order))
    assert obeyed[0] == obeyed[1] == obeyed[2] == obeyed[3]
    assert len(obeyed[0]) >= len({kind for _, kind in events})


def _happen(kind: str, orders: Orders, script: Script, call: int) -> None:
    if kind == "term":
        orders.terminate()
    elif kind == "own":
        orders.wish(Word.SAVE)
    else:
        script.order = Order(call, Word.SAVE)
