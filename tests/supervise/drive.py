"""A foreground with the toy as its worker, in a process of its own: `drive.py RUN '{"grace_s": 5}'`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import LocalPlatform, Process
from packtrain.supervise import foreground
from packtrain.supervise.config import SuperviseConfig

HERE = os.path.dirname(os.path.abspath(__file__))


class Fast(LocalPlatform):
    """A clock five times as fast, so that limits of seconds pass in parts of them."""

    def boot_ns(self) -> int:
        return 5 * super().boot_ns()


class Linkless(LocalPlatform):
    """A file system without hard links."""

    def link(self, source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", target)


class Unlistable(LocalPlatform):
    """A journal folder that can be listed every other time only."""

    lists = 0

    def listdir(self, path: str) -> list[str]:
        if path.endswith("/journal"):
            self.lists += 1
            if self.lists % 2:
                raise OSError(5, "Input/output error", path)
        return super().listdir(path)


class Crowded(LocalPlatform):
    """The second carrier cannot be started for want of memory."""

    carriers = 0

    def spawn(self, command: Sequence[str], *args: Any, **options: Any) -> Process:
        if "packtrain.checkpoint.carrier" in command:
            self.carriers += 1
            if self.carriers == 2:
                raise OSError(12, "Cannot allocate memory")
        return super().spawn(command, *args, **options)


class Stuck(Process):
    """A process that nobody sees end, as if it hung in a dead file system."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return None

    def wait(self, timeout_s: float | None = None) -> int | None:
        assert timeout_s is not None, "this would wait for ever"
        return None

    def send_signal(self, signum: int) -> None: ...


class Hanging(LocalPlatform):
    """Carriers that cannot be killed."""

    def spawn(self, command: Sequence[str], *args: Any, **options: Any) -> Process:
        process = super().spawn(command, *args, **options)
        return Stuck(process) if "packtrain.checkpoint.carrier" in command else process


PLATFORMS = {
    "FAST": Fast, "LINKLESS": Linkless, "UNLISTABLE": Unlistable, "CROWDED": Crowded, "HANGING": Hanging,
}


def platform() -> LocalPlatform:
    return next((kind for flag, kind in PLATFORMS.items() if os.environ.get(flag)), LocalPlatform)()


class Talk:
    """A view that says on stdout what is said, and when a step was heard of."""

    def entries(self, entries: object) -> None: ...

    def beat(self, beat: object) -> None:
        print("beat", beat.step, flush=True)  # type: ignore[attr-defined]

    def say(self, text: str) -> None:
        print("say", text, flush=True)

    def tick(self, now_ns: int) -> None:
        if os.environ.get("BROKEN_VIEW"):
            raise ZeroDivisionError("a fault of the display")


def main(run_folder: str, options: dict) -> int:
    os.makedirs(run_folder, exist_ok=True)
    job = foreground.Job(
        name=options.pop("job", os.path.basename(run_folder)), run_folder=run_folder,
        worker=(sys.executable, f"{HERE}/toy_worker.py"),
        carrier=(sys.executable, "-m", "packtrain.checkpoint.carrier"),
        version="test", env=dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(HERE))),
        checkpoint=CheckpointConfig(
            keep_last=options.pop("keep_last", 3), grace_s=options.pop("purge_grace_s", 3600.0),
            mirrors=tuple(Mirror(**mirror) for mirror in options.pop("mirrors", [])),
            memory_every_steps=options.pop("memory_every_steps", 1), fallback=tuple(options.pop("fallback", ())),
        ),
        supervise=SuperviseConfig(**{"grace_s": 20.0, **options}),
    )
    try:
        finish = foreground.run(job, platform(), Talk())
    except PacktrainError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    if finish.error is not None:
        print(finish.error.render(), file=sys.stderr)
    return finish.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
