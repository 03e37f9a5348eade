"""Asks the carrier for what the retention plan says, after each published save. Plans here, deletes nowhere.

One request is under way at a time, and nothing here waits or fails the run: what a dead carrier did not do is planned
again after the next save, from what is then on the disk. The disk is looked at by a thread, which may hang there.
"""

from __future__ import annotations

import queue
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.reader import survey
from packtrain.checkpoint.retention import Action, plan
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import Platform
from packtrain.core.units import NS
from packtrain.core.wire import json_object

CONNECT_S = 1.0
ANSWER_BYTES_MAX = 1 << 20


class Retainer:
    """Of one run on one node."""

    def __init__(self, platform: Platform, run_folder: str, config: CheckpointConfig, carrier_path: str) -> None:
        self._platform, self._run_folder, self._config, self._path = platform, run_folder, config, carrier_path
        self._due = self._plans = False
        self._planned: queue.SimpleQueue[Sequence[Action]] = queue.SimpleQueue()
        self._id = 0
        self._socket: socket.socket | None = None
        self._received = b""

    @property
    def idle(self) -> bool:
        return not self._due and not self._plans and self._socket is None

    def save_published(self) -> None:
        """There may be something to retire now."""
        self._due = True

    def ask_again(self) -> None:
        """The carrier was given up: what it had not answered is planned anew."""
        self._due = self._due or self._socket is not None
        self.drop()

    def look(self) -> list[dict[str, Any]]:
        """Go on without waiting; what was done since the last look: action, folder, reason, error (None: done)."""
        if self._due and not self._plans and self._socket is None:
            self._due, self._plans = False, True
            with self._platform.crew(1) as crew:
                crew.start(self._plan)
        with suppress(queue.Empty):
            actions = self._planned.get_nowait()
            self._plans = False
            self._ask(actions)
        return self._hear() if self._socket is not None else []

    def finish(self, timeout_s: float) -> list[dict[str, Any]]:
        """Go on until nothing is left to do, `timeout_s` at most."""
        done, end_ns = self.look(), self._platform.boot_ns() + round(timeout_s * NS)
        while not self.idle and self._platform.boot_ns() < end_ns:
            self._platform.sleep(0.01)
            done += self.look()
        self.drop()
        return done

    def drop(self) -> None:
        """Leave the carrier; what it accepted goes on."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._received = None, b""

    def _plan(self) -> None:
        actions: Sequence[Action] = ()
        try:
            with suppress(OSError, PacktrainError):  # it cannot be read now: nothing is retired on a guess
                actions = plan(survey(self._platform, self._run_folder), self._config)
        finally:
            self._planned.put(actions)

    def _ask(self, actions: Sequence[Action]) -> None:
        if not actions:
            return
        self._id += 1
        request = {"op": "retain", "id": self._id, "actions": actions, "grace_s": self._config.grace_s}
        try:
            self._socket = self._platform.stream_connect(self._path, CONNECT_S)
            self._socket.sendall(msgspec.json.encode(request) + b"\n")
            self._socket.setblocking(False)
        except OSError:
            self.drop()

    def _hear(self) -> list[dict[str, Any]]:
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        answers = [json_object(line, ANSWER_BYTES_MAX) or {} for line in lines]
        ended = next((answer for answer in answers if answer.get("re") in ("outcome", "busy")), None)
        if ended is not None or not data:
            self.drop()
        return [done for done in (ended or {}).get("done", []) if isinstance(done, dict)]
