"""What a run reads: stores, how they are mixed, and the shape of a batch."""

from __future__ import annotations

from typing import Literal

import msgspec

from packtrain.core.errors import Contradiction


class StoreUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    """Folder of a store made by `packtrain data build`."""
    weight: float = 1.0


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    stores: tuple[StoreUse, ...] = ()
    held_out: tuple[str, ...] = ()
    """Store folders evaluated in the loop and at the end."""
    batch_rows: int = 16
    """Rows of the global batch; never changes with the world."""
    length: int = 256
    """Tokens a row."""
    objective: Literal["causal"] = "causal"
    prefetch_batches: int = 4
    damaged_rows_max: int = 0
    """Rows of damaged blocks that an attempt passes over with weight 0 before damage is an error."""

    def __post_init__(self) -> None:
        if self.batch_rows < 1 or self.length < 8:
            raise Contradiction(
                "a batch needs at least 1 row of at least 8 tokens", where="data.batch_rows, data.length",
                fix="raise them, for example --set data.batch_rows=16 --set data.length=256",
            )
        if self.damaged_rows_max < 0:
            raise Contradiction(
                "damaged rows are counted from 0", where="data.damaged_rows_max", fix="0 makes any damage an error"
            )
        if any(use.weight <= 0 for use in self.stores):
            raise Contradiction(
                "store weights must be above zero", where="data.stores", fix="leave out the store instead"
            )
