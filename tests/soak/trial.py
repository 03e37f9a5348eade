"""A real run of a tiny model that a test starts, kills, freezes and looks at."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.reader import Checkpoint, open_checkpoint
from packtrain.core.journal import Entry, read_folder
from packtrain.core.platform import LocalPlatform, Process
from packtrain.supervise import local

LOOK_S = 0.01
CARRIER, WORKERS_LOG = "packtrain.checkpoint.carrier", "/0.log"
SETTINGS = (
    "model.layers=2", "model.embed=128", "model.heads=2", "model.kv_heads=1", "model.head=64", "model.mlp=256",
    "optim.warmup_steps=20", "data.batch_rows=4", "data.length=64", "train.minutes_max=0",
    "train.eval_every_steps=100000", "train.sample_prompts=[]", "checkpoint.every_steps=4",
    "checkpoint.memory_every_steps=0",
    "supervise.attempts_without_progress=20",
)


def is_carrier(process: psutil.Process) -> bool:
    return CARRIER in process.cmdline()


def is_worker(process: psutil.Process) -> bool:
    """By its log: one that was a standby keeps the name it was started with."""
    return os.readlink(f"/proc/{process.pid}/fd/1").endswith(WORKERS_LOG)


PLAYS = {"carrier": is_carrier, "worker": is_worker}


class TookTooLong(AssertionError):
    """What a test waited for did not come."""


class Trial:
    """One run in a folder of its own, and the command that watches it."""

    def __init__(
        self, home: pathlib.Path, store: pathlib.Path, cache: pathlib.Path, steps: int, *settings: str
    ) -> None:
        self.platform = LocalPlatform()
        self.home = home
        self.run = home / "runs" / "trial"
        self.log = CommitLog(self.platform, str(self.run / "commits"))
        self.watcher: Process | None = None
        self._commits: list[Commit] = []
        home.mkdir(parents=True, exist_ok=True)
        wanted = (*SETTINGS, f"train.steps={steps}", *settings)
        options = [word for setting in wanted for word in ("--set", setting)]
        self._argv = [
            sys.executable, "-m", "packtrain.cli.main", "train", "first-light", "--run", "trial", "--data", str(store),
            *options,
        ]
        self._env = {
            **os.environ, "PACKTRAIN_HOME": str(home), "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    # --- doing ---

    def start(self) -> None:
        """The command a person would give; the same one resumes."""
        self.watcher = self.platform.spawn(self._argv, self._env, log_path=str(self.home / "watcher.log"))

    def send(self, part: str, signum: int) -> bool:
        """Signal worker, carrier, agent or coordinator; False when there is none just now."""
        found = self.process(part)
        if found is None:
            return False
        try:
            found.send_signal(signum)
        except psutil.NoSuchProcess:
            return False
        return True

    def process(self, part: str) -> psutil.Process | None:
        """The living process that plays `part`."""
        live = local.find(self.platform, str(self.run))
        if live is None:
            return None
        try:
            agent = psutil.Process(live.agents["n0"])
            if part == "coordinator":
                return psutil.Process(self.platform.read_json(str(self.run / "holder"))["pid"])
            if f"{live.base}/n0" not in agent.cmdline():
                return None
            return agent if part == "agent" else next(filter(PLAYS[part], agent.children()), None)
        except (psutil.Error, OSError, ValueError, KeyError):
            return None

    def finish(self, timeout_s: float) -> int:
        """Exit code of the command, waited for."""
        assert self.watcher is not None
        status = self.watcher.wait(timeout_s)
        if status is None:
            raise TookTooLong(f"the run goes on after {timeout_s} s\n{self.said()}")
        return status

    def clear(self) -> None:
        """End what still runs: whoever watches first, who would start the others again."""
        if self.watcher is not None:
            self.watcher.send_signal(signal.SIGKILL)
            self.watcher.wait(20)
        for part in ("coordinator", "agent"):
            self.send(part, signal.SIGKILL)

    # --- looking ---

    def looks(self, seconds: float, what: str) -> Iterator[None]:
        """Come back every few milliseconds for `seconds`, then raise TookTooLong."""
        end_ns = self.platform.boot_ns() + int(seconds * 1e9)
        while self.platform.boot_ns() < end_ns:
            yield
            self.platform.sleep(LOOK_S)
        raise TookTooLong(f"waited {seconds} s for {what}\n{self.said()}")

    def said(self) -> str:
        """The end of what the command and the last worker printed."""
        logs = [self.home / "watcher.log", *sorted(self.run.glob("logs/*/0.log"))[-1:]]
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists())

    def commits(self) -> list[Commit]:
        """The log so far. Only what is new is read, so this may be asked a hundred times a second."""
        while (self.run / "commits").is_dir() and (commit := self.log.read(len(self._commits) + 1)) is not None:
            self._commits.append(commit)
        return self._commits

    def saves(self) -> list[Commit]:
        return [commit for commit in self.commits() if commit.kind == "save"]

    def unpublished(self) -> set[str]:
        """Checkpoint folders that no commit names: a save in flight, or what a killed one left."""
        folders = self.run / "checkpoints"
        present = set(os.listdir(folders)) if folders.is_dir() else set()
        return present - {commit.folder for commit in self.saves()}

    def entries(self) -> list[Entry]:
        """The journal; asserts that nothing but torn tails is damaged."""
        if not (self.run / "journal").is_dir():
            return []
        reading = read_folder(self.platform, str(self.run / "journal"))
        alarming = [damage for damage in reading.damage if damage.alarming]
        assert not alarming, alarming
        return reading.entries

    def open(self, commit: Commit) -> Checkpoint:
        return open_checkpoint(self.platform, str(self.run), commit)

    def final(self) -> dict[str, bytes]:
        """Every tensor of the last save, as bytes, and where it stands."""
        checkpoint = self.open(self.saves()[-1])
        bits = {name: checkpoint.read(name).tobytes() for name in sorted(checkpoint.specs)}
        return {**bits, "step": str((checkpoint.manifest.step, checkpoint.manifest.data_index)).encode()}


@contextmanager
def trial(
    home: pathlib.Path, store: pathlib.Path, cache: pathlib.Path, steps: int, *settings: str
) -> Iterator[Trial]:
    made = Trial(home, store, cache, steps, *settings)
    try:
        yield made
    finally:
        made.clear()
