"""How often each host was blamed, kept beside the runs: a lemon that one run found is chosen last by the next.

A file that cannot be read or written is none: it only helps to choose.
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from packtrain.core.platform import Platform
from packtrain.supervise.papers import Papers

HOSTS = "hosts.json"
LOOPBACK = ("127.", "localhost", "::1")
"""Hosts by such a name are this machine alone: all nodes are there, and none of them is better than another."""
BLAME = "blame"
"""Kind of the errand."""
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

    def blame(self, *hosts: str) -> None:
        """Once more, each."""
        known = self.blames()
        told = [host for host in hosts if host and not host.startswith(LOOPBACK)]
        for host in told:
            if host in known or len(known) < HOSTS_MAX:
                known[host] = known.get(host, 0) + 1
        if told:
            with suppress(OSError):
                self._platform.write_replacing(self._path, msgspec.json.encode(known))


class Blames:
    """On their way to that file, in an errand; those that come meanwhile are taken by the next."""

    def __init__(self, hosts: Hosts, papers: Papers) -> None:
        self._hosts, self._papers = hosts, papers
        self._waiting: list[str] = []

    def add(self, host: str) -> None:
        self._waiting.append(host)
        self._write()

    def _write(self, _: Exception | None = None) -> None:
        hosts = list(self._waiting)
        if hosts and self._papers.do(BLAME, lambda: self._hosts.blame(*hosts), self._write):
            self._waiting.clear()
