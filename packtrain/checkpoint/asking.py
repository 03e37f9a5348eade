"""Asking the carrier of another node: again where it does not answer, and never past the end of what it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from packtrain.checkpoint.link import Body, Write
from packtrain.core.errors import PacktrainError, PeerCopyFailed, PeerLost
from packtrain.core.platform import Platform
from packtrain.core.units import NS

AGAIN_S = (1.0, 1.0)
"""Waits between tries."""
RESTART_S = (1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0)
"""As long as a carrier takes that is started again, the longest pause before that included."""
ASK_S = 30.0
"""For an answer without bulk."""


T = TypeVar("T")


class Asking(Protocol):
    """What is needed of a `LinkClient`."""

    def ask(
        self, header: dict[str, Any], body: Body | None = None, take: Callable[[int], Write] | None = None,
        *, timeout_s: float,
    ) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Around(NamedTuple):
    """The nodes of the attempt, for one carrier."""

    node: str
    reach: Callable[[str], Asking]
    """A new connection to the carrier of that node, for one thread."""
    nodes: Callable[[], Sequence[str]]
    """All nodes whose carriers are known by now, this one included; may raise PeerLost."""
    domains: Mapping[str, str] = {}
    """Node -> failure domain, of those that are not one of their own."""


class Patience:
    """Until so many seconds from now."""

    def __init__(self, platform: Platform, seconds: float) -> None:
        self._platform = platform
        self._end_ns = platform.boot_ns() + int(seconds * NS)

    def left_s(self, most_s: float = float("inf")) -> float:
        """Of it, `most_s` at most. Raises PeerCopyFailed when it is over."""
        left_s = (self._end_ns - self._platform.boot_ns()) / NS
        if left_s <= 0:
            raise PeerCopyFailed("its time is over", where="this carrier")
        return min(left_s, most_s)

    def tried(self, ask: Callable[[], T], waits_s: Sequence[float] = AGAIN_S) -> T:
        """A carrier that does not answer is asked again after each wait. Raises PeerLost and what `ask` raises."""
        for wait_s in waits_s:
            with suppress(PeerLost):
                return ask()
            self._platform.sleep(min(wait_s, self.left_s()))
        return ask()


def words(error: Exception) -> str:
    """What happened, for a sentence about it."""
    return error.what if isinstance(error, PacktrainError) else f"{type(error).__name__}: {error}"
