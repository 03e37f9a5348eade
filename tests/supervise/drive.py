"""A run of one node with the toy as its worker, as `packtrain train` starts and watches one: `drive.py RUN OPTIONS`.

OPTIONS is JSON: what a `SuperviseConfig` takes, and a few of a `CheckpointConfig`.
"""

from __future__ import annotations

import json
import os
import sys

from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.cli.world import stay_with
from packtrain.core.errors import PacktrainError
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import StepDone
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.job import Job

HERE = os.path.dirname(os.path.abspath(__file__))


class Talk:
    """A view that says on stdout what is said, and each step that the journal tells of."""

    def entries(self, entries: list) -> None:
        for entry in entries:
            if isinstance(entry.record, StepDone):
                print("step", entry.record.step, flush=True)

    def beat(self, beat: object) -> None: ...

    def say(self, text: str) -> None:
        print("say", text.replace("\n", " "), flush=True)

    def tick(self, now_ns: int) -> None:
        if os.environ.get("BROKEN_VIEW"):
            raise ZeroDivisionError("a fault of the display")


def main(run_folder: str, options: dict) -> int:
    os.makedirs(run_folder, exist_ok=True)
    env = dict(os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(HERE)))
    job = Job(
        name=options.pop("job", os.path.basename(run_folder)), run_folder=run_folder,
        worker=(sys.executable, f"{HERE}/toy_worker.py"),
        carrier=(sys.executable, "-m", "packtrain.checkpoint.carrier"), version="test", env=env,
        checkpoint=CheckpointConfig(
            keep_last=options.pop("keep_last", 3), keep_best=options.pop("keep_best", 0),
            grace_s=options.pop("purge_grace_s", 3600.0),
            mirrors=tuple(Mirror(**mirror) for mirror in options.pop("mirrors", [])),
            memory_every_steps=options.pop("memory_every_steps", 1), fallback=tuple(options.pop("fallback", ())),
        ),
        supervise=SuperviseConfig(**{"grace_s": 20.0, **options}),
    )
    try:
        return stay_with(LocalPlatform(), job, Talk(), env)
    except PacktrainError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
