"""What `packtrain doctor` looks at: OK, WARN, FAIL or UNKNOWN each. A check that breaks is UNKNOWN, never OK."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from packtrain.cli import extras, folders
from packtrain.core.errors import PacktrainError
from packtrain.core.memory import budget_for, container_left, machine_left
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.stores import Store
from packtrain.core.units import GIB, bytes_text, duration_text

if TYPE_CHECKING:
    from packtrain.checkpoint.config import Mirror
    from packtrain.checkpoint.mirrors import State

OK, WARN, FAIL, UNKNOWN = "OK", "WARN", "FAIL", "UNKNOWN"
DEVICES_S_MAX = 60.0
LEFT_S, LEFT_BYTES_MIN = 3600.0, 64 << 20
"""What lies in memory and has not changed for so long, and is so large, is told."""
DEVICES = "import jax; d = jax.devices(); print('devices:', len(d), d[0].platform, d[0].device_kind)"


class Finding(NamedTuple):
    verdict: str
    subject: str
    found: str
    fix: str = ""


def checkup(platform: Platform | None = None) -> list[Finding]:
    """All checks in order; none can stop the others."""
    platform = platform or LocalPlatform()
    checks: dict[str, Callable[[Platform], Finding]] = {
        "python": python, "cores": cores, "memory": memory, "disk": disk, "shared memory": shared_memory,
        "left in memory": left_in_memory, "links": links, "extra data": lambda _: extra("data", extras.missing("data")),
        "extra train": lambda _: extra("train", extras.missing("train")), "devices": devices,
    }
    return [safely(subject, check, platform) for subject, check in checks.items()]


def safely(subject: str, check: Callable[[Platform], Finding], platform: Platform) -> Finding:
    try:
        return check(platform)
    except Exception as error:  # a check that breaks says nothing about the machine
        return Finding(UNKNOWN, subject, f"could not be looked at: {type(error).__name__}: {error}")


def store_findings(platform: Platform, store: Store) -> list[Finding]:
    """What a place for checkpoints really does. It must give back what it took; the rest only limits its use."""
    from packtrain.core.probe import probe

    fixes = {
        "read after write": "nothing can be kept here", "list after write": "what is lost or damaged cannot be found",
        "exclusive create": "it can hold copies, but no commit log",
        "versions": "turn versioning on, and what is overwritten or deleted can be had back",
        "object lock": "make a bucket with object lock, and nobody can delete checkpoints before their time",
    }
    findings = []
    for title, answer in probe(platform, store).named().items():
        verdict = OK if answer.holds else UNKNOWN if answer.holds is None else WARN
        if not answer.holds and title == "read after write":
            verdict = FAIL
        findings.append(Finding(verdict, title, answer.words, fixes[title] if answer.holds is False else ""))
    return findings


def mirror_findings(platform: Platform, run_folder: str) -> list[Finding]:
    """Of each mirror of a run: where, how often, what it has, and what the place really does."""
    from packtrain.checkpoint.mirrors import read_state
    from packtrain.cli.retained import config_of
    from packtrain.core.stores import open_store

    mirrors = config_of(platform, run_folder).mirrors
    findings = [] if mirrors else [Finding(WARN, "mirrors", "none", "one disk is one accident: see docs/checkpoint.md")]
    for mirror in mirrors:
        state = read_state(platform, run_folder, mirror.name, mirror.place)
        findings.append(Finding(OK, f"mirror {mirror.name}", _mirror_words(mirror, state, platform.wall_s())))
        try:
            findings += store_findings(platform, open_store(platform, mirror.store))
        except PacktrainError as error:
            findings.append(Finding(FAIL, f"mirror {mirror.name}", error.what, error.fix))
    return findings


def _mirror_words(mirror: Mirror, state: State, now_s: float) -> str:
    words = [mirror.place, f"every {duration_text(mirror.every_s)}" if mirror.every_s else "each save"]
    words += [f"at most {bytes_text(int(mirror.bytes_per_s_max))}/s"] if mirror.bytes_per_s_max else []
    words += [f"locked for {mirror.lock_days} days"] if mirror.lock_days else []
    last = state.held[-1] if state.held else None
    ago = "" if last is None else duration_text(max(0.0, now_s - last.began_s))
    return ", ".join([*words, "has nothing yet" if last is None else f"has step {last.step} ({ago} ago)"])


def python(platform: Platform) -> Finding:
    """Which one; an older one than 3.11 could not have come this far."""
    return Finding(OK, "python", f"{sys.version.split()[0]} at {sys.executable}")


def cores(platform: Platform) -> Finding:
    """Those this process may use, and what a container's quota leaves of them."""
    n = len(os.sched_getaffinity(0))
    quota = cores_quota(_text(platform, "/sys/fs/cgroup/cpu.max"))
    if quota is not None and quota < n:
        return Finding(OK if quota >= 2 else WARN, "cores", f"{n}, of which the container may use {quota:g}")
    return Finding(OK, "cores", str(n)) if n > 1 else Finding(WARN, "cores", "1", "training and saving share it")


def cores_quota(text: str) -> float | None:
    """`200000 100000` (cgroup v2 cpu.max) -> 2.0; None: no limit, or not readable."""
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def memory(platform: Platform) -> Finding:
    free, left = machine_left(platform), container_left(platform)
    if free is None:
        raise ValueError("/proc/meminfo does not say what is available")
    found = f"{bytes_text(free)} free"
    if left is not None:
        found, free = f"{found}, {bytes_text(left)} left to the container", min(free, left)
    return Finding(OK, "memory", found) if free >= 4 * GIB else Finding(
        WARN, "memory", found, "first-light needs about 4 GiB; end other programs or set model.layers lower"
    )


def _text(platform: Platform, path: str) -> str:
    return platform.read(path).decode() if platform.exists(path) else ""


def disk(platform: Platform) -> Finding:
    folder = _nearest(platform, folders.runs_folder())
    free = platform.free_bytes(folder)
    found = f"{bytes_text(free)} free in {folder}"
    return Finding(OK, "disk", found) if free >= 2 * GIB else Finding(
        WARN, "disk", found, "first-light needs about 2 GiB; free some or set PACKTRAIN_HOME to another disk"
    )


def shared_memory(platform: Platform) -> Finding:
    """Where saves are handed to the carrier without touching a disk, and copies are kept for a restart."""
    if not platform.exists("/dev/shm"):
        return Finding(WARN, "shared memory", "no /dev/shm", "saves are buffered in the run folder instead: slower")
    from packtrain.checkpoint.slots import BUFFERS, KEPT, LENT, MEMORY_SHARE_MAX, SLOTS

    free, budget = platform.free_bytes("/dev/shm"), budget_for(platform, "/dev/shm", MEMORY_SHARE_MAX)
    peers, slots, saves = (bytes_text(budget.bytes / images) for images in (SLOTS + LENT + KEPT, SLOTS, BUFFERS))
    found = (
        f"{bytes_text(budget.left.bytes)} {budget.left.where}: a state up to {slots} is also kept in memory (up to "
        f"{peers} at a peer node too), up to {saves} it is saved through it"
    )
    return Finding(OK, "shared memory", found) if free >= GIB // 2 else Finding(
        WARN, "shared memory", found, "larger states are buffered on disk; docker: --shm-size=2g"
    )


def left_in_memory(platform: Platform) -> Finding:
    """Copies of runs that have made none for long: killed and never gone on with, they stay until the machine restarts.
    """
    from packtrain.checkpoint.slots import ours_in_memory

    old = [left for left in ours_in_memory(platform) if left.age_s > LEFT_S and left.bytes > LEFT_BYTES_MIN]
    if not old:
        return Finding(OK, "left in memory", "nothing by runs that do not train")
    total, age = bytes_text(sum(left.bytes for left in old)), duration_text(min(left.age_s for left in old))
    return Finding(
        WARN, "left in memory", f"{total} by runs that made no copy for {age}",
        f"if none of them trains, is paused or is to begin from there: rm -r {' '.join(left.folder for left in old)}",
    )


def links(platform: Platform) -> Finding:
    """The commit log needs link(2) to refuse a second link to one name; tried where runs will be."""
    from packtrain.checkpoint.commits import CommitLog

    folder = _nearest(platform, folders.runs_folder())
    try:
        CommitLog(platform, folder).probe()
    except PacktrainError as error:
        return Finding(FAIL, "links", error.what, error.fix)
    return Finding(OK, "links", f"hard links are exclusive in {folder}")


def _nearest(platform: Platform, folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    while not platform.is_dir(folder):
        folder = os.path.dirname(folder)
    return folder


def extra(name: str, absent: list[str]) -> Finding:
    if absent:
        return Finding(WARN, f"extra {name}", f"{', '.join(absent)} not found", f"pip install 'packtrain[{name}]'")
    return Finding(OK, f"extra {name}", "installed")


def devices(platform: Platform) -> Finding:
    """Asked of a process of its own: a broken driver may hang or kill whoever asks."""
    if extras.missing("train"):
        return Finding(UNKNOWN, "devices", "not asked: JAX is not installed")
    log = f"/tmp/packtrain-devices-{platform.token(4)}.log"
    platform.write_new(log, b"", 0o600)
    try:
        process = platform.spawn([sys.executable, "-P", "-c", DEVICES], dict(os.environ), log_path=log)
        status = process.wait(DEVICES_S_MAX)
        if status is None:
            process.send_signal(9)
            process.wait()
        return devices_finding(status, platform.read(log).decode(errors="replace"))
    finally:
        platform.unlink(log)


def devices_finding(status: int | None, output: str) -> Finding:
    """From how the asking process ended and what it printed."""
    if status is None:
        return Finding(FAIL, "devices", f"no answer in {DEVICES_S_MAX:g} s", "look at the driver: dmesg, nvidia-smi")
    line = next((line for line in output.splitlines() if line.startswith("devices: ")), None)
    if status != 0 or line is None:
        last = output.strip().splitlines()[-1:] or ["no output"]
        return Finding(FAIL, "devices", f"JAX cannot start: {last[0][:200]}", "see that jax and the driver match")
    return Finding(OK, "devices", line.removeprefix("devices: "))
