"""Two network namespaces of this machine, joined by a cable that a test can pull (ip-netns(8), veth(4))."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.207.31.1", "10.207.31.2")


class Cable:
    """`here` and `there`: the namespaces at its ends."""

    def __init__(self) -> None:
        self.here, self.there = f"pt{os.getpid()}a", f"pt{os.getpid()}b"

    def lay(self) -> None:
        _ip("netns", "add", self.there)
        _ip("-n", self.here, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self.there)
        for name, address in zip((self.here, self.there), ADDRESSES):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "cable", "up")

    def cut(self) -> None:
        _ip("-n", self.here, "link", "set", "cable", "down")

    def heal(self) -> None:
        _ip("-n", self.here, "link", "set", "cable", "up")


@contextmanager
def cable() -> Iterator[Cable]:
    """Skips the test where this user may make no namespaces."""
    one = Cable()
    try:
        _ip("netns", "add", one.here)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
    try:
        one.lay()
        yield one
    finally:
        for name in (one.here, one.there):
            subprocess.run(("ip", "netns", "delete", name), capture_output=True)


def inside(namespace: str, *command: str) -> tuple[str, ...]:
    """The command, to be run there; under its own process id."""
    return ("ip", "netns", "exec", namespace, *command)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True, text=True)
