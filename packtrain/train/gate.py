"""Before the first collective: a rank says what it is about to begin from, and waits until all have said the same.

Restoring is a collective itself, so what is compared is what this rank has opened, and verified, and not yet read.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib
import msgspec
from jax.sharding import Mesh

from packtrain.core.contract import Control, wait_for_go
from packtrain.core.errors import StoppedOnRequest
from packtrain.train.config import mesh_text
from packtrain.train.seat import Desk


@dataclass(frozen=True)
class Gate:
    """`asked`: whether this process was told to stop. `facts`: what every checkpoint of this attempt will say."""

    desk: Desk
    control: Control
    asked: Callable[[], bool]
    facts: dict[str, Any]
    mesh: Mesh

    def pass_to(self, restored: str, step: int, data_index: int) -> None:
        """Returns when the world may begin. Raises StoppedOnRequest where it was told to stop instead, NoGo."""
        facts = self.said(restored, step, data_index)
        if not wait_for_go(self.desk.place, self.control, facts, self.asked):
            raise StoppedOnRequest("told to stop before the first step", fix="the same command goes on from there")

    def said(self, restored: str, step: int, data_index: int) -> dict[str, str]:
        """Facts that ranks may differ in without knowing it. `restored`: digest of what was opened, or "fresh"."""
        device = jax.local_devices()[0]
        return {
            "restored": restored, "step": str(step), "data_index": str(data_index), "plan": self.facts["plan_hash"],
            "code": self.facts["code_hash"], "spec": hashlib.sha256(msgspec.json.encode(self.desk.spec)).hexdigest(),
            "mesh": f"{mesh_text(self.mesh.shape)} of {self.mesh.size} {device.device_kind}",
            "version": f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, python {platform.python_version()}",
        }
