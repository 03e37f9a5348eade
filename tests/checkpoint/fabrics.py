"""Worlds of ranks that are threads, with a fabric between them, and layouts they might hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from packtrain.checkpoint.deal import Bounds, Deal
from packtrain.checkpoint.format import Box
from packtrain.checkpoint.gather import gather
from packtrain.checkpoint.reader import Checkpoint
from packtrain.checkpoint.wants import Wanted

Wire = Callable[[int, int, np.ndarray], np.ndarray]
"""(from, shift, window) -> what arrives."""
DEADLINE_S = 60.0
"""A rank that waits so long in an exchange was left alone."""


class Between:
    """The fabric of one rank."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank, self._board = rank, board

    def swap(self, shift: int, window: np.ndarray, status: int) -> tuple[np.ndarray, Sequence[int]]:
        self._board.windows += 1
        self._board.largest = max(self._board.largest, len(window))
        all_told = self._board.meet(self.rank, (shift, self._board.wire(self.rank, shift, window.copy()), status))
        assert {theirs for theirs, _, _ in all_told} == {shift}, "ranks are in different exchanges"
        return all_told[(self.rank - shift) % len(all_told)][1], [status for _, _, status in all_told]

    def tell(self, status: int) -> Sequence[int]:
        return [theirs for _, _, theirs in self._board.meet(self.rank, (-1, np.zeros(0, np.uint8), status))]

    def share(self, data: bytes) -> Sequence[bytes]:
        return [theirs for _, theirs, _ in self._board.meet(self.rank, (-2, data, 0))]


class Board:
    """Where all ranks lay something down, and then read what all laid down."""

    def __init__(self, ranks: int, wire: Wire) -> None:
        self.wire, self.windows, self.largest = wire, 0, 0
        self._slots: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, timeout=DEADLINE_S)

    def meet(self, rank: int, word: Any) -> list[Any]:
        self._slots[rank] = word
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


def world(
    checkpoints: Sequence[Checkpoint], wanted: Wanted, wire: Wire = lambda rank, shift, window: window,
    place: Callable[[int, str], None] = lambda rank, name: None, bounds: Bounds = Bounds(),  # noqa: B008
) -> tuple[list[dict[tuple[str, Box], np.ndarray]], list[Exception | None], Board]:
    """Restore on as many ranks as there are checkpoints; what each holds in the end, how it failed, and the board."""
    board = Board(len(checkpoints), wire)
    held: list[dict[tuple[str, Box], np.ndarray]] = [{} for _ in checkpoints]
    failed: list[Exception | None] = [None] * len(checkpoints)

    def run(rank: int) -> None:
        def put(name: str, boxes: dict[Box, np.ndarray]) -> None:
            place(rank, name)
            for box, array in boxes.items():
                held[rank][name, box] = array

        checkpoint = checkpoints[rank]
        try:
            deal = Deal(checkpoint.tables, wanted, len(checkpoints), bounds, checkpoint.readers)
            gather(checkpoint, deal, Between(board, rank), put)
        except Exception as error:
            failed[rank] = error

    together(len(checkpoints), run)
    return held, failed, board


def together(ranks: int, run: Callable[[int], None]) -> None:
    """Each rank in a thread, to its end."""
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "a rank was left waiting"
