"""Which attention kernel a run uses, and why: decided once from the configuration and the device, never silently.

What each can do (sources read, 2026-11; nothing but CPU was run):
- blockwise: every interval, forward and backward over live pairs only, on every platform; made for CPU.
- mosaic: tokamax's Mosaic GPU kernels take a key interval for each query, forward and backward, on sm90 and sm100, in
  bf16. On sm80 there is a forward kernel and no backward one.
- cudnn: plain causal rows only, in bf16. Its general mask is dense, that is quadratic.
- splash: TPU; causal rows, packed by segments.
- reference: everything, everywhere, with memory quadratic in length.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Protocol

from packtrain.core.errors import Contradiction, MissingExtra
from packtrain.train.config import TrainConfig

PLATFORMS = {"mosaic": "gpu", "cudnn": "gpu", "splash": "tpu"}
BF16_ONLY = ("mosaic", "cudnn")
MOSAIC_GENERATIONS = (9, 10)
BLOCKWISE_COST = (
    "it is made for CPU: scores pass through memory, about 60 bytes for each live (query, key) pair and head, forward "
    "and backward together, where a fused kernel keeps them on the chip"
)
"""Writes and reads of f32 scores and weights in `blockwise`: 6 in the forward loop, 9 in the backward one."""


class Device(Protocol):
    """What is asked of a jax.Device. `compute_capability`, as "9.0", is there on NVIDIA only."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...


@dataclass(frozen=True)
class Resolved:
    """A concrete kernel and the reason for it, as printed and journalled."""

    name: str
    reason: str


def resolved(train: TrainConfig, device: Device, packed_causal: bool = True) -> Resolved:
    """The kernel for `train.attention` on this device.

    `packed_causal`: whether every mask of the run is causal within documents, with no window. Raises Contradiction
    where the kernel asked for cannot work here, or none was asked for and only a slow one works; MissingExtra.
    """
    choice = Resolved(train.attention, "asked for by train.attention")
    if train.attention == "auto":
        choice = _automatic(device, packed_causal)
    _check(choice.name, train.precision, device, packed_causal)
    if choice.name == "blockwise" and device.platform != "cpu":
        return Resolved(choice.name, f"{choice.reason}; {BLOCKWISE_COST}")
    return choice


def _automatic(device: Device, packed_causal: bool) -> Resolved:
    kind = device.device_kind
    if device.platform == "cpu":
        return Resolved("blockwise", "the default on CPU")
    if device.platform == "gpu" and _generation(device) in MOSAIC_GENERATIONS:
        return Resolved("mosaic", f"the kernel with key intervals for {kind}")
    if device.platform == "tpu" and packed_causal:
        return Resolved("splash", f"every mask is causal within documents, on {kind}")
    raise Contradiction(
        f"no fast attention kernel takes the masks of this run on {kind}", where="train.attention",
        fix=f"train.attention=blockwise works, but {BLOCKWISE_COST}",
    )


def _check(name: str, precision: str, device: Device, packed_causal: bool) -> None:
    platform = PLATFORMS.get(name, device.platform)
    if platform != device.platform or (name == "mosaic" and _generation(device) not in MOSAIC_GENERATIONS):
        needs = "sm90 or sm100" if name == "mosaic" else platform
        raise Contradiction(
            f"the attention kernel {name} needs {needs}; this is {device.device_kind}", where="train.attention",
            fix="leave train.attention=auto, or ask for blockwise",
        )
    if name in BF16_ONLY and precision != "bf16":
        raise Contradiction(
            f"the attention kernel {name} computes in bf16 only, and train.precision is {precision}",
            where="train.attention", fix="train.precision=bf16, or ask for train.attention=blockwise",
        )
    if name in ("cudnn", "splash") and not packed_causal:
        raise Contradiction(
            f"the attention kernel {name} takes causal masks only, with no window", where="train.attention",
            fix="leave train.attention=auto, or ask for blockwise",
        )
    if name == "mosaic" and importlib.util.find_spec("tokamax") is None:
        raise MissingExtra(
            "the attention kernel mosaic comes with tokamax, which is not installed", where="train.attention",
            fix="pip install 'packtrain[attention]', or ask for train.attention=blockwise",
        )


def _generation(device: Device) -> int:
    """8 for sm80, 9 for sm90; 0 where a device has no such number (a TPU, an AMD GPU: "gfx942")."""
    found = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))
    return int(found[1]) if found else 0
