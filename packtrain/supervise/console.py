"""What a person's commands say to the coordinator of a run: a line of JSON over its socket `operator`, one in answer.

The socket lies in the coordinator's home, which only its user can enter; there is no other proof of who asks.
"""

from __future__ import annotations

import json
from typing import Any

from packtrain.core.errors import CoordinatorGone, error_named
from packtrain.core.platform import Platform
from packtrain.core.wire import json_object

OPERATOR, FINISH = "operator", "finish"
ANSWER_S = 5.0
ANSWER_BYTES_MAX = 16 << 20
"""A line for each of some thousand nodes."""


def ask(platform: Platform, home: str, op: str, **arguments: Any) -> dict[str, Any]:
    """The coordinator's answer. Raises CoordinatorGone where none comes, and what it refuses with."""
    path = f"{home}/{OPERATOR}"
    try:
        with platform.stream_connect(path, ANSWER_S) as stream:
            stream.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            answer = _line(stream)
    except OSError as error:
        raise _gone(path, str(error)) from error
    if answer is None:
        raise _gone(path, "it sent no answer that is one")
    if not answer.get("ok"):
        said = answer.get("error") or {}
        raise error_named(*(str(said.get(key, "")) for key in ("name", "what", "where", "fix")))
    return answer


def _line(stream: Any) -> dict[str, Any] | None:
    data = b""
    while not data.endswith(b"\n"):
        more = stream.recv(1 << 16)
        if not more or len(data) > ANSWER_BYTES_MAX:
            return None
        data += more
    return json_object(data, ANSWER_BYTES_MAX)


def _gone(path: str, why: str) -> CoordinatorGone:
    return CoordinatorGone(
        f"the coordinator does not answer: {why}", where=path,
        fix="the run's own command starts another one; its workers are not touched by that",
    )
