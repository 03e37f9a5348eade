"""The steps of `packtrain storm-demo`: a small store, a run that nobody touches, the same run broken on purpose, and
whether both ended with the same bits.

Both runs are started by the command a person gives, `packtrain train`, in a process of its own. This one reads their
journals, shows them, and strikes: so what is seen here is what any run does.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint
from packtrain.cli import folders, launch
from packtrain.cli.bars import Bars
from packtrain.cli.storm_screen import Blow, Live, Plain, Run, Storm, showing
from packtrain.cli.watch import last_line
from packtrain.core.errors import EXIT_AGAIN, EXIT_DONE, PacktrainError, StormIncomplete, StormUnequal
from packtrain.core.journal import Tail
from packtrain.core.platform import LocalPlatform, Platform, Process
from packtrain.core.units import bytes_text
from packtrain.data.build import BuildOptions, build
from packtrain.data.stdlib import standard_library
from packtrain.monitor import incidents, report
from packtrain.supervise import local
from packtrain.supervise.console import ask
from packtrain.supervise.requests import Requests, listening

STORE, TEXT_BYTES_MAX = "storm", 400_000
LOOK_S = 0.1
LEAVE_S = 90.0
"""How long a run that was told to stop may take, saving included, before it is left to itself."""
NODES, SPARES = 2, 1
STEPS = 240
FAULTS = ("kill-carrier", "kill-coordinator", "kill", "stop", "kill-agent")
BLOWS = tuple(Blow(fault, 37 * n) for n, fault in enumerate(FAULTS, 1))
"""Between two saves to disk, so that restarts have something to find in memory."""
SETTINGS = (
    f"train.steps={STEPS}", "train.minutes_max=0", "train.eval_every_steps=0", "train.sample_prompts=[]",
    "train.unroll=false", "train.microbatches=1", "optim.name=adamw", "optim.learning_rate=0.003",
    "model.layers=2", "model.embed=128", "model.heads=2", "model.kv_heads=1", "model.head=64", "model.mlp=384",
    "data.batch_rows=8", "data.length=256", "optim.warmup_steps=20",
    "checkpoint.every_steps=20", "checkpoint.memory_every_steps=5", "checkpoint.peer_memory=5",
    "supervise.beat_overdue_s=8", "supervise.attempts_without_progress=10", "supervise.allow_faults=true",
)


class Bits(NamedTuple):
    """What a run came to. `digest`: SHA-256 over every tensor of its last checkpoint, names and shapes included."""

    step: int
    digest: str
    tensors: int
    bytes: int


def storm() -> int:
    """Exit code. Raises StormUnequal, StormIncomplete, and what a build or a run refuses with."""
    platform = LocalPlatform()
    store = _store(platform)
    shown = Storm(STEPS, BLOWS)
    names = [folders.free_name("storm-quiet"), folders.free_name("storm")]
    quiet, broken = map(folders.named, names)
    print(
        f"{NODES} nodes and {SPARES} spare on this machine: a run that nobody touches, then the same one, "
        f"broken {len(BLOWS)} ways"
    )
    with showing(shown) as view, listening() as requests:
        demo = Demo(platform, shown, view, requests, lambda fault: strike(platform, broken, fault))
        for folder, run in ((quiet, shown.quiet), (broken, shown.broken)):
            code = demo.train(folder, store, run)
            if code != EXIT_DONE:
                break
    return compared(platform, shown, quiet, broken) if code == EXIT_DONE else _ended_early(platform, folder, code)


def _store(platform: Platform) -> str:
    """A little text with a tokenizer of bytes, made once."""
    store = f"{folders.stores_folder()}/{STORE}"
    if not os.path.isfile(f"{store}/card.json"):
        files, n = list[str](), 0
        for path in standard_library().files:
            n += os.path.getsize(path)
            if n > TEXT_BYTES_MAX:
                break
            files.append(path)
        with Bars() as bars:
            build(platform, files, store, BuildOptions(tokenizer="byte"), bars)
    return store


# --- one run -----------------------------------------------------------------------------------------


class Demo:
    """Trains one run after the other, and strikes the second. `strike`: breaks what a fault names; False: nothing of
    that is there just now."""

    def __init__(
        self, platform: Platform, shown: Storm, view: Plain | Live, requests: Requests, strike: Callable[[str], bool]
    ) -> None:
        self._platform, self._shown, self._view, self._requests = platform, shown, view, requests
        self._strike = strike

    def train(self, folder: str, store: str, run: Run) -> int:
        """To its end; the exit code of its command."""
        platform = self._platform
        platform.mkdir(f"{folder}/logs")
        process = platform.spawn(_command(os.path.basename(folder), store), launch.child_env(), log_path=_log(folder))
        run.began_ns = platform.boot_ns()
        try:
            code = self._follow(process, Tail(platform, f"{folder}/journal"), run)
        finally:
            self._leave(process)
        run.ended_ns = platform.boot_ns() if code == EXIT_DONE else 0
        self._view.tick(run, platform.boot_ns())
        return code

    def _follow(self, process: Process, tail: Tail, run: Run) -> int:
        while True:
            code = process.poll()
            with suppress(OSError):
                self._shown.take(run, tail.poll())
            if code is not None:
                return code
            self._view.tick(run, self._platform.boot_ns())
            blow = self._shown.due
            if blow is not None and self._strike(blow.fault):
                self._shown.dealt += 1
            for by in self._requests.take():
                process.send_signal(signal.SIGINT)
                self._view.say(f"{by}: saving, then stopping (once more kills)")
            self._platform.sleep(LOOK_S)

    def _leave(self, process: Process) -> None:
        """Whatever ended the demo, its run ends, too: its processes live on their own."""
        for _ in range(2):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(LEAVE_S / 2)


def _command(name: str, store: str) -> tuple[str, ...]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    train = ("train", "first-light", "--run", name, "--data", store, *settings)
    return (sys.executable, "-P", "-m", "packtrain", *train, "--nodes", str(NODES), "--spares", str(SPARES))


def _log(folder: str) -> str:
    return f"{folder}/logs/watcher.log"


def _ended_early(platform: Platform, folder: str, code: int) -> int:
    if code == EXIT_AGAIN:
        print(f"stopped; what it did is in {folder}, and `packtrain storm-demo` begins anew")
    else:
        print(f"{folder} ended with {code}: {last_line(platform, _log(folder))}\n  its output is in {_log(folder)}")
    return code


def strike(platform: Platform, folder: str, fault: str) -> bool:
    """As `packtrain break` does it; False: just now there is nothing to strike, or nobody who would."""
    live = local.find(platform, folder)
    if live is None:
        return False
    try:
        ask(platform, live.coordinator, "break", fault=fault, by="storm-demo")
    except PacktrainError:
        return False
    return True


# --- what it came to ---------------------------------------------------------------------------------


def bits(platform: Platform, folder: str) -> Bits:
    """Of the last checkpoint of a run, every byte of it verified. Raises CheckpointDamaged, CheckpointUnreadable."""
    point = CommitLog(platform, f"{folder}/commits").restore_point()
    if point is None:
        return Bits(0, "", 0, 0)
    checkpoint, total, n = open_checkpoint(platform, folder, point), hashlib.sha256(), 0
    for name in sorted(checkpoint.specs):
        tensor = checkpoint.read(name)
        total.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode() + tensor.tobytes())
        n += tensor.nbytes
    return Bits(point.step, total.hexdigest(), len(checkpoint.specs), n)


def compared(platform: Platform, shown: Storm, quiet: str, broken: str) -> int:
    """The ledger of the broken run, and the verdict on both folders. Raises StormUnequal, StormIncomplete."""
    facts, name = report.gather(platform, broken).facts, os.path.basename(broken)
    print("\n".join(["", *incidents.lines(shown.incidents.all), "", *report.seconds(facts), ""]))
    both = [bits(platform, folder) for folder in (quiet, broken)]
    for folder, one in zip((quiet, broken), both):
        told = f"step {one.step}, {one.tensors} tensors, {bytes_text(one.bytes)}, SHA-256 {one.digest}"
        print(f"{os.path.basename(folder):<16}{told}")
    if both[0] != both[1]:
        raise StormUnequal(
            "the broken run did not end with the bits of the one that nobody touched", where=broken,
            fix=f"packtrain report {name}; please report this with both run folders",
        )
    print(f"the same bits, through {report.counted(len(shown.struck), 'fault')}\nnext: packtrain report {name}")
    if len(shown.struck) < len(shown.blows) or any(one.healed is None for one in shown.struck):
        raise StormIncomplete(
            f"the run was over before all {len(shown.blows)} faults had struck and were healed", where=broken,
            fix="give the command again on a machine with less other work",
        )
    return EXIT_DONE
