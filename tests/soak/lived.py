"""A run that lives on its own, started by the command a person gives; a test kills pieces of it and looks."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Callable

import psutil

from packtrain.checkpoint import slots
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.core.journal import read_folder
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import AttemptBegan, StepDone
from packtrain.supervise import local
from packtrain.supervise.console import ask
from tests.soak.trial import SETTINGS

MODEL = (
    "train.unroll=false", "train.microbatches=1", "optim.name=adamw", "optim.learning_rate=0.003", "model.layers=1",
    "model.embed=64", "model.heads=1", "model.mlp=128",
)
"""One that compiles in seconds: every start of a world compiles."""
DEADLINE_S = 400
"""For whatever is waited for, on a machine many times too busy."""


class Lived:
    """`packtrain train --nodes ...` in a home of its own."""

    def __init__(self, home: pathlib.Path, store: pathlib.Path, steps: int, *options: str) -> None:
        self.platform, self.home, self.run = LocalPlatform(), home, home / "runs" / "lived"
        home.mkdir(parents=True)
        wanted = (*SETTINGS, f"train.steps={steps}")
        settings = [word for setting in wanted for word in ("--set", setting)]
        command = ("train", "first-light", "--run", "lived", "--data", str(store), *settings, *options)
        env = {**os.environ, "PACKTRAIN_HOME": str(home)}
        argv = (sys.executable, "-m", "packtrain.cli.main", *command)
        self.watcher = self.platform.spawn(argv, env, log_path=str(home / "watcher.log"))

    def said(self) -> str:
        logs = [self.home / "watcher.log", *sorted(self.run.glob("logs/*/*.log"))[-4:]]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-2000:]}" for path in logs if path.exists())

    def until(self, seen: Callable[[], bool], what: str) -> None:
        end_ns = self.platform.boot_ns() + DEADLINE_S * 10**9
        while not seen():
            assert self.watcher.poll() is None and self.platform.boot_ns() < end_ns, f"{what}\n{self.said()}"
            self.platform.sleep(0.05)

    def steps(self) -> tuple[int, int]:
        """(attempt, steps it has completed) of the last attempt."""
        records = [entry.record for entry in read_folder(self.platform, str(self.run / "journal")).entries]
        began = [n for n, record in enumerate(records) if isinstance(record, AttemptBegan)]
        if not began:
            return 0, 0
        done = sum(isinstance(record, StepDone) for record in records[began[-1] :])
        return len(began), done

    def until_trained(self, attempt: int, steps: int = 25) -> None:
        """So many steps of this attempt, or a later one."""

        def there() -> bool:
            found, done = self.steps() if (self.run / "journal").is_dir() else (0, 0)
            return found > attempt or (found == attempt and done >= steps)

        self.until(there, f"{steps} steps of attempt {attempt}")

    @property
    def live(self) -> local.Live:
        found = local.find(self.platform, str(self.run))
        assert found is not None, self.said()
        return found

    def processes(self, module: str) -> list[psutil.Process]:
        """Those of this run that run a module."""
        where = {str(self.run), f"{self.live.base}/job.json"}
        found = [(one, _command(one)) for one in psutil.process_iter()]
        return [one for one, words in found if module in words and where & set(words)]

    def working_agent(self) -> psutil.Process:
        return psutil.Process(self.live.agents[self.working_node()])

    def working_node(self) -> str:
        """One that has ranks, by what the coordinator says: a standby that became a worker keeps its name."""
        nodes = ask(self.platform, self.live.coordinator, "status")["nodes"]
        return str(next(node["node"] for node in nodes if node["ranks"]))

    def lose(self, node: str) -> None:
        """Its agent, with all it started, and what it had in memory."""
        psutil.Process(self.live.agents[node]).send_signal(signal.SIGKILL)
        for folder in (slots.memory_folder(str(self.run), node), slots.peer_folder(str(self.run), node)):
            shutil.rmtree(folder, ignore_errors=True)

    def end(self) -> int:
        status = self.watcher.wait(DEADLINE_S)
        assert status is not None, self.said()
        return status

    def final(self) -> dict[str, bytes]:
        """Every tensor of the last save."""
        saves = CommitLog(self.platform, str(self.run / "commits")).restore_point()
        assert saves is not None
        checkpoint = open_checkpoint(self.platform, str(self.run), saves)
        return {name: checkpoint.read(name).tobytes() for name in sorted(checkpoint.specs)}

    def clear(self) -> None:
        """End what still runs."""
        found = local.find(self.platform, str(self.run))
        if found is not None:
            for module in ("packtrain.supervise.coordinator", "packtrain.supervise.agent"):
                for one in self.processes(module):
                    one.kill()
        self.watcher.send_signal(9)
        self.watcher.wait(20)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
