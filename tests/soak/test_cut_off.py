"""A node on another network than its coordinator, cut off for half a minute; real processes, real carriers."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from packtrain.checkpoint.slots import memory_folder
from packtrain.core.errors import CoordinatorGone
from packtrain.core.pinned import KEY_FILE, make_pinned
from packtrain.core.platform import LocalPlatform, Process
from packtrain.core.records import NodeLost, RunFinished, SaveDone
from packtrain.supervise import keys, local
from packtrain.supervise.console import ask
from packtrain.supervise.job import Job, write_job
from tests.soak.namespaces import ADDRESSES, Cable, cable, inside
from tests.supervise.runs import log, records

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]
HERE = pathlib.Path(__file__).parent.parent
TOY = {"steps": 10**9, "save_every": 10, "step_s": 0.05, "remember": True}
"""What it remembers, and what it saves from, lies in the memory of its node, as on two machines."""
CUT_S = 30.0
PATIENCE_S = 60.0
NODES = ("n0", "n1")


class Apart:
    """A run of one node and a spare: coordinator and n0 at one end of the cable, n1 at the other."""

    def __init__(self, folder: pathlib.Path, base: pathlib.Path, there: Cable) -> None:
        self.platform, self.folder, self.base, self.cable = LocalPlatform(), folder, base, there
        self.home = str(base / "c")
        self.started: dict[str, Process] = {}
        self.env = dict(os.environ, PYTHONPATH=str(HERE.parent), TOY=json.dumps(TOY))
        for place in (folder, *(base / name for name in ("c", *NODES))):
            place.mkdir(mode=0o700)
        write_job(self.platform, f"{base}/job.json", Job(
            name="apart", run_folder=str(folder), version="test", nodes=1, spares=1, env=self.env,
            worker=(sys.executable, str(HERE / "supervise" / "toy_worker.py")),
            carrier=(sys.executable, "-P", "-m", "packtrain.checkpoint.carrier"),
        ))
        keys.make_keys(self.platform, self.home)
        make_pinned(self.platform, f"{self.home}/{KEY_FILE}")
        for name in NODES:
            (base / name / KEY_FILE).write_bytes((base / "c" / KEY_FILE).read_bytes())
            keys.allow(self.platform, self.home, name, keys.make_keys(self.platform, f"{base}/{name}"))

    def start(self, name: str, namespace: str, module: str, *words: str) -> None:
        command = (sys.executable, "-P", "-m", f"packtrain.supervise.{module}", "--job", f"{self.base}/job.json")
        self.started[name] = self.platform.spawn(
            inside(namespace, *command, "--home", f"{self.base}/{name}", *words), self.env,
            log_path=f"{self.base}/{name}/log",
        )

    def start_agent(self, name: str, namespace: str, address: str) -> None:
        words = ("--node", name, "--host", address, "--coordinator", f"{self.home}/{keys.ADDRESS}")
        self.start(name, namespace, "agent", *words)

    def until(self, seen: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        end_ns = self.platform.boot_ns() + round(PATIENCE_S * 1e9)
        while True:
            status: dict[str, Any] = {}
            with suppress(CoordinatorGone):
                status = ask(self.platform, self.home, "status")
            if seen(status):
                return status
            assert self.platform.boot_ns() < end_ns, f"{status}\n{self.logs()}"
            self.platform.sleep(0.1)

    def logs(self) -> str:
        found = [*self.base.glob("*/log"), *self.folder.glob("logs/*/*.log")]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-2000:]}" for path in found)

    def runs_on(self, attempt: int, name: str) -> Callable[[dict[str, Any]], bool]:
        return lambda status: (
            status.get("attempt") == attempt and self.state_of(status, name) == "running" and status["step"] >= 30
        )

    def state_of(self, status: dict[str, Any], name: str) -> str:
        return next((str(node["state"]) for node in status.get("nodes", []) if node["node"] == name), "")

    def refused(self) -> list[int]:
        """Steps whose saves came too late."""
        return [one.step for one in records(self.folder, SaveDone) if one.error == "commits.stale"]

    def worker(self, name: str) -> psutil.Process:
        children = psutil.Process(self.started[name].pid).children(recursive=True)
        (found,) = [one for one in children if any("toy_worker" in word for word in one.cmdline())]
        return found

    def close(self) -> None:
        for process in self.started.values():
            process.send_signal(9)
            process.wait(10)
        for name in NODES:
            shutil.rmtree(memory_folder(str(self.folder), name), ignore_errors=True)


@pytest.fixture
def apart(tmp_path: pathlib.Path) -> Iterator[Apart]:
    with cable() as there, tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as base:
        run = Apart(tmp_path / "run", pathlib.Path(base), there)
        try:
            yield run
        finally:
            run.close()


def test_a_node_cut_off_for_half_a_minute_does_no_harm(apart: Apart) -> None:
    """It computes on and publishes nothing: the next attempt began without it, from the last save. Healed it is told to
    stop, what it ran ends, and it is a spare. Cut off at the end of the run it leaves by itself, and at once."""
    listen = ("--listen", f"tcp://{ADDRESSES[0]}:0")
    apart.start("c", apart.cable.here, "coordinator", *listen)
    apart.start_agent("n1", apart.cable.there, ADDRESSES[1])
    apart.until(apart.runs_on(1, "n1"))
    apart.start_agent("n0", apart.cable.here, ADDRESSES[0])
    apart.until(lambda status: apart.state_of(status, "n0") == "spare")
    lonely = apart.worker("n1")
    apart.cable.cut()
    healed_ns = apart.platform.boot_ns() + round(CUT_S * 1e9)
    apart.until(apart.runs_on(2, "n0"))
    begun = next(one for one in log(apart.folder).all() if one.kind == "begin" and one.attempt == 2)
    apart.platform.sleep(max(0.0, (healed_ns - apart.platform.boot_ns()) / 1e9))
    late = apart.refused()
    assert len(late) >= 10 and min(late) > begun.step and lonely.is_running(), apart.logs()
    assert {one.attempt for one in log(apart.folder).all()[begun.number:]} == {2}
    apart.cable.heal()
    apart.until(lambda status: apart.state_of(status, "n1") == "spare")
    assert not lonely.is_running() and not psutil.Process(apart.started["n1"].pid).children(recursive=True)
    apart.cable.cut()
    ask(apart.platform, apart.home, "stop", by="the test")
    assert [apart.started[name].wait(60) for name in ("c", "n0", "n1")] == [75, 0, 0], apart.logs()
    assert [one.node for one in records(apart.folder, NodeLost)] == ["n1"]
    assert [one.exit_code for one in records(apart.folder, RunFinished)] == [75]
    finish = local.finish_in(apart.platform, apart.home)
    assert finish is not None and finish.term == 1
