"""Which saves are the best by a held-out figure. Pure: from the log, the evaluations, and the config.

An evaluation judges the save of its very step: that of its own attempt, or the one that its attempt began from, where
it ended an evaluation that was cut off. A save without one has no figure and is never the best; nor is one whose figure
is NaN or infinite. Figures over other stores, or over more or fewer tokens of them (the last evaluation of a run reads
all rows, those in the loop some), do not compare: each such kind has a list of its own. Of equals the older is better.

A save without a figure may be one of the best where the journal of its attempt has a hole, or was not read beyond that
step: nobody knows, so it does not go (`unknown`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig

NAMES = {"loss": "loss", "bits_per_byte": "bits/byte"}


class Evaluation(msgspec.Struct, frozen=True):
    """One held-out store at one step."""

    attempt: int
    step: int
    final: bool
    store: str
    loss: float
    """Nats a token."""
    bits_per_byte: float
    tokens: int


class Judged(msgspec.Struct, frozen=True):
    """What the journal says about how good a run was."""

    evaluations: tuple[Evaluation, ...] = ()
    """In the order of their writers: of two of one state and store the later one counts."""
    read_to: Mapping[int, float] = {}
    """Attempt -> step: every evaluation of its saves before that step is known."""


class Figure(msgspec.Struct, frozen=True):
    """How good the state of a save is. `kind`: stores and tokens it is over; only figures of one kind compare."""

    kind: tuple[tuple[str, int], ...]
    value: float

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.kind)


class Rank(msgspec.Struct, frozen=True):
    """`place` 1 is the best; `of` such saves are kept, fewer than may be where fewer were judged."""

    place: int
    of: int
    figure: Figure
    by: str

    def words(self) -> str:
        which = "the best" if self.of == 1 else f"number {self.place} of the {self.of} best"
        return f"{which} by held-out {NAMES[self.by]} {self.figure.value:.4f} ({self.figure.tokens:,} tokens)"


def best(
    saves: Sequence[Commit], commits: Sequence[Commit], judged: Judged, config: CheckpointConfig
) -> dict[int, list[Rank]]:
    """Number of a save -> as what it is kept. `saves`: those that compete, of `commits`, which is the whole log."""
    if not config.keep_best:
        return {}
    lists: defaultdict[tuple[tuple[str, int], ...], list[tuple[float, int, Figure]]] = defaultdict(list)
    for number, figures in _figures(saves, commits, judged, config).items():
        for figure in figures:
            if math.isfinite(figure.value):
                lists[figure.kind].append((figure.value, number, figure))
    ranks: defaultdict[int, list[Rank]] = defaultdict(list)
    for kind in sorted(lists):
        kept = sorted(lists[kind], key=_order)[: config.keep_best]
        for place, (_, number, figure) in enumerate(kept, 1):
            ranks[number].append(Rank(place, len(kept), figure, config.keep_best_by))
    return dict(ranks)


def unknown(
    saves: Sequence[Commit], commits: Sequence[Commit], judged: Judged, config: CheckpointConfig
) -> list[Commit]:
    """Those that may be the best for all that is known."""
    if not config.keep_best:
        return []
    known = _figures(saves, commits, judged, config)
    return [save for save in saves if save.step >= judged.read_to.get(save.attempt, 0) and save.number not in known]


def _order(one: tuple[float, int, Figure]) -> tuple[float, int]:
    return one[:2]


def _figures(
    saves: Sequence[Commit], commits: Sequence[Commit], judged: Judged, config: CheckpointConfig
) -> dict[int, list[Figure]]:
    """Number of a save -> its figures, NaN included; a save that was never evaluated is left out."""
    by_state: defaultdict[tuple[int, int], dict[bool, dict[str, Evaluation]]] = defaultdict(dict)
    for one in judged.evaluations:
        by_state[one.attempt, one.step].setdefault(one.final, {})[one.store] = one
    begun = _begun_from(commits)
    found: dict[int, list[Figure]] = {}
    for save in saves:
        kinds: dict[tuple[tuple[str, int], ...], Figure] = {}
        for attempt in (save.attempt, *begun.get(save.number, ())):
            for stores in by_state.get((attempt, save.step), {}).values():
                figure = _figure(stores, config)
                if figure is not None:
                    kinds[figure.kind] = figure
        if kinds:
            found[save.number] = list(kinds.values())
    return found


def _begun_from(commits: Iterable[Commit]) -> Mapping[int, list[int]]:
    """Number of a save -> attempts that began from it, at its step."""
    leads: dict[int, int] = {0: 0}
    found: defaultdict[int, list[int]] = defaultdict(list)
    for commit in commits:
        leads[commit.number] = commit.number if commit.kind == "save" else leads[commit.parent]
        if commit.kind == "begin":
            found[leads[commit.number]].append(commit.attempt)
    return found


def _figure(stores: Mapping[str, Evaluation], config: CheckpointConfig) -> Figure | None:
    """Over all of the text, or that of the store that counts; None where that was not read."""
    read = [one for store, one in sorted(stores.items()) if config.keep_best_on in ("", store)]
    if not read:
        return None
    kind = tuple((one.store, one.tokens) for one in read)
    return Figure(kind, _together([(getattr(one, config.keep_best_by), _weight(one, config)) for one in read]))


def _weight(one: Evaluation, config: CheckpointConfig) -> float:
    """What its figure is a mean over: tokens, or bytes. 0 bits a byte stand for a text without bytes."""
    if config.keep_best_by == "loss":
        return one.tokens
    return one.loss * one.tokens / math.log(2) / one.bits_per_byte if one.bits_per_byte else 0.0


def _together(parts: Sequence[tuple[float, float]]) -> float:
    """The mean of figures with their weights; that of one is itself, bit for bit. NaN where nothing weighs."""
    total = sum(weight for _, weight in parts)
    if not 0 < total < math.inf:
        return math.nan
    return parts[0][0] if len(parts) == 1 else sum(value * weight for value, weight in parts) / total
