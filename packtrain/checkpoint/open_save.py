"""A save under way at a carrier, as its loop and the thread of the save share it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from packtrain.checkpoint.clients import Client, Offer
from packtrain.checkpoint.joint import Joint
from packtrain.checkpoint.publish import Gate


@dataclass(eq=False)
class OpenSave:
    """At least one writer has offered it, and it is not over. Only the loop changes it; threads look."""

    step: int
    begun_ns: int
    end_ns: int
    parts: dict[str, Offer] = field(default_factory=dict)
    """Writer -> what it offered; where it lies on another node, `buffer` is empty."""
    askers: list[tuple[Client, int]] = field(default_factory=list)
    gate: Gate = field(default_factory=Gate)
    running: bool = False
    joint: Joint = field(default_factory=Joint)
    """What other nodes have said, at the carrier that publishes."""
    news: threading.Event = field(default_factory=threading.Event)
    """Set when there is something new to look at."""
