"""Where a run lives on this machine, for the verbs that speak to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packtrain.core.platform import Platform
    from packtrain.supervise.local import Live


def lives(platform: Platform, folder: str) -> Live:
    """Raises NotLive."""
    from packtrain.core.errors import NotLive
    from packtrain.supervise import local

    live = local.find(platform, folder)
    if live is None or not (platform.exists(live.operator) or local.agents_alive(platform, live)):
        raise NotLive(
            f"run {os.path.basename(folder)!r} does not live on its own on this machine now", where=folder,
            fix="`packtrain ps` shows what does; the command that made it goes on with it",
        )
    return live
