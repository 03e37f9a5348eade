"""Calls that may hang (a dead disk, a carrier that does not answer): a thread for each, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from packtrain.core.platform import Platform
from packtrain.core.units import NS

T = TypeVar("T")
Then = Callable[[T | Exception | None], None]
OPEN_MAX = 64
"""Errands at once; a thread that hangs in a dead disk counts until that comes back."""


class _Errand(Generic[T]):
    """`then` gets the result, what was raised, or None when the time was over."""

    def __init__(self, platform: Platform, call: Callable[[], T], then: Then[T], ring: Callable[[], None]) -> None:
        self.then, self._ring = then, ring
        self.end_ns = 0
        self.told = False
        self._result: list[T | Exception] = []
        crew = platform.crew(1)
        crew.start(lambda: self._run(call))
        crew.close()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._result.append(call())
        except Exception as error:
            self._result.append(error)
        self._ring()

    @property
    def over(self) -> bool:
        return bool(self._result)

    def look(self, ns: int) -> None:
        if not self.told and (self._result or ns >= self.end_ns):
            self.told = True
            self.then(self._result[0] if self._result else None)


class Errands:
    """Those under way. `ring`: called in its thread when one is over, so that nobody has to look before."""

    def __init__(self, platform: Platform, ring: Callable[[], None] = lambda: None) -> None:
        self._platform, self._ring = platform, ring
        self._open: list[_Errand[object]] = []

    def start(self, ns: int, seconds: float, call: Callable[[], T], then: Then[T]) -> None:
        """`then` is called once, by `look`: with the result, with what was raised, or with None after `seconds`."""
        if len(self._open) >= OPEN_MAX:
            then(None)
            return
        errand: _Errand[T] = _Errand(self._platform, call, then, self._ring)
        errand.end_ns = ns + round(seconds * NS)
        self._open.append(errand)  # type: ignore[arg-type]

    def look(self, ns: int) -> None:
        """Tell of those that are over, or late."""
        for errand in list(self._open):
            errand.look(ns)
        self._open = [one for one in self._open if not (one.told and one.over)]
