"""From a fault to the next completed step: the same torch DDP script under several launchers, and our own trainer.

Command:  make bench-recovery       (PEER=/path/to/python: an interpreter with torch 2.13.0; without it only ours.
          NVRX=, TORCHFT=: interpreters with nvidia-resiliency-ext and torchft as well; ROUNDS=10, ONLY=a;b for some.)

examples/ddp.py on two ranks (gloo, 20 ms a step, a checkpoint every 5 steps) is started, a rank is killed once it has
stepped for a while, ranks 0 and 1 in turn, and the clock stops at the first step of the next incarnation. Contenders
take turns, each alone on the machine. torchft has a script of its own (bench/recovery_torchft.py): the surviving
replica goes on, and what is timed is its next step but one (the one under way may still end). Our trainer is as small
as one can be (`packtrain train --nodes 2`), and its steps are those of its journal.

`--preload torch` leaves out what torch itself imports at the first use of DDP or an optimizer, torch._dynamo: another
contender has that, too. A standby is waited for before the fault (a program without beats has settled after 60 s).

SIGSTOP is given once to each launcher, and waited for `STOP_BOUND_S` at most: torchrun looks at exits alone, and a rank
that is stopped does not exit; the others wait in a collective for as long as its timeout (gloo: 30 minutes).
Goal: kill at half of the best other, stretch a third; our trainer under 2 s.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.core.journal import read_folder
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import StepDone

ROUNDS = int(os.environ.get("ROUNDS", "10"))
STOP_BOUND_S = float(os.environ.get("STOP_BOUND_S", "60"))
START_BOUND_S = KILL_BOUND_S = 120.0
STEPS_BEFORE = 20
"""Steps that are seen before a fault."""
PLATFORM = LocalPlatform()
ROOT = Path(__file__).resolve().parent.parent
TOKEN = "RECOVERY_BENCH"
"""Variable by which the processes of a contender are found."""
DDP = (str(ROOT / "examples/ddp.py"), "OUT", "--steps", "1000000", "--step-s", "0.02", "--save-every", "5")
TINY = (
    "train.minutes_max=0", "train.steps=1000000", "train.eval_every_steps=1000000", "train.sample_tokens=8",
    "model.layers=1", "model.embed=64", "model.mlp=64", "model.heads=1", "model.kv_heads=1", "data.length=64",
    "checkpoint.every_steps=20", "supervise.attempts_without_progress=1000",
)


@dataclass(frozen=True)
class Step:
    """A completed step: when (seconds since boot), and of which process."""

    at_s: float
    pid: int


@dataclass
class Contender:
    """`command`: OUT stands for a folder of this start. `steps`: reads those that are completed from there."""

    name: str
    command: tuple[str, ...]
    steps: Callable[[Path], list[Step]]
    absent: str = ""
    survivor: bool = False
    """Who lives goes on, and is not started again."""
    standbys: int = 0
    """How many are warm before a fault."""
    kills_s: list[float] = field(default_factory=list)
    stop: str = "not tried"


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def steps_of_ddp(out: Path) -> list[Step]:
    lines = [path.read_text().split("\n") for path in out.glob("steps*.csv")]
    rows = [line.split(",") for part in lines for line in part[:-1]]
    return sorted((Step(float(row[1]), int(row[3])) for row in rows), key=lambda step: step.at_s)


def steps_of_ours(out: Path) -> list[Step]:
    """Each incarnation of the trainer writes a journal of its own."""
    entries = read_folder(PLATFORM, f"{out}/runs/tiny/journal").entries
    return [Step(e.ns / 1e9, hash(e.writer)) for e in entries if isinstance(e.record, StepDone)]


def ranks_of(token: str) -> dict[int, list[int]]:
    """Rank -> processes of a contender that have it."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            env = dict(one.partition(b"=")[::2] for one in (entry / "environ").read_bytes().split(b"\0"))
            if env.get(TOKEN.encode()) == token.encode() and b"RANK" in env:
                found.setdefault(int(env[b"RANK"]), []).append(int(entry.name))
    return found


@contextmanager
def started(contender: Contender) -> Iterator[tuple[Path, str]]:
    """A start in a folder of its own, and nothing left of it afterwards."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        out, token = Path(name), Path(name).name
        env = {**os.environ, TOKEN: token, "PACKTRAIN_HOME": name, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [name if word == "OUT" else word for word in contender.command]
        log = open(out / "launcher.log", "w")
        launcher = subprocess.Popen(
            command, env=env, cwd=name, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield out, token
        finally:
            end(launcher, token)
            log.close()


def end(launcher: subprocess.Popen[bytes], token: str) -> None:
    """Asked twice, which ends everything at once under each of the launchers; what is left is killed by its token."""
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(1)
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(10)
    launcher.kill()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
    launcher.wait()


def wait(seen: Callable[[], float | None], bound_s: float) -> float | None:
    end_s = now_s() + bound_s
    while now_s() < end_s:
        found = seen()
        if found is not None:
            return found
        PLATFORM.sleep(0.01)
    return None


def recover_s(contender: Contender, rank: int, signum: signal.Signals, bound_s: float) -> float | None:
    """Seconds from the signal to the next completed step; None: none within the bound."""
    with started(contender) as (out, token):
        if wait(lambda: _ready(contender, out), START_BOUND_S) is None:
            contender.absent = f"it does not step: {last_line(out)}"
            return None
        pids = {step.pid for step in contender.steps(out)}
        victim = min(ranks_of(token)[rank])
        at_s = now_s()
        os.kill(victim, signum)
        return wait(lambda: _first_after(contender, out, at_s, pids), bound_s)


def _ready(contender: Contender, out: Path) -> float | None:
    """It steps, and its standbys are warm: they are made when the job has settled, not in the middle of its start."""
    if len(contender.steps(out)) < STEPS_BEFORE:
        return None
    return now_s() if len(list(standbys(out))) >= contender.standbys else None


def standbys(out: Path) -> Iterator[Path]:
    """Sockets of those that are ready, of a run on one node."""
    for live in out.glob("runs/*/live.json"):
        with suppress(OSError, ValueError):
            yield from Path(json.loads(live.read_text())["base"], "n0").glob("standby-*[0-9]")


def _first_after(contender: Contender, out: Path, at_s: float, pids: set[int]) -> float | None:
    after = [step for step in contender.steps(out) if step.at_s > at_s]
    if contender.survivor:
        return after[1].at_s - at_s if len(after) > 1 else None
    return next((step.at_s - at_s for step in after if step.pid not in pids), None)


def last_line(out: Path) -> str:
    lines = (out / "launcher.log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"


# --- who takes part ------------------------------------------------------------------------------------


def beside(python: str, name: str) -> str:
    """A script in the same folder as an interpreter."""
    return str(Path(python).parent / name)


def ours(*options: str, script: tuple[str, ...], peer: str) -> tuple[str, ...]:
    sets = ("--set", "supervise.attempts_without_progress=1000")
    return (sys.executable, "-m", "packtrain", "run", "--procs-per-node", "2", *sets, *options, "--", peer, *script)


def absence(name: str, variable: str) -> str:
    """Why a contender cannot take part; empty: it can."""
    python = os.environ.get(variable, "")
    if not python:
        return f"{variable} names no interpreter with {name}"
    return "" if shutil.which(python) else f"{python} is not there"


def launchers() -> list[Contender]:
    peer, nvrx, torchft = (os.environ.get(name, "python") for name in ("PEER", "NVRX", "TORCHFT"))
    no_peer = absence("torch", "PEER")
    beats = (str(ROOT / "examples/ddp_beats.py"), *DDP[1:])
    world = ("--nproc-per-node", "2", "--max-restarts", "1000")
    known = subprocess.run(
        [sys.executable, "-m", "packtrain", "run", "--help"], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    ).stdout
    no_standby = no_peer or ("" if "--preload" in known else "packtrain run has no --preload yet")
    return [
        Contender("torchrun", (beside(peer, "torchrun"), *world, *DDP), steps_of_ddp, no_peer),
        Contender("packtrain run", ours(script=DDP, peer=peer), steps_of_ddp, no_peer),
        Contender(
            "packtrain run --preload torch", ours("--preload", "torch", script=DDP, peer=peer), steps_of_ddp,
            no_standby, standbys=2,
        ),
        Contender(
            "the same and torch._dynamo",
            ours("--preload", "torch", "--preload", "torch._dynamo", script=DDP, peer=peer), steps_of_ddp, no_standby,
            standbys=2,
        ),
        Contender("packtrain run, with beats", ours(script=beats, peer=peer), steps_of_ddp, no_peer),
        Contender(
            "NVRx ft_launcher", (beside(nvrx, "ft_launcher"), *world, "--ignore-missing-fault-tol-cfg", *DDP),
            steps_of_ddp, absence("nvidia-resiliency-ext", "NVRX"),
        ),
        Contender(
            "torchft, survivor", (torchft, str(ROOT / "bench/recovery_torchft.py"), "OUT"), steps_of_ddp,
            absence("torchft", "TORCHFT"), survivor=True,
        ),
    ]


def trainer(store: Path) -> Contender:
    sets = [word for value in TINY for word in ("--set", value)]
    command = ("train", "first-light", "--data", str(store), "--run", "tiny", "--nodes", "2", *sets)
    return Contender("packtrain train", (sys.executable, "-m", "packtrain", *command), steps_of_ours)


def build(folder: Path) -> Path:
    """A small store of text."""
    texts = folder / "texts"
    texts.mkdir()
    for n in range(60):
        (texts / f"{n}.txt").write_text(f"Mule number {n} carries {n * 3} loaves, and mule {n + 1} follows.")
    command = (sys.executable, "-m", "packtrain", "data", "build", str(texts), "--out", str(folder / "built"))
    subprocess.run(
        [*command, "--tokenizer", "byte"], env={**os.environ, "PYTHONPATH": str(ROOT), "PACKTRAIN_HOME": str(folder)},
        check=True, capture_output=True,
    )
    return folder / "built"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="recovery-store-") as folder:
        contenders = [*launchers(), trainer(build(Path(folder)))]
        only = os.environ.get("ONLY", "")
        contenders = [one for one in contenders if not only or one.name in only.split(";")]
        for n in range(ROUNDS):
            for one in contenders:
                _kill(one, n)
        for one in contenders:
            _stop(one)
    print(table(contenders))


def _kill(one: Contender, n: int) -> None:
    if one.absent:
        return
    took_s = recover_s(one, n % 2, signal.SIGKILL, KILL_BOUND_S)
    one.kills_s += [took_s] if took_s is not None else []
    print(f"round {n + 1}, {one.name}: {took_s if took_s is None else round(took_s, 2)} s", file=sys.stderr)


def _stop(one: Contender) -> None:
    if one.absent:
        return
    took_s = recover_s(one, 1, signal.SIGSTOP, STOP_BOUND_S)
    one.stop = f"{took_s:.1f} s" if took_s is not None else f"not in {STOP_BOUND_S:g} s"
    print(f"stopped, {one.name}: {one.stop}", file=sys.stderr)


def table(contenders: list[Contender]) -> str:
    lines = [f"{'':<32}{'SIGKILL: median':>16}{'range':>14}{'of':>5}{'SIGSTOP':>16}"]
    for one in contenders:
        if one.absent:
            lines.append(f"{one.name:<32}absent: {one.absent}")
            continue
        kills_s = one.kills_s or [float("nan")]
        figures = f"{statistics.median(kills_s):14.2f} s{min(kills_s):8.2f}-{max(kills_s):.2f}"
        lines.append(f"{one.name:<32}{figures}{len(one.kills_s):>5}{one.stop:>16}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
