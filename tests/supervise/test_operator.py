"""The socket for a person's words: whose words are taken."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.supervise.operator import PATIENCE_NS, Operator


class Scene:
    """A coordinator that keeps what it is asked, and its clients."""

    def __init__(self) -> None:
        self.platform = FakePlatform(FakeDisk(), "a")
        self.platform.mkdir("/c")
        self.asked: list[str] = []
        self.operator = Operator(self.platform, "/c", self._answer)

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(request["op"])
        return {"ok": True}

    def says(self, data: bytes) -> socket.socket:
        client = self.platform.stream_connect("/c/operator", 0.1)
        client.sendall(data)
        return client


def test_who_has_hung_up_is_not_heard() -> None:
    """While nobody looked, clients asked, waited in vain, told their persons so and hung up; one that waits still is
    answered."""
    scene = Scene()
    for _ in range(2):
        scene.says(b'{"op":"stop"}\n').close()
    waits = scene.says(b'{"op":"status"}\n')
    scene.operator.look()
    assert scene.asked == ["status"] and json.loads(waits.recv(99)) == {"ok": True}
    assert len(scene.operator.sockets()) == 1


def test_a_word_may_come_in_pieces_but_not_for_ever() -> None:
    """It is heard at the look that has all of it; who says nothing more is dropped after a while."""
    scene = Scene()
    slow, never = scene.says(b'{"op":'), scene.says(b'{"op"')
    scene.operator.look()
    slow.sendall(b'"save"}\n')
    scene.operator.look()
    assert scene.asked == ["save"] and json.loads(slow.recv(99)) == {"ok": True}
    scene.platform.pause(PATIENCE_NS / 1e9 + 1)
    scene.operator.look()
    assert scene.asked == ["save"] and never.recv(99) == b""
