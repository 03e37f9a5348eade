"""How often each host was blamed, kept beside the runs: a lemon that one run found is chosen last by the next.

A file that cannot be read or written is none: it only helps to choose.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from packtrain.core.platform import Platform

HOSTS = "hosts.json"
LOOPBACK = ("127.", "localhost", "::1")
"""Hosts by such a name are this machine alone: all nodes are there, and none of them is better than another."""
HOSTS_MAX = 10_000
BYTES_MAX = 4 << 20


class Hosts:
    """Of all runs in the folder of `run_folder`."""

    def __init__(self, platform: Platform, run_folder: str) -> None:
        self._platform, self._path = platform, f"{os.path.dirname(run_folder.rstrip('/'))}/{HOSTS}"

    def blames(self) -> dict[str, int]:
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            known = msgspec.json.decode(self._platform.read(self._path, 0, BYTES_MAX), type=dict[str, int])
            return {host: times for host, times in known.items() if not host.startswith(LOOPBACK)}
        return {}

    def blame(self, host: str) -> None:
        """Once more."""
        if host.startswith(LOOPBACK):
            return
        known = self.blames()
        if host and (host in known or len(known) < HOSTS_MAX):
            with suppress(OSError):
                self._platform.write_replacing(
                    self._path, msgspec.json.encode({**known, host: known.get(host, 0) + 1})
                )
