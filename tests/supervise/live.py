"""Runs of several nodes on this machine, with real coordinators, agents and workers that live on their own."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from packtrain.core.errors import CoordinatorGone
from packtrain.core.platform import LocalPlatform
from packtrain.supervise import local
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.console import ask
from packtrain.supervise.job import Job

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
PATIENCE_S = 60.0


class Live:
    """One, from its start to its end; whatever is left of it is killed. `job`: what else stands in its job."""

    def __init__(
        self, folder: pathlib.Path, nodes: int, spares: int, job: Mapping[str, Any] = {}, **supervise: Any
    ) -> None:
        self.platform, self.folder = LocalPlatform(), folder
        usual = {
            "carrier": (), "worker": (sys.executable, str(HERE / "counter.py")),
            "env": dict(os.environ, PYTHONPATH=str(ROOT)),
        }
        self.job = Job(
            name=folder.name, run_folder=str(folder), version="test", nodes=nodes, spares=spares,
            supervise=SuperviseConfig(grace_s=20.0, **supervise), **{**usual, **job},  # type: ignore[arg-type]
        )
        self.keeper = local.start(self.platform, self.job, self.job.env)
        self._last_will = subprocess.Popen(
            ("sh", "-c", f"cat; rm -rf {self.keeper.live.base}"), stdin=subprocess.PIPE, start_new_session=True
        )
        """Whose home is gone ends: when this process is killed, its run does not live on."""

    @property
    def home(self) -> str:
        return self.keeper.live.coordinator

    def status(self) -> dict[str, Any]:
        with suppress(CoordinatorGone):
            return ask(self.platform, self.home, "status", watching=True)
        return {}

    def until(self, ready: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Its status, once it is as `ready` says."""
        end_ns = self.platform.boot_ns() + round(PATIENCE_S * 1e9)
        while not ready(status := self.status()):
            assert self.platform.boot_ns() < end_ns, f"{status}\n{self.logs()}"
            self.platform.sleep(0.05)
        return status

    def step(self, attempt: int, step: int) -> dict[str, Any]:
        """Once every node of this attempt has completed that step."""

        def reached(status: dict[str, Any]) -> bool:
            steps = [node["step"] for node in status.get("nodes", []) if node["ranks"]]
            return status.get("attempt") == attempt and min(steps, default=-1) >= step

        return self.until(reached)

    def finish(self, enough: bool = True) -> local.Finish:
        """How it ended. `enough`: it is told to."""
        if enough:
            (self.folder / "enough").touch()
        end_ns = self.platform.boot_ns() + round(PATIENCE_S * 1e9)
        while (finish := local.finish_of(self.platform, self.keeper.live)) is None:
            status = self.status()
            assert self.platform.boot_ns() < end_ns, f"{status}\n{self.logs()}"
            self.platform.sleep(0.05)
        return finish

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in pathlib.Path(self.keeper.live.base).glob("*/log"))

    def processes(self, word: str) -> list[psutil.Process]:
        """Those of this run with `word` in their command line."""
        mine = (str(self.folder), self.keeper.live.base)
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                told = " ".join([*process.cmdline(), process.environ().get("PACKTRAIN_RUN", "")])
                found += [process] if word in told and any(one in told for one in mine) else []
        return found

    def workers(self) -> dict[int, int]:
        """Rank -> pid."""
        found = {}
        for one in self.processes("counter.py"):
            with suppress(psutil.Error):
                found[int(one.environ()["RANK"])] = one.pid
        return found

    def broken(self, fault: str, node: str = "", rank: int = -1, seconds: float = 0.0, factor: float = 0.0) -> str:
        """What was said to the fault that was asked for."""
        asked = {"fault": fault, "node": node, "rank": rank, "seconds": seconds, "factor": factor}
        return str(ask(self.platform, self.home, "break", **asked)["said"])

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for word in ("supervise.coordinator", "supervise.agent", "checkpoint.carrier", "tests/supervise/"):
            for process in self.processes(word):
                with suppress(psutil.Error):
                    process.kill()
        for started in self.keeper.started.values():
            started.wait(10)
        self._last_will.kill()
        self._last_will.communicate()
        local.clean(self.platform, self.keeper.live)


@contextmanager
def live(
    folder: pathlib.Path, nodes: int = 2, spares: int = 0, job: Mapping[str, Any] = {}, **supervise: Any
) -> Iterator[Live]:
    folder.mkdir(exist_ok=True)
    one = Live(folder, nodes, spares, job, **supervise)
    try:
        yield one
    finally:
        one.close()
