"""Which attention kernel a run uses, and why: decided once from the configuration and the devices, never silently."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from packtrain.core.errors import Contradiction


@dataclass(frozen=True)
class Resolved:
    """A concrete kernel and the reason for it, as printed and journalled."""

    name: str
    reason: str


def resolved(asked: str, device: jax.Device) -> Resolved:
    """The kernel for `train.attention` on this device. Raises Contradiction where none fits and none was asked for."""
    if asked != "auto":
        return Resolved(asked, "asked for by train.attention")
    if device.platform == "cpu":
        return Resolved("blockwise", "the default on CPU")
    raise Contradiction(
        f"no attention kernel for {device.platform} yet", where="train.attention",
        fix="ask for train.attention=blockwise",
    )
