"""What the carrier's loop has to do with its mirrors: over its real socket, on a real disk."""

from __future__ import annotations

import pathlib
import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest

from packtrain.checkpoint import carrier as carrier_module
from packtrain.checkpoint.carrier import Carrier
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.mirroring import Mirroring
from packtrain.checkpoint.retention import Action
from packtrain.core.contract import CarrierClient
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.worlds import make_run, publish_small

LONG_S = 60.0
"""Never waited out."""


class Copying(Mirroring):
    """A courier reads the folders in `under_way`."""

    under_way: frozenset[str] = frozenset()

    @property
    def busy(self) -> frozenset[str]:
        return self.under_way


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Iterator[tuple[Copying, CarrierClient, list[str]]]:
    """The mirroring of a carrier that serves, a client of it, and the folders of two saves, the older one marked."""
    platform, run = LocalPlatform(), str(tmp_path)
    log = make_run(platform, run)
    begin = log.begin(0, ("r00000",), "node")
    folders = [publish_small(platform, log, 1, step, run).folder for step in (10, 20)]
    copying = Copying(platform, run, 1, CheckpointConfig())
    carrier = Carrier(platform, run, begin, None, platform.stream_listener(f"{run}/socket"), copying)
    thread = threading.Thread(target=carrier.serve)
    thread.start()
    client = CarrierClient(f"{run}/socket", LONG_S)
    yield copying, client, folders
    client.close()
    carrier.stop()
    thread.join()


def test_retention_leaves_what_a_courier_reads(served: tuple[Copying, CarrierClient, list[str]]) -> None:
    """A purge of a folder that is being copied is refused by the carrier, and done once the courier has ended."""
    copying, client, (old, _) = served
    errors = []
    for ticket, under_way in enumerate((frozenset({old}), frozenset[str]()), 1):
        copying.under_way = under_way
        actions = [Action("tombstone", old, "test"), Action("purge", old, "test")]
        message = {"op": "retain", "id": ticket, "grace_s": 0.0, "actions": msgspec.to_builtins(actions)}
        assert client.offer(message) == "accepted"
        errors.append([done["error"] for done in client.wait(ticket, LONG_S)["done"]])
    assert errors[0][0] is None and "copied" in errors[0][1]["what"] and errors[1] == [None, None]


def test_a_carrier_that_starts_survives_the_call_to_hurry(tmp_path: pathlib.Path) -> None:
    """The signal is handled before anything is opened: one that comes early must not end it."""
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    make_run(LocalPlatform(), str(tmp_path))
    assert carrier_module.main(["--run", str(tmp_path), "--socket", f"{tmp_path}/s", "--begin", "1"]) == 75
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
