"""A bounded memory of what was computed lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """The last `limit` results of pure computations: what is asked never changes an answer. Safe between threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], V]) -> V:
        value = self._held.get(key)
        if value is None:
            value = self._held[key] = compute()
            while len(self._held) > self._limit:
                self._held.popitem(last=False)
        return value
