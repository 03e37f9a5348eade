"""A coordinator that only answers: what the commands of a person speak to in tests."""

from __future__ import annotations

import json
import pathlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from packtrain.core.platform import LocalPlatform
from packtrain.supervise import local
from packtrain.supervise.console import FINISH, OPERATOR
from packtrain.supervise.job import Job, write_job

STATUS = {
    "ok": True, "state": "running", "attempt": 3, "step": 7, "paused": False, "term": 1, "pid": 1,
    "nodes": [{"node": "n0", "state": "runs", "ranks": [0, 1], "step": 7}, {"node": "n1", "state": "spare"}],
}


class StandIn:
    """Keeps what it was asked; ends the run at the second `stop`, or at the first where `obedient`."""

    def __init__(self, home: pathlib.Path, obedient: bool = True) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: dict[str, dict[str, Any]] = {"status": STATUS}
        self._home, self._obedient = home, obedient
        self._listener = LocalPlatform().stream_listener(f"{home}/{OPERATOR}")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def finish(self, exit_code: int, **error: str) -> None:
        """What a coordinator leaves behind when it ends."""
        finish = {"exit_code": exit_code, "reason": "over", "error": error or None}
        LocalPlatform().write_replacing(f"{self._home}/{FINISH}", json.dumps(finish).encode())

    def words(self) -> list[str]:
        return [one["op"] for one in self.asked if one["op"] != "status"]

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                with stream:
                    self._answer(stream)

    def _answer(self, stream: socket.socket) -> None:
        asked = json.loads(stream.makefile().readline() or "{}")
        if not asked:
            return
        self.asked.append(asked)
        answer = self.answers.get(asked["op"], {"ok": True, "said": f"{asked['op']}: it will be done"})
        stream.sendall(json.dumps(answer).encode() + b"\n")
        if self.words().count("stop") == (1 if self._obedient else 2):
            self.finish(75, name="run.stopped_on_request", what="stopped on request", where="", fix="again")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@contextmanager
def standing_in(run_folder: str, base: pathlib.Path, obedient: bool = True) -> Iterator[StandIn]:
    """A run that seems to live on its own here."""
    platform, home = LocalPlatform(), base / "c"
    home.mkdir(parents=True)
    base.chmod(0o700)
    platform.mkdir(run_folder)
    write_job(platform, f"{base}/job.json", Job(name="it", run_folder=run_folder, worker=(), carrier=(), version="1"))
    live = local.Live(run_folder, str(base), platform.node(), {})
    platform.write_replacing(f"{run_folder}/{local.LIVE}", msgspec.json.encode(live))
    made = StandIn(home, obedient)
    try:
        yield made
    finally:
        made.close()
