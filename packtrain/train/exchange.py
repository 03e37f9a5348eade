"""What replica groups tell each other. Inside a group there is one JAX world; between groups, only this."""

from __future__ import annotations

from typing import Protocol

import jax

from packtrain.train.model import Tree


class Exchange(Protocol):
    def reduce(self, tree: Tree, weight: jax.Array) -> tuple[Tree, jax.Array]:
        """Sums over all groups of `tree` (sums over this group's rows) and of `weight` (that of those rows)."""
        ...


class Solo:
    """One group: nothing to add. Traced into the step, so gradient and update stay one compiled program."""

    def reduce(self, tree: Tree, weight: jax.Array) -> tuple[Tree, jax.Array]:
        return tree, weight
