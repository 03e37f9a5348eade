"""The words a world can be told, the file they stand in, how ranks agree on one, and what a rank says before the first.

Standard library only.

The agent replaces the control file atomically; each loop looks at it once a step (`Control.poll`). Ranks are skewed,
so none obeys what it read before all have the same: inside train/ through the jitted step, elsewhere through `agree`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from .wire import INT32_MAX, checked_line, checked_object, is_count, json_object

ORDER_LAG = 2
"""The highest order id in the output of step k is obeyed by every rank after step k + ORDER_LAG."""
ORDER_BYTES_MAX = 4096
READY_BYTES_MAX = 4096


class Word(IntEnum):
    """What a world can be told. Programs outside train/ are sent only SAVE, STOP and DRAIN."""

    NONE = 0
    SAVE = 1
    STOP = 2
    """Save, then exit 75."""
    DRAIN = 3
    """STOP, because the node is going away."""
    PAUSE = 4
    RESUME = 5
    SKIP = 6
    """Skip a window of data: a = from data index, b = count."""
    FINISH = 7
    """Training has reached its end: save and exit 0."""
    GO = 8
    """Every rank of the world said that it is ready, and all agree: the first collective may begin."""
    HOLD = 9
    """No save by the cadence before step a; 0: again as ever. What is asked for and the last save are not held."""


class Order(NamedTuple):
    """One word with a strictly growing id; as a tuple it is the row of int32 that a rank puts into the step."""

    id: int
    word: Word
    a: int = 0
    b: int = 0


NO_ORDER = Order(0, Word.NONE)
GO_ID = 1
"""Of the order GO, where there is one: it is the first of its attempt, so a rank that finds a later one has missed it.
"""


def order_bytes(order: Order) -> bytes:
    """What the control file holds."""
    assert all(0 <= value <= INT32_MAX for value in order), order
    return checked_line({"id": order.id, "word": order.word.name.lower(), "a": order.a, "b": order.b})


def parse_order(data: bytes) -> Order | None:
    """The order in a control file, or None when anything about it is damaged."""
    fields = checked_object(data, ORDER_BYTES_MAX)
    if fields is None:
        return None
    numbers = [fields.get(key) for key in ("id", "a", "b")]
    word = _WORDS.get(str(fields.get("word")))
    if word is None or not all(is_count(value, INT32_MAX) for value in numbers):
        return None
    return Order(fields["id"], word, fields["a"], fields["b"])


_WORDS = {word.name.lower(): word for word in Word}


class Control:
    """The order in force, as the loop sees it: one stat a poll, a read only when the file has changed.

    With `sigterm=True` a SIGTERM becomes the order STOP, with an id above every other seen (main thread only).
    """

    def __init__(self, path: str | None, *, sigterm: bool = False) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._order = NO_ORDER
        self._fd = -1
        self._terminated = False
        if sigterm:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def poll(self) -> Order | None:
        """The order with the highest id so far, or None. Absent, damaged or older content changes nothing."""
        if self._path:
            self._look(self._path)
        if self._terminated and self._order.word not in (Word.STOP, Word.DRAIN):
            return Order(self._order.id + 1, Word.STOP)
        return self._order if self._order.id else None

    def _look(self, path: str) -> None:
        try:
            found = os.stat(path)
            key = (found.st_ino, found.st_mtime_ns, found.st_size)
            if key == self._seen:
                return
            data = self._read(path)
        except OSError:
            return
        self._seen = key
        order = parse_order(data)
        if order is not None and order.id > self._order.id:
            self._order = order

    def _read(self, path: str) -> bytes:
        """The file stays open until the next is read, so that no later file can be given its inode number.

        Non-blocking: a pipe in its place must not hold the loop.
        """
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        return os.read(fd, ORDER_BYTES_MAX + 1)

    def _on_sigterm(self, signum: int, frame: object) -> None:
        self._terminated = True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def agree(all_reduce_max: Callable[[list[int]], list[int]], order: Order | None) -> Order:
    """The same order on every rank, for programs outside train/: call it at each step boundary, on all ranks.

    `all_reduce_max`: elementwise maximum over ranks of a short list of int64. One number travels; two more only behind
    an order that has arguments. The highest id wins; of two orders with one id, the higher word. NO_ORDER: go on.
    """
    mine = order or NO_ORDER
    key = mine.id << 4 | mine.word
    (highest,) = all_reduce_max([key])
    agreed, word = highest >> 4, Word(highest & 15)
    if word is not Word.SKIP:
        return Order(agreed, word)
    a, b = all_reduce_max([mine.a, mine.b] if key == highest else [0, 0])
    return Order(agreed, word, a, b)


# --- before the first word -------------------------------------------------------------------------


class Ready(NamedTuple):
    """A rank says what it is about to begin from, and waits. Sent over the beat socket, again and again."""

    attempt: int
    rank: int
    pid: int
    facts: dict[str, str]
    """What all ranks of a world must have in common; who compares needs to know none of the names."""


def ready_bytes(ready: Ready) -> bytes:
    """The datagram."""
    fields = {"ready": ready.facts, "attempt": ready.attempt, "rank": ready.rank, "pid": ready.pid}
    return json.dumps(fields, separators=(",", ":")).encode()


def parse_ready(data: bytes) -> Ready | None:
    """What a rank says in a datagram, or None for anything else: a beat, or what has other types, sizes or ranges."""
    fields = json_object(data, READY_BYTES_MAX)
    if fields is None or not all(is_count(fields.get(key), INT32_MAX) for key in ("attempt", "rank", "pid")):
        return None
    facts = fields.get("ready")
    if not isinstance(facts, dict) or not all(type(value) is str for value in facts.values()):
        return None
    return Ready(fields["attempt"], fields["rank"], fields["pid"], facts)


def goes_on(order: Order, asked: bool) -> bool | None:
    """What an order says to a rank that waits for the first one; None: nothing yet."""
    if asked or order.word in (Word.STOP, Word.DRAIN):
        return False
    return True if order.word is Word.GO or order.id > GO_ID else None
