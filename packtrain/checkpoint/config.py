"""How often a run saves, how long a save may take, what is kept, and where it is mirrored."""

from __future__ import annotations

import math
import posixpath
import re
from typing import Literal

import msgspec

from packtrain.core.errors import Contradiction
from packtrain.core.stores import StoreConfig

DEADLINE_S_MAX = 86_400.0
"""A carrier takes no save with a later deadline."""
MIRRORS_MAX = 16
MIRROR_S_MAX = 7 * 86_400.0
LOCK_DAYS_MAX = 3650
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_REFERENCE = re.compile(r"(env|file):.+")
_PLACE = re.compile(r"/|(file:///|s3://|gs://|az://)[^?]")


class Mirror(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another place that published checkpoints are copied to, with what a run needs to go on from there alone.

    In a spec: `[[checkpoint.mirrors]]`; on a command line: `--set checkpoint.mirrors.0.name=b2`.
    """

    name: str
    """Lower case letters, digits, `-` and `_`; what messages and `packtrain ckpt ls` call it."""
    place: str
    """An absolute path, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`. One run a place."""
    every_s: float = 3600.0
    """The latest published checkpoint is brought there when this long has passed since the last one was. 0: each that
    is published while none is under way."""
    bytes_per_s_max: float = 0.0
    """Cap on what is sent or read back; 0: none."""
    deadline_s: float = 3600.0
    """A copy that is not whole by then has failed: it is tried again later, and goes on from what has arrived."""
    lock_days: int = 0
    """Governance retention of what is brought there, where the bucket enforces it; 0: none."""
    endpoint: str = ""
    """`http(s)://host:port` of a store that is not its inventor's own."""
    region: str = ""
    key_id: str = ""
    """`env:NAME` or `file:PATH`. Empty: what the machine offers."""
    secret: str = ""
    """`env:NAME` or `file:PATH`. Empty: what the machine offers."""

    def __post_init__(self) -> None:
        """Raises Contradiction. A secret that was written where a reference belongs is not repeated."""
        refs = [ref for ref in (self.key_id, self.secret) if ref]
        checks = (
            (_NAME.fullmatch(self.name), f"{self.name!r} cannot be the name of a mirror",
             "use up to 32 lower case letters, digits, - and _, beginning with a letter or digit"),
            (_PLACE.match(self.place), "this is no place for a mirror",
             "write an absolute path, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"),
            (all(_REFERENCE.fullmatch(ref) for ref in refs), "a secret is given by reference",
             "write env:NAME or file:PATH"),
            (0 <= self.every_s < math.inf and 0 <= self.bytes_per_s_max < math.inf,
             "times and rates cannot be negative", "every_s=3600 and bytes_per_s_max=0 are usual"),
            (0 < self.deadline_s <= MIRROR_S_MAX, "a copy needs a deadline, of a week at most",
             "deadline_s=3600 is usual"),
            (0 <= self.lock_days <= LOCK_DAYS_MAX, f"a lock lasts 0 to {LOCK_DAYS_MAX} days",
             "lock_days=0 switches it off"),
        )
        for good, what, fix in checks:
            if not good:
                name = self.name if _NAME.fullmatch(self.name) else "?"
                raise Contradiction(what, where=f"checkpoint.mirrors, {name}", fix=fix)

    @property
    def store(self) -> StoreConfig:
        """What opens it."""
        return StoreConfig(self.place, self.endpoint, self.region, self.key_id, self.secret)


NUMBERS = (
    "every_steps", "every_s", "keep_every_steps", "keep_best", "memory_every_steps", "peer_memory", "grace_s",
    "debris_s", "peer_bytes_per_s_max",
)
"""What of a `CheckpointConfig` may be 0 and not less."""


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    every_steps: int = 0
    """Save every so many steps; 0: by time alone."""
    every_s: float | Literal["auto"] = 120.0
    """Save when this long has passed since the last save began; 0: by steps alone. `auto`: the optimum for what saves
    cost and how often attempts fail (checkpoint/interval.py)."""
    memory_every_steps: int = 10
    """Copy the state into memory every so many steps, so that a restart on this node loses no more; 0: never. Needs
    room for three images (`packtrain doctor`). Ten copies in a hundred steps: below a hundredth of the time wherever a
    batch has some thousand tokens on a CPU, or half a million on GPUs; 1 where the report says that it costs nothing.
    """
    peer_memory: int = 0
    """Of the copies in memory those of steps divisible by this go to another node as well, whose memory keeps them in
    case this one is lost; 0: none. A multiple of `memory_every_steps`. All nodes send the same step, the next when all
    have ended with that, so copies that take longer come less often. Needs room for seven images a worker instead of
    three."""
    failure_domains: dict[str, str] = {}
    """Node -> what it is lost together with (a rack, a switch, a host of several nodes): its copies go elsewhere. A
    node that is not named is a domain of its own."""
    peer_bytes_per_s_max: float = 0.0
    """Cap on what a node sends to another of these; 0: none."""
    deadline_s: float = 300.0
    """A save that is not published by then has failed (a warning, unless it is the last one)."""
    keep_last: int = 3
    keep_every_steps: int = 0
    """Also keep every published step divisible by this; 0: none."""
    keep_best: int = 0
    """Also keep so many saves that were best by `keep_best_by`; 0: none. Each evaluation in the loop is then followed
    by a save."""
    keep_best_by: Literal["loss", "bits_per_byte"] = "loss"
    """Of the held-out text, lower is better: nats a token, or bits a byte."""
    keep_best_on: str = ""
    """The held-out store that counts, as `data.held_out` names it; empty: the text of all of them together."""
    grace_s: float = 3600.0
    """From tombstone to purge."""
    debris_s: float = 86_400.0
    """Age at which uncommitted folders of older attempts may be purged."""
    fallback: tuple[str, ...] = ()
    """Absolute folders on other disks, in order: where a save goes that the run's own disk will not take."""
    mirrors: tuple[Mirror, ...] = ()
    """Other places that published checkpoints are brought to, each with its own cadence."""
    trusted_network: bool = False
    """Carriers of several nodes talk in plain TCP: only where nobody else can reach or listen to that network."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise Contradiction(
                "at least one checkpoint is kept", where="checkpoint.keep_last", fix="set it to 1 or more"
            )
        for name in NUMBERS:
            value = getattr(self, name)
            if value != "auto" and not 0 <= value < math.inf:
                raise Contradiction(
                    f"{value} is no number of steps, saves, seconds or bytes", where=f"checkpoint.{name}",
                    fix="use 0 to switch it off",
                )
        if not 0 < self.deadline_s <= DEADLINE_S_MAX:
            raise Contradiction(
                f"a save needs a deadline, of {DEADLINE_S_MAX:.0f} s at most", where="checkpoint.deadline_s",
                fix="300 is a good value",
            )
        if self.peer_memory and (not self.memory_every_steps or self.peer_memory % self.memory_every_steps):
            raise Contradiction(
                f"of copies every {self.memory_every_steps} steps none is sent every {self.peer_memory}",
                where="checkpoint.peer_memory", fix="make it a multiple of checkpoint.memory_every_steps, or 0",
            )
        self._check_best()
        self._check_fallback()
        self._check_mirrors()

    def _check_best(self) -> None:
        for name, usual in (("keep_best_by", "loss"), ("keep_best_on", "")):
            if getattr(self, name) != usual and not self.keep_best:
                raise best_of_none(f"checkpoint.{name}")

    def _check_fallback(self) -> None:
        roots = [root.rstrip("/") or "/" for root in self.fallback]
        plain = all(root.startswith("/") and posixpath.normpath(root) == root for root in roots)
        if not plain or any(root.startswith("//") for root in roots) or len(set(roots)) < len(roots):
            raise Contradiction(
                "a place to fall back to is an absolute path without `//`, `/./` and `/../`, named once",
                where="checkpoint.fallback", fix="write the plain path of a folder on another disk",
            )

    def _check_mirrors(self) -> None:
        names = [mirror.name for mirror in self.mirrors]
        places = [_bare(mirror.place) for mirror in self.mirrors]
        if len(set(names)) < len(names) or len(set(places)) < len(places):
            raise Contradiction(
                "two mirrors have one name, or one place", where="checkpoint.mirrors", fix="give each its own"
            )
        if len(names) > MIRRORS_MAX:
            raise Contradiction(
                f"a run has {MIRRORS_MAX} mirrors at most", where="checkpoint.mirrors", fix="leave some out"
            )


def best_of_none(where: str) -> Contradiction:
    """What the best saves are told by was given, and not how many of them stay."""
    return Contradiction(
        "it says by what the best saves are told, and none is kept for being good (checkpoint.keep_best is 0)",
        where=where, fix="say how many: checkpoint.keep_best=3; or leave it out",
    )


def _bare(place: str) -> str:
    return place.removeprefix("file://").rstrip("/")
