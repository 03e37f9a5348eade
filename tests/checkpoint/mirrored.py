"""A run on a fake disk, its two mirrors, and the carrier's care for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from packtrain.checkpoint import courier
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.checkpoint.mirroring import Mirroring
from packtrain.core.fake import FakeDisk, FakePlatform, FakeProcess
from packtrain.core.journal import read_folder
from packtrain.core.records import Record
from tests.checkpoint.worlds import RUN, make_run, publish_small

NEAR = Mirror(name="near", place="/near", every_s=100.0, deadline_s=50.0)
FAR = Mirror(name="far", place="/far", every_s=1000.0, deadline_s=50.0)
BOTH = CheckpointConfig(keep_last=2, mirrors=(NEAR, FAR))
"""keep_last: 2, so that what is older need not be there."""


class World:
    """A run with one published save, two empty mirrors, and the carrier's care for them."""

    def __init__(self, config: CheckpointConfig = BOTH, saves: int = 1) -> None:
        self.platform = FakePlatform(FakeDisk(), programs=self._program)
        self.spawned: list[list[str]] = []
        self.acts: Callable[[FakeProcess], int | None] = run_errand
        """What a courier does; None: it hangs."""
        for folder in ("/near", "/far"):
            self.platform.mkdir(folder)
        self.log = make_run(self.platform)
        self.log.begin(None, ["r00000"], "a")
        self.commits = [publish_small(self.platform, self.log, 1, 10 * (n + 1)) for n in range(saves)]
        self.platform.disk.sync_all()
        self.care = Mirroring(self.platform, RUN, 1, config)

    def _program(self, argv: Sequence[str]) -> Callable[[FakeProcess], int | None]:
        self.spawned.append(list(argv))
        return lambda process: self.acts(process)

    def save(self, step: int) -> Commit:
        commit = publish_small(self.platform, self.log, 1, step)
        self.commits.append(commit)
        self.care.published()
        return commit

    def look(self, times: int = 3) -> float:
        """As the carrier's thread does: what is due, the end of what was short, and what that makes due."""
        return [self.care.look() for _ in range(times)][-1]

    def passes(self, seconds: float) -> None:
        self.platform.sleep(seconds)

    def rm(self, commit: Commit) -> None:
        """rm -rf by somebody else."""
        folder = f"{RUN}/checkpoints/{commit.folder}"
        for name in self.platform.listdir(folder):
            self.platform.unlink(f"{folder}/{name}")
        self.platform.rmdir(folder)

    def errands(self) -> list[str]:
        """Of the couriers since the last call: `near:2` for record 2 to a mirror, `back:2`."""
        told = []
        for argv in self.spawned:
            mirrors = argv[argv.index("--mirrors") + 1]
            name = "back" if "--back" in argv else "near" if '"near"' in mirrors else "far"
            told.append(f"{name}:{argv[argv.index('--commit') + 1]}")
        self.spawned.clear()
        return told

    def records(self, kind: type[Record]) -> list[Record]:
        return [entry.record for entry in read_folder(self.platform, f"{RUN}/journal").entries
                if isinstance(entry.record, kind)]

    def has(self, place: str, commit: Commit) -> bool:
        return self.platform.exists(f"{place}/copied/{commit.number:012d}")


def run_errand(process: FakeProcess) -> int:
    """The courier itself, in no time."""
    return courier.run(process.platform, process.argv[4:], threading.Event())
